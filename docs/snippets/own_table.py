"""A pandas table: one client for each hospital."""

import pandas

import coterie

table = pandas.read_csv("patients.csv")
clients = {name: rows.drop(columns="hospital") for name, rows in table.groupby("hospital")}
federation = coterie.Federation.from_clients(clients, label="outcome", standardize=True)
result = coterie.run("coterie", federation, "mlp", rounds=10)
print(f"accuracy {result.summary['accuracy']['macro']:.4f}", result.clusters)
