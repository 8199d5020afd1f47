"""Reports: run folders -> one self-contained HTML page.

flow.py     clusters by round; map.py: PCA and t-SNE of the models; compare.py: several runs, means and tests
payload.py  the data of the page as one JSON value, thinned out and rounded
page.py     the HTML; page.css, charts.js and report.js are embedded in it
"""

from coterie.runs.reading import RunData, find_runs, read_run
from coterie.views.report.page import write_report

__all__ = ["RunData", "find_runs", "read_run", "write_report"]
