"""The first ten lines: train, look, and take a client's model."""

import coterie
from coterie import plots

result = coterie.run("coterie", "rotated-digits", rounds=20)
print(f"accuracy {result.summary['accuracy']['macro']:.4f}")  # mean over clients
print(result.summary["cluster_sizes"])  # the kinds that were found
model = result.personal_model("r090-000")  # a torch.nn.Module for that client
print(result.frame().tail(3))  # a pandas table of rounds; frame("clients"): of clients
plots.model_map(result).savefig("model-map.png")  # every plot of a report is a function
