"""`coterie data show`: how a dataset is partitioned, in numbers, pictures and one page, before any training."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from coterie.cli.flags import JsonFlag, QuietFlag, takes
from coterie.cli.output import file_stem, new_folder, say, stdout
from coterie.runs.settings import RunSettings, Schedule, Tables, merge

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from coterie.data.federation import Federation, Split
    from coterie.runs.experiment import Experiment


@takes(
    (RunSettings, "scenario", "clients", "data_dir"), (Schedule, "seed"), settable=("scenario", "dataset"), config=False
)
def show(
    *,
    name: Annotated[str, typer.Argument(help="Named dataset, or path to your own .npz file.", show_default=False)],
    tables: Tables,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the pictures and the page; by default data-NAME.")
    ] = None,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Show how the data is partitioned. Writes numbers, a label-by-client chart, sample pictures and a page of them."""
    from coterie.runs.experiment import resolve

    # FedAvg takes any number of clients; nothing is trained.
    experiment = resolve(merge(tables, {"run": {"algorithm": "fedavg", "dataset": name}}))
    folder = new_folder(Path(f"data-{file_stem(experiment.dataset)}") if out is None else out)
    say(f"reading {experiment.dataset}", quiet or json_)
    federation = experiment.federation()
    found = describe(experiment, federation)
    found["files"] = write(folder, found, federation)
    if json_:
        print(json.dumps(found))
    else:
        stdout().print(_table(found))


# ---- the numbers ----


