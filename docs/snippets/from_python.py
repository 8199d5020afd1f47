"""What the command line does, from Python."""

import coterie
from coterie import FeSEM

method = FeSEM(num_clusters=4)
result = coterie.run(
    method,
    "rotated-digits",
    rounds=4,
    clients=20,
    lr=0.1,
    out="runs",
    name="a",
    progress=True,
    observer=[lambda row: print(row["round"], row["accuracy"]["macro"])],
    set={"scenario.alpha": 10},
)
result = coterie.run(  # the same settings, with more rounds: goes on
    method,
    "rotated-digits",
    rounds=8,
    clients=20,
    lr=0.1,
    out="runs",
    name="a",
    resume=True,
    set={"scenario.alpha": 10},
)
again = coterie.open_run("runs/a")
table = coterie.compare(["fedavg", method], "rotated-digits", seeds=2, rounds=4)
table = coterie.sweep({"work.lr": [0.05, 0.1]}, ["fesem"], "rotated-digits", rounds=4)
choice = coterie.choose_k("rotated-digits", last=5)
