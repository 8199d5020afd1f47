"""Write patients.csv: 12 hospitals, half of which react to the dose in the opposite way."""

import csv
import random

draw = random.Random(0)
with open("patients.csv", "w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["hospital", "age", "pressure", "dose", "outcome"])
    for number in range(12):
        sign = 1 if number % 2 == 0 else -1
        for _ in range(100):
            age, pressure, dose = draw.uniform(20, 90), draw.gauss(120, 15), draw.gauss(0, 1)
            better = sign * dose + (age - 55) / 70 + draw.gauss(0, 0.2) > 0
            table.writerow(
                [f"hospital-{number}", f"{age:.1f}", f"{pressure:.0f}", f"{dose:.3f}", "better" if better else "same"]
            )