def describe(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """What there is to know about a federation in numbers, as `--json` prints it."""
    import numpy as np

    from coterie.views import plots

    counts = federation.label_counts("train", "valid").numpy()  # [N, L]
    sizes = {name: federation.split(name).sizes for name in ("train", "valid", "test")}
    own = (sizes["train"] + sizes["valid"]).numpy()
    groups = None if federation.groups is None else federation.groups.tolist()
    assert experiment.scenario is not None
    return {
        "dataset": experiment.dataset,
        "scenario": experiment.scenario.name,
        "settings": experiment.scenario.values,
        "seed": experiment.schedule.seed,
        "clients": len(federation),
        "samples": {name: _distinct(federation.split(name)) for name in ("train", "valid", "test")},
        "input_shape": list(federation.input_shape),
        "classes": federation.num_classes or None,
        "groups": _groups(federation, own),
        "samples_per_client": {"min": int(own.min()), "median": float(np.median(own)), "max": int(own.max())},
        "label_skew": float(plots.classes_that_hold(counts).mean()) if federation.num_classes else None,
        "moves": [move.round for move in federation.moves],
        "digest": federation.digest(),
        "per_client": [
            {
                "name": client,
                "group": None if groups is None else groups[i],
                "train": int(sizes["train"][i]),
                "valid": int(sizes["valid"][i]),
                "test": int(sizes["test"][i]),
                "labels": counts[i].tolist() if federation.num_classes else None,
            }
            for i, client in enumerate(federation.names)
        ],
    }


def _distinct(split: Split) -> int:
    """Samples of a split; a shard that several clients share, such as the test set of their kind, counts once."""
    return int(split.offsets.diff()[split.shard.unique()].sum())


def _groups(federation: Federation, own: np.ndarray[Any, Any]) -> list[dict[str, Any]] | None:
    if federation.groups is None:
        return None
    member = federation.groups.numpy()
    return [
        {
            "group": group,
            "name": name,
            "clients": int((member == group).sum()),
            "samples": int(own[member == group].sum()),
        }
        for group, name in federation.group_names().items()
    ]


def _rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers in words, for the terminal and the page."""
    samples, each, groups = found["samples"], found["samples_per_client"], found["groups"]
    settings = ", ".join(f"{key}={value}" for key, value in found["settings"].items())
    rows = [
        ("scenario", f"{found['scenario']} ({settings})" if settings else found["scenario"]),
        ("clients", f"{found['clients']:,}"),
        ("samples", "  ".join(f"{name} {samples[name]:,}" for name in ("train", "valid", "test"))),
        ("shape of a sample", " x ".join(str(extent) for extent in found["input_shape"])),
        ("classes", "none: targets are numbers" if found["classes"] is None else f"{found['classes']:,}"),
        ("true groups", "none" if groups is None else f"{len(groups)}: {_sizes(groups)}"),
        (
            "samples per client",
            f"min {each['min']:,}  median {each['median']:,g}  max {each['max']:,}  (train + valid)",
        ),
    ]
    if found["label_skew"] is not None:
        rows.append(("label skew", f"{found['label_skew']:.2f} classes hold 80 % of a client's samples, on average"))
    if found["moves"]:
        rows.append(("clients change group", "in round " + ", ".join(str(round) for round in found["moves"])))
    return [*rows, ("seed", str(found["seed"])), ("digest", found["digest"])]


def _sizes(groups: list[dict[str, Any]], most: int = 8) -> str:
    said = [f"{group['name']} ({group['clients']:,} clients)" for group in groups[:most]]
    return ", ".join(said) + (" ..." if len(groups) > most else "")


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(title=found["dataset"], show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for key, value in _rows(found):
        table.add_row(key, value)
    for key, path in found["files"].items():
        if path is not None:
            table.add_row(_FILES[key], path)
    return table


# ---- the files ----

_FILES = {"labels": "label chart", "samples": "sample pictures", "page": "page"}


def write(folder: Path, found: Mapping[str, Any], federation: Federation) -> dict[str, str | None]:
    """Draw the pictures and make the page; returns the paths, None for a picture that this data cannot have."""
    from coterie.data.pictures import is_picture
    from coterie.views import plots

    drawn = {}
    if federation.num_classes:
        drawn["labels"] = [_png(plots.label_bubbles(federation, dark=dark)) for dark in (False, True)]
    if is_picture(federation.input_shape):
        drawn["samples"] = [_png(plots.group_samples(federation, dark=dark)) for dark in (False, True)]
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str | None] = {"labels": None, "samples": None}
    for name, (light, _) in drawn.items():
        path = folder / f"{name}.png"
        path.write_bytes(light)
        files[name] = str(path)
    page = folder / "index.html"
    page.write_text(_page(found, drawn), encoding="utf-8")
    return {**files, "page": str(page)}


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Nothing about the program inside: the same data gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


# ---- the page ----

_CAPTIONS = {
    "labels": (
        "Who holds which classes",
        "Each column is a client, in the colour of its true group; what is counted is what it learns from "
        "(train and valid), with labels as the client sees them.",
    ),
    "samples": (
        "What they see",
        "Pictures as the clients see them. An even tint says that nobody in that row holds the class.",
    ),
}


def _page(found: Mapping[str, Any], drawn: Mapping[str, list[bytes]]) -> str:
    """Everything in one file that asks nothing of the network."""
    from coterie.views.report.page import shell

    title = f"{found['dataset']}, {found['scenario']}"
    parts = [f"<main><h1>{escape(title)}</h1>", _cells(_rows(found))]
    for name, pictures in drawn.items():
        heading, caption = _CAPTIONS[name]
        light, dark = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in pictures)
        parts.append(
            f'<h2>{heading}</h2><p>{caption}</p><div class="scroll"><picture>'
            f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" alt="{heading}: {escape(title)}"></picture></div>'
        )
    if found["groups"] is not None:
        groups = [(group["name"], group["clients"], group["samples"]) for group in found["groups"]]
        parts += ["<h2>Groups</h2>", _cells(groups, ("group", "clients", "samples"))]
    clients = [
        (client["name"], client["train"], client["valid"], client["test"])
        + (() if client["labels"] is None else (sum(count > 0 for count in client["labels"]),))
        for client in found["per_client"]
    ]
    heads = ("client", "train", "valid", "test", *(("classes",) if found["classes"] else ()))
    parts.append(f"<h2>Clients</h2><details><summary>All {found['clients']:,}</summary>{_cells(clients, heads)}")
    return shell(title, "\n".join([*parts, "</details></main>"]))


def _cells(rows: Sequence[tuple[Any, ...]], heads: Sequence[str] = ()) -> str:
    """A table whose first column is a name; numbers stand to the right."""

    def cell(value: Any, tag: str) -> str:
        if isinstance(value, int):
            return f'<td class="number">{value:,}</td>'
        return f"<{tag}>{escape(value)}</{tag}>"

    head = "".join(f"<th{' class=number' if i else ''}>{name}</th>" for i, name in enumerate(heads))
    first = "td" if heads else "th"
    lines = [cell(name, first) + "".join(cell(value, "td") for value in values) for name, *values in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
