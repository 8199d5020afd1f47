"""`coterie data show`, `check`: how a dataset is partitioned, in numbers and pictures, before any training."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coterie.cli.flags import JsonFlag, QuietFlag, takes
from coterie.cli.output import facts_of, file_stem, new_folder, say, stdout
from coterie.runs.settings import RunSettings, Schedule, Tables, merge
from coterie.settings import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from coterie.data.federation import Federation
    from coterie.runs.experiment import Experiment

SPLITS: tuple[Literal["train", "valid", "test"], ...] = ("train", "valid", "test")


@takes(
    (RunSettings, "scenario", "clients", "data_dir"), (Schedule, "seed"), settable=("scenario", "dataset"), config=False
)
def show(
    *,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Named dataset, or path of your own data.", show_default=False)
    ],
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
    found, federation = described(experiment)
    found["files"] = write(folder, found, federation)
    if json_:
        print(json.dumps(found))
    else:
        files = [(_FILES[key], path) for key, path in found["files"].items() if path is not None]
        stdout().print(facts_of(found["dataset"], [*_rows(found), *files]))


@takes(
    (RunSettings, "scenario", "clients", "data_dir"), (Schedule, "seed"), settable=("scenario", "dataset"), config=False
)
def check(
    *,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Named dataset, or path of your own data.", show_default=False)
    ],
    tables: Tables,
    json_: JsonFlag = False,
) -> None:
    """Read a dataset and partition it, and print the numbers. Writes nothing; an error says what is wrong."""
    from coterie.runs.experiment import resolve

    experiment = resolve(merge(tables, {"run": {"algorithm": "fedavg", "dataset": name}}))
    found, _ = described(experiment)
    if json_:
        print(json.dumps(found))
    else:
        stdout().print(facts_of(found["dataset"], _rows(found)))


# ---- the numbers ----


def described(experiment: Experiment) -> tuple[dict[str, Any], Federation]:
    """The federation of an experiment in numbers, as `--json` prints it, and the federation."""
    import numpy as np

    from coterie.runs.divergence import large_features
    from coterie.views import plots

    dataset = experiment.samples()
    federation = experiment.federation(dataset)
    counts = federation.label_counts("train", "valid").numpy()  # [N, L]
    splits = {name: federation.split(name) for name in SPLITS}
    sizes = {name: split.sizes.tolist() for name, split in splits.items()}
    own, tests = np.add(sizes["train"], sizes["valid"]), np.array(sizes["test"])
    member = None if federation.groups is None else federation.groups.numpy()
    assert experiment.scenario is not None
    settings = dict(experiment.scenario.values)
    if "split" in settings and dataset.is_train is None:
        settings["split"] = "own"  # there is no official one to keep
    found = {
        "dataset": experiment.dataset,
        "scenario": experiment.scenario.name,
        "settings": settings,
        "seed": experiment.schedule.seed,
        "clients": len(federation),
        # A shard that several clients share, such as the test set of their kind, counts once.
        "samples": {name: int(split.offsets.diff()[split.shard.unique()].sum()) for name, split in splits.items()},
        "input_shape": list(federation.input_shape),
        "inputs": federation.scaling,
        "classes": federation.num_classes or None,
        "class_names": list(federation.class_names),
        "note": large_features(federation),
        "groups": None
        if member is None
        else [
            {"group": k, "name": name, "clients": int((member == k).sum()), "samples": int(own[member == k].sum())}
            for k, name in federation.group_names().items()
        ],
        "samples_per_client": {"min": int(own.min()), "median": float(np.median(own)), "max": int(own.max())},
        "tests_per_client": {"min": int(tests.min()), "median": float(np.median(tests)), "max": int(tests.max())},
        "test_sets": len(splits["test"].shard.unique()),
        "label_skew": float(plots.classes_that_hold(counts).mean()) if federation.num_classes else None,
        "moves": [move.round for move in federation.moves],
        "digest": federation.digest(),
        "per_client": [
            {
                "name": client,
                "group": None if member is None else int(member[i]),
                **{name: sizes[name][i] for name in SPLITS},
                "labels": counts[i].tolist() if federation.num_classes else None,
            }
            for i, client in enumerate(federation.names)
        ],
    }
    return found, federation


def _rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers in words, for the terminal and the page."""
    samples, each, groups = found["samples"], found["samples_per_client"], found["groups"]
    settings = ", ".join(f"{key}={value}" for key, value in found["settings"].items())
    named = [f"{group['name']} ({counted(group['clients'], 'client')})" for group in (groups or [])[:8]]
    more = " ..." if len(groups or []) > 8 else ""
    words = found["class_names"]
    names = f": {', '.join(words[:8])}{' ...' if len(words) > 8 else ''}" if words else ""
    rows = [
        ("scenario", f"{found['scenario']} ({settings})" if settings else found["scenario"]),
        ("clients", f"{found['clients']:,}"),
        ("samples", "  ".join(f"{name} {count:,}" for name, count in samples.items())),
        ("shape of a sample", " x ".join(str(extent) for extent in found["input_shape"])),
        ("inputs", found["inputs"]),
        ("classes", "none: targets are numbers" if found["classes"] is None else f"{found['classes']:,}{names}"),
        ("true groups", "none" if groups is None else f"{len(groups)}: {', '.join(named)}{more}"),
        ("samples per client", "min {min:,}  median {median:,g}  max {max:,}  (train + valid)".format(**each)),
    ]
    shared = found["test_sets"] < found["clients"]
    number = counted(found["test_sets"], "test set")
    sets = f"{number}, shared by clients" if shared else "each client has its own test set"
    rows.append(
        ("tests per client", "min {min:,}  median {median:,g}  max {max:,}".format(**found["tests_per_client"]))
    )
    rows.append(("test sets", sets))
    if found["label_skew"] is not None:
        rows.append(("label skew", f"{found['label_skew']:.2f} classes hold 80 % of a client's samples, on average"))
    if found["note"]:
        rows.append(("note", found["note"]))
    if found["moves"]:
        rows.append(("clients change group", "in round " + ", ".join(str(round) for round in found["moves"])))
    return [*rows, ("seed", str(found["seed"])), ("digest", found["digest"])]


