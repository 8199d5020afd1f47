"""Reports: run folders -> one self-contained page. Reads only what `runs` wrote.

flow.py     clusters by round; map.py: PCA and t-SNE of the models; compare.py: several runs, mean and test
payload.py  all of it, small and rounded, as one JSON value
page.py     the page around it: page.css, charts.js and report.js are part of the package
"""

from coterie.runs.reading import RunData, find_runs, read_run
from coterie.views.report.page import write_report

__all__ = ["RunData", "find_runs", "read_run", "write_report"]
