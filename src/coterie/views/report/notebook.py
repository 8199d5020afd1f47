"""A run in a notebook: its headline numbers and its curve, as HTML without scripts."""

from __future__ import annotations

from html import escape

import numpy as np

from coterie.runs.reading import RunData
from coterie.views.report.payload import run_headline

_WIDE, _HIGH = 320, 90


def run_html(run: RunData) -> str:
    """What `Result._repr_html_` shows; every text is escaped."""
    cells = "".join(
        f"<tr><th style='text-align:left;font-weight:normal;opacity:.7'>{escape(name)}</th>"
        f"<td style='text-align:right'><b>{escape(value)}</b></td>"
        f"<td style='text-align:left;opacity:.7'>{escape(meaning)}</td></tr>"
        for name, value, meaning in run_headline(run)
    )
    where = "" if run.path is None else f"<p style='opacity:.7'>{escape(str(run.path))}</p>"
    return f"<div><h4>{escape(run.title)}</h4><table>{cells}</table>{_curve(run)}{where}</div>"


def _curve(run: RunData) -> str:
    """Accuracy (or loss) by round, with the middle 50 % of the clients."""
    name = "accuracy" if run.last("accuracy") is not None else "loss"
    values = run.curves.get(name, np.zeros(0))
    known = np.isfinite(values)
    if known.sum() < 2:
        return ""
    x, y = run.rounds[known].astype(float), values[known]
    band = run.spread[name][known][:, [1, 3]]
    has_band = bool(np.isfinite(band).all())
    all_values = np.append(band, y) if has_band else y
    low, high = all_values.min(), all_values.max()

    def place(rounds: np.ndarray, heights: np.ndarray) -> str:
        across = _WIDE * (rounds - x[0]) / max(1e-9, x[-1] - x[0])
        down = 4 + (_HIGH - 8) * (1 - (heights - low) / max(1e-12, high - low))
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, down, strict=True))

    area = ""
    if has_band:
        outline = f"{place(x, band[:, 1])} {place(x[::-1], band[::-1, 0])}"
        area = f"<polygon points='{outline}' fill='#0072B2' opacity='0.2'/>"
    line = f"<polyline points='{place(x, y)}' fill='none' stroke='#0072B2' stroke-width='2'/>"
    about = f"{name} by round, from {y[0]:.4g} to {y[-1]:.4g}"
    return (
        f"<svg role='img' width='{_WIDE}' height='{_HIGH}' viewBox='0 0 {_WIDE} {_HIGH}'>"
        f"<title>{about}</title>{area}{line}</svg><div style='opacity:.7'>{about}</div>"
    )
