"""Print the accuracy of every round while a run goes on."""

import coterie

coterie.run("fesem", "rotated-digits", rounds=5, observer=lambda row: print(row["round"], row["accuracy"]["macro"]))
