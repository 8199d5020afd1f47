"""Plots: functions that return matplotlib Figures.

    plots.label_bubbles(federation).savefig("labels.png")      # a federation, before training
    plots.accuracy("runs/rotated-digits-fesem-s0")             # a run: its folder, or the Result of coterie.run
    plots.curves(["runs/a", "runs/b"], "f1")                   # several runs

Matplotlib is the optional extra `report`; it is imported when a plot is drawn. Every plot takes `dark=True`.
"""

from coterie.views.plots.labels import classes_that_hold, held_labels, label_bubbles
from coterie.views.plots.run import (
    accuracy,
    accuracy_by_bytes,
    bytes_sent,
    churn,
    client_accuracy,
    cluster_sizes,
    confusion,
    f1,
    flow,
    loss,
    model_map,
    seconds,
)
from coterie.views.plots.samples import group_samples, member_samples, pseudo_confusion, pseudo_samples
from coterie.views.plots.several import PICTURES, curves, k_curves, picture_names, save_all
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
