"""Every plot of a report is a function; it takes run folders or results."""

from pathlib import Path

import coterie
from coterie import plots

result = coterie.run("fesem", "rotated-digits", rounds=5, out="runs", name="a")
coterie.run("fedavg", "rotated-digits", rounds=5, out="runs", name="b")

plots.accuracy("runs/a").savefig("accuracy.png")
plots.model_map(result, by="group", method="tsne", dark=True)  # a Result, with or without a folder
plots.curves(["runs/a", "runs/b"], "f1", against="bytes")
plots.save_all(["runs/a"], Path("pictures"))