# ---- the files ----

_FILES = {"labels": "label chart", "samples": "sample pictures", "page": "page"}


def write(folder: Path, found: Mapping[str, Any], federation: Federation) -> dict[str, str | None]:
    """Write the pictures and the page; their paths, None for a picture that this data cannot have."""
    from coterie.data.pictures import is_picture
    from coterie.views import plots

    makers: dict[str, Callable[..., Figure]] = {}
    if federation.num_classes:
        makers["labels"] = plots.label_bubbles
    if is_picture(federation.input_shape):
        makers["samples"] = plots.group_samples
    drawn = {name: [_png(make(federation, dark=dark)) for dark in (False, True)] for name, make in makers.items()}
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str | None] = {"labels": None, "samples": None, "page": str(folder / "index.html")}
    for name, (light, _) in drawn.items():
        files[name] = str(folder / f"{name}.png")
        (folder / f"{name}.png").write_bytes(light)
    (folder / "index.html").write_text(_page(found, drawn), encoding="utf-8")
    return files


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # No metadata about the program: the same data gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


# ---- the page ----

_CAPTIONS = {
    "labels": (
        "Classes held by each client",
        "Each column is a client, in the colour of its true group. Train and valid samples are counted, with the "
        "labels that the client sees.",
    ),
    "samples": (
        "Samples",
        "Pictures as the clients see them. A grey tile means that nobody in the row holds the class.",
    ),
}


def _page(found: Mapping[str, Any], drawn: Mapping[str, list[bytes]]) -> str:
    """The page: one file that needs no network."""
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
        (client["name"], *(client[name] for name in SPLITS), sum(count > 0 for count in client["labels"] or []))
        for client in found["per_client"]
    ]
    heads = ("client", *SPLITS, "classes")
    parts.append(f"<h2>Clients</h2><details><summary>All {found['clients']:,}</summary>{_cells(clients, heads)}")
    return shell(title, "\n".join([*parts, "</details></main>"]))


def _cells(rows: Sequence[tuple[Any, ...]], heads: Sequence[str] = ()) -> str:
    """An HTML table whose first column is a name; numbers are on the right."""

    def cell(value: Any, tag: str) -> str:
        if isinstance(value, int):
            return f'<td class="number">{value:,}</td>'
        return f"<{tag}>{escape(value)}</{tag}>"

    head = "".join(f"<th{' class=number' if i else ''}>{name}</th>" for i, name in enumerate(heads))
    first = "td" if heads else "th"
    lines = [cell(name, first) + "".join(cell(value, "td") for value in values) for name, *values in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
