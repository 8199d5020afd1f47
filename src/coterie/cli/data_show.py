"""`coterie data show`: who holds what, as numbers, pictures and one page, before anything is trained."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from coterie.cli.output import stderr, stdout
from coterie.cli.run import JsonFlag, QuietFlag, ScenarioFlag, SeedFlag, Text, parse_int
from coterie.data.federation import Federation, Split
from coterie.data.pictures import is_picture
from coterie.errors import ConfigError
from coterie.runs.experiment import Experiment, apply_set, merge, resolve
from coterie.views import plots
from coterie.views.report.page import shell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NameArgument = Annotated[str, typer.Argument(help="Named dataset, or a path to your own .npz.", show_default=False)]
ClientsFlag = Annotated[Text, typer.Option(help="Number of clients.")]
SetFlag = Annotated[
    list[str] | None,
    typer.Option("--set", help="A field of the scenario or the dataset: scenario.alpha=3, dataset.samples=100 ..."),
]
DataDirFlag = Annotated[Text, typer.Option("--data-dir", help="Folder with the data files.")]
OutFlag = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder for the pictures and the page; by default data-NAME.")
]

_ABOUT_DATA = ("dataset", "scenario")  # the tables that --set may change here


def show(
    name: NameArgument,
    scenario: ScenarioFlag = None,
    clients: ClientsFlag = None,
    seed: SeedFlag = None,
    set_: SetFlag = None,
    data_dir: DataDirFlag = None,
    out: OutFlag = None,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Show who holds which samples: numbers, label-by-client chart, sample pictures, and a page of them."""
    run = {
        "algorithm": "fedavg",  # takes any number of clients; nothing is trained
        "dataset": name,
        "scenario": scenario,
        "clients": parse_int("clients", clients),
        "seed": parse_int("seed", seed),
        "data_dir": data_dir,
    }
    tables = merge({"run": {key: value for key, value in run.items() if value is not None}})
    experiment = resolve(apply_set(tables, _checked(set_ or [])))
    folder = _folder(out, experiment.dataset)
    if not (quiet or json_):
        stderr().print(f"reading {experiment.dataset}", soft_wrap=True)
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


def _folder(out: Path | None, dataset: str) -> Path:
    """Where to write; a folder, or nothing yet."""
    stem = Path(dataset).stem if dataset.endswith(".npz") else dataset
    folder = Path("data-" + (re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "own")) if out is None else out
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder to write to with -o.")
    return folder


def _checked(assignments: list[str]) -> list[str]:
    """Only what is about data can be set: any other table would be taken and change nothing."""
    for text in assignments:
        table = text.partition("=")[0].partition(".")[0].strip()
        if "=" in text and "." in text.partition("=")[0] and table not in _ABOUT_DATA:
            raise ConfigError(f"--set takes scenario.FIELD=VALUE or dataset.FIELD=VALUE here. Got '{text}' instead.")
    return assignments


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
