"""Pictures, as functions that return matplotlib Figures.

    plots.label_bubbles(federation).savefig("labels.png")      # of a federation, before anything is trained
    plots.accuracy("runs/rotated-digits-fesem-s0")             # of a run: a folder, or the Result of coterie.run
    plots.curves(["runs/a", "runs/b"], "f1")                   # of several runs

Matplotlib is the optional extra `report` and is imported when a picture is made. Every picture has `dark=True`.
"""

from coterie.views.plots.clients import client_accuracy, held_labels, member_samples, pseudo_confusion, pseudo_samples
from coterie.views.plots.federation import classes_that_hold, group_samples, k_curves, label_bubbles
from coterie.views.plots.run import (
    accuracy,
    accuracy_by_bytes,
    bytes_sent,
    churn,
    cluster_sizes,
    confusion,
    f1,
    flow,
    loss,
    model_map,
    seconds,
)
from coterie.views.plots.several import PICTURES, curves, picture_names, save_all
from coterie.views.plots.style import DARK, LIGHT

__all__ = [
    "DARK",
    "LIGHT",
    "PICTURES",
    "accuracy",
    "accuracy_by_bytes",
    "bytes_sent",
    "churn",
    "classes_that_hold",
    "client_accuracy",
    "cluster_sizes",
    "confusion",
    "curves",
    "f1",
    "flow",
    "group_samples",
    "held_labels",
    "k_curves",
    "label_bubbles",
    "loss",
    "member_samples",
    "model_map",
    "picture_names",
    "pseudo_confusion",
    "pseudo_samples",
    "save_all",
    "seconds",
]
