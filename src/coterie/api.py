"""The Python API: what the command line does, with Python objects in place of names.

`run` trains and returns a `Result`, `open_run` opens a finished run, `compare` and `sweep` make tables of many runs,
`choose_k` recommends K.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from coterie.client.settings import WorkSettings
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.errors import ConfigError, MissingExtra, UnknownName
from coterie.methods.base import Algorithm, find_algorithm
from coterie.nets.flat import Loss
from coterie.nets.registry import Builder
from coterie.runs import choose_k as choosing
from coterie.runs import opening
from coterie.runs import result as results
from coterie.runs.checks import check_same
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment, resolve, resolve_own
from coterie.runs.extension import extended
from coterie.runs.folder import RunFolder, to_toml
from coterie.runs.observers import Listener, Several
from coterie.runs.opening import Given, with_objects
from coterie.runs.settings import (
    LARGEST_K,
    PROBE_CLIENTS,
    PROBE_ROUNDS,
    ClusterSettings,
    RunSettings,
    Schedule,
    Tables,
    apply_set,
    merge,
    parse_seeds,
    read_tables,
)
from coterie.runs.trackers import trackers
from coterie.settings import Field, fields_of

Method = Algorithm[Any] | str
Observers = Listener | Sequence[Listener] | None


def _arguments() -> dict[str, tuple[str, Field]]:
    """The flags of `coterie run` as arguments: their tables and fields."""
    found = {}
    own = ("algorithm", "dataset", "model", "loss", "engine", "device")
    for group in (RunSettings, ClusterSettings, Schedule, WorkSettings):
        for name, field in fields_of(group).items():
            if name in own or not (field.flags or group is Schedule):
                continue
            argument = field.flags[0].removeprefix("--").replace("-", "_") if field.flags else name
            found[argument] = (group.table, field)
    return found


_ARGUMENTS = _arguments()


class Result(results.Result):
    """A finished run: its numbers, its clusters, and every client's model."""

    @classmethod
    def of(cls, finished: results.Result) -> Result:
        """The same result, with a view for notebooks."""
        made = cls.__new__(cls)
        made.__dict__.update(finished.__dict__)
        return made

    def _repr_html_(self) -> str:
        """The headline numbers and the curve, for notebooks."""
        from coterie.runs.reading import of_result
        from coterie.views.report.notebook import run_html

        return run_html(of_result(self))


def run(
    algorithm: Method = "coterie",
    data: Federation | str | Path = "rotated-digits",
    model: str | Builder | None = None,
    *,
    work: SGD | None = None,
    loss: str | Loss | None = None,
    engine: str | None = None,
    device: str | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    name: str | None = None,
    resume: bool = False,
    progress: bool = False,
    observer: Observers = None,
    track: Sequence[str] = (),
    config: str | Path | None = None,
    set: Mapping[str, Any] | Iterable[str] = (),
    **settings: Any,
) -> Result:
    """Train, and return the result.

    `data` is a federation, the name of a dataset, which has a default model and default local work, or the path of a
    file. `model` is a name or a callable that makes an nn.Module. With `out`, the run is saved in a folder there, and
    with `resume` one of that name goes on: it is resumed, extended to more `rounds`, or returned if it is finished.

    `observer` is called after each round: an `Observer`, an object with `on_round(row)`, a function of the row, or a
    list of these. `progress` shows a progress bar; `track` logs to 'tensorboard' or 'mlflow'.

    The other arguments are the flags of `coterie run`: `rounds`, `seed`, `participation`, `scenario`, `clients`,
    `clusters` (a number or "auto"), `lr`, `epochs` ... `set` takes any other field: {"algorithm.prox": 0.1}; `config`
    is a TOML file. The folder holds no samples of your own data, unless you ask for some pictures with
    `keep_pictures=True`.

    >>> import torch
    >>> result = run("fesem", "rotated-digits", rounds=3, seed=1)
    >>> result.summary["ari"], result.centers.shape[0]
    (1.0, 4)
    >>> result.personal_model("r090-000")(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    tables = _tables(settings, set, config, engine, device, engine_settings)
    if resume and out is None:
        raise ConfigError("resume=True needs the folder of the runs: out=..., as for the first call.")
    objects = _objects(algorithm, model, work, loss)
    say = _printer(progress)
    make = _maker(algorithm, data, model, loss, objects, getattr(algorithm, "indicators", 0))
    experiment, choice = choosing.with_chosen_k(_checked(tables, objects), say, make)
    folder = None
    if out is not None:
        path = Path(out) / (name or experiment.default_name)
        if resume and (path / "config.toml").is_file():
            return _resumed(experiment, RunFolder.open(path), progress, observer, track)
        folder = RunFolder.create(Path(out), name, experiment.default_name, experiment.tables())
        if choice is not None:
            folder.write_json("artifacts/choose-k.json", choice.to_dict())
    return _executed(experiment, folder, progress, observer, track)


# help(run) and editors show the settings as arguments of their own.
_own = [item for item in inspect.signature(run).parameters.values() if item.kind is not item.VAR_KEYWORD]
_flags = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.kind)
    for name, (_, field) in _ARGUMENTS.items()
]
run.__signature__ = inspect.Signature([*_own, *_flags], return_annotation=Result)  # type: ignore[attr-defined]


def open_run(
    path: str | Path,
    *,
    data: Federation | str | Path | Literal[False] | None = None,
    model: str | Builder | None = None,
    algorithm: Algorithm[Any] | None = None,
    loss: str | Loss | None = None,
    work: SGD | None = None,
    trust: bool = False,
    override: bool = False,
) -> Result:
    """A finished run, from its folder, which is not changed; from any directory.

    `data` says where its file is now, or is the federation that it was started with; False opens it without data: its
    numbers, clusters, centers and kept personal models are there, also those of a run over sites. `model`,
    `algorithm`, `loss` and `work` are objects that the folder cannot hold. With `trust`, code that its settings name
    (`module:callable`) is imported. With `override`, the settings may differ from those that the run was trained with.
    """
    given = Given(None if data is False else data, model, algorithm, loss, work)
    return Result.of(
        opening.open_run(path, given, with_data=data is not False, with_network=None, trust=trust, override=override)
    )


class Compared:
    """The runs of `compare` or `sweep`, and their table."""

    def __init__(self, path: Path, rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
        self.path = path  # the folder of the comparison
        self.rows = rows  # one for each method (and situation, and point of a grid), over the seeds
        self.runs = runs  # one for each run; `problem` is None if it has not failed

    def frame(self, of: str = "rows") -> Any:
        """A pandas table of the rows, or (`of="runs"`) of the single runs."""
        from coterie.runs.comparison import flat

        try:
            import pandas
        except ImportError as error:
            raise MissingExtra("frame()", "report") from error
        if of not in ("rows", "runs"):
            raise ConfigError(f"frame(of=...) takes 'rows' or 'runs'. Got {of!r} instead.")
        return pandas.DataFrame([flat(row) for row in getattr(self, of)])

    def __repr__(self) -> str:
        return f"<{len(self.runs)} runs, {len(self.rows)} rows, in {self.path}>"


def compare(
    algorithms: Sequence[Method] = ("local", "fedavg", "ifca", "fesem", "coterie"),
    data: Federation | str | Path = "rotated-digits",
    model: str | Builder | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    scenarios: str | None = None,
    work: SGD | None = None,
    loss: str | Loss | None = None,
    engine: str | None = None,
    device: str | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    jobs: int = 1,
    out: str | Path = "runs",
    name: str | None = None,
    progress: bool = False,
    track: Sequence[str] = (),
    config: str | Path | None = None,
    set: Mapping[str, Any] | Iterable[str] = (),
    **settings: Any,
) -> Compared:
    """Run several methods on the same data, and return their table; the other arguments are those of `run`.

    `seeds` is a number of seeds, or a list. `scenarios` compares in several situations ("default", "kind" or a file).
    The same call continues what was stopped. A run that fails is in `runs` with its problem, and the others go on.
    """
    return _many(
        "compare", algorithms, data, model, work, loss, seeds, {}, scenarios,
        _tables(settings, set, config, engine, device, engine_settings), jobs, out, name, progress, track,
    )  # fmt: skip


def sweep(
    grid: Mapping[str, Sequence[Any]],
    algorithms: Sequence[Method] = ("coterie",),
    data: Federation | str | Path = "rotated-digits",
    model: str | Builder | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    work: SGD | None = None,
    loss: str | Loss | None = None,
    engine: str | None = None,
    device: str | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    jobs: int = 1,
    out: str | Path = "runs",
    name: str | None = None,
    progress: bool = False,
    track: Sequence[str] = (),
    config: str | Path | None = None,
    set: Mapping[str, Any] | Iterable[str] = (),
    **settings: Any,
) -> Compared:
    """Run every combination of the values of a grid, {"work.lr": [0.05, 0.1]}, and return the table; see `compare`."""
    if not grid:
        raise ConfigError("sweep needs a grid, such as {'algorithm.num_clusters': [2, 4, 8]}.")
    return _many(
        "sweep", algorithms, data, model, work, loss, seeds, grid, None,
        _tables(settings, set, config, engine, device, engine_settings), jobs, out, name, progress, track,
    )  # fmt: skip


def choose_k(
    data: Federation | str | Path = "rotated-digits",
    model: str | Builder | None = None,
    *,
    first: int = 1,
    last: int | None = None,
    sample: int = PROBE_CLIENTS,
    rounds: int = PROBE_ROUNDS,
    work: SGD | None = None,
    loss: str | Loss | None = None,
    engine: str | None = None,
    device: str | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    progress: bool = False,
    config: str | Path | None = None,
    set: Mapping[str, Any] | Iterable[str] = (),
    **settings: Any,
) -> choosing.Choice:
    """Recommend K, from `first` to `last` (by default 8), with the reason; see `coterie choose-k`."""
    tables = _tables(settings, set, config, engine, device, engine_settings)
    objects = _objects("fesem", model, work, loss)
    make = _maker("fesem", data, model, loss, objects, 0)
    experiment = make(merge(_checked(tables, objects), {"algorithm": {"num_clusters": 1}}))
    say = _printer(progress)
    return choosing.choose_k(
        experiment, first, last, sample, rounds, observer=lambda row: say(f"K = {row.clusters} of {last or LARGEST_K}")
    )


# ---- what they share ----


def _tables(
    settings: Mapping[str, Any],
    more: Mapping[str, Any] | Iterable[str],
    config: str | Path | None,
    engine: str | None,
    device: str | None,
    engine_settings: Mapping[str, Any] | None,
) -> Tables:
    """The tables of settings that the arguments of a call mean."""
    tables = merge({} if config is None else read_tables(Path(config)))
    for key, value in settings.items():
        if key not in _ARGUMENTS:
            raise UnknownName("argument named", key, _ARGUMENTS)
        table, field = _ARGUMENTS[key]
        tables[table][field.name] = value
    for key, value in {"engine": engine, "device": device}.items():
        if value is not None:
            tables["run"][key] = value
    tables["engine"] |= dict(engine_settings or {})
    if isinstance(more, Mapping):
        for place, value in more.items():
            table, dot, key = str(place).partition(".")
            if not dot or table not in tables:
                raise ConfigError(
                    f"set takes {{'TABLE.FIELD': value}} with a table of {', '.join(tables)}. Got '{place}'."
                )
            tables[table][key] = value
        return tables
    return apply_set(tables, [more] if isinstance(more, str) else more)


def _objects(
    algorithm: Method, model: str | Builder | None, work: SGD | None, loss: str | Loss | None
) -> dict[str, Any]:
    """The arguments that are Python objects and not names."""
    given = {"algorithm": algorithm, "model": model, "work": work, "loss": loss}
    return {part: value for part, value in given.items() if value is not None and not isinstance(value, str)}


def _checked(tables: Tables, objects: Mapping[str, Any]) -> Tables:
    """The tables, if nothing in them belongs to an object that is given."""
    for part, table in (("algorithm", "algorithm"), ("work", "work")):
        if part in objects and tables[table]:
            own = type(objects[part]).__name__
            raise ConfigError(
                f"{next(iter(tables[table]))} belongs to {own}, which is given as an object; set it there."
            )
    return tables


def _maker(
    algorithm: Method,
    data: Federation | str | Path,
    model: str | Builder | None,
    loss: str | Loss | None,
    objects: Mapping[str, Any],
    reserve: int,
) -> Callable[[Tables], Experiment]:
    """How tables of settings become an experiment of these arguments; `reserve`: samples held out for the method."""
    named = {"model": model, "loss": loss, "algorithm": algorithm}
    run = {key: value for key, value in named.items() if isinstance(value, str)}

    def make(tables: Tables) -> Experiment:
        own = "algorithm" in objects
        layer: Tables = {"run": run | ({"algorithm": "fedavg"} if own else {})}
        if isinstance(data, Federation):
            return with_objects(resolve_own(merge(tables, layer), data), tables, objects)
        held = {"scenario": {"reserve": reserve}} if own and "reserve" not in tables["scenario"] else {}
        settings = {} if "model" in objects else tables["model"]
        dataset = {"run": {"dataset": str(data)}}
        return with_objects(resolve(merge(tables, layer, dataset, held) | {"model": settings}), tables, objects)

    return make


def _printer(progress: bool) -> Callable[[str], None]:
    from coterie.cli.output import say

    return lambda text: say(text, not progress)


def _executed(
    experiment: Experiment, folder: RunFolder | None, progress: bool, observer: Observers, track: Sequence[str]
) -> Result:
    """Run an experiment with its observers."""
    say = _printer(progress)
    also = trackers(list(track), say)
    for note in experiment.notes:
        say(f"note: {note}")
    with contextlib.ExitStack() as stack:
        listeners: list[Any] = [observer, *also]
        if progress:
            from coterie.cli.output import RoundProgress

            bar = RoundProgress(experiment.schedule.rounds, experiment.algorithm_name, False)
            listeners.insert(0, stack.enter_context(bar))
        return Result.of(execute(experiment, folder, Several(listeners)))


def _resumed(
    experiment: Experiment, folder: RunFolder, progress: bool, observer: Observers, track: Sequence[str]
) -> Result:
    """Resume the run of this experiment in its folder."""
    import tomllib

    there, here = folder.config(), tomllib.loads(to_toml(experiment.tables()))
    check_same(folder.path, there, here, experiment.defaults(), ("rounds", "device"), "name")
    rounds = experiment.schedule.rounds
    before = there["run"].get("rounds", rounds)
    if folder.summary() is not None and rounds == before:
        return Result.of(opening.opened(folder, experiment))
    with folder.held():
        stored = replace(experiment, schedule=replace(experiment.schedule, rounds=before))
        return _executed(extended(folder, stored, rounds), folder, progress, observer, track)


def _many(
    verb: str,
    algorithms: Sequence[Method],
    data: Federation | str | Path,
    model: str | Builder | None,
    work: SGD | None,
    loss: str | Loss | None,
    seeds: int | Sequence[int],
    grid: Mapping[str, Sequence[Any]],
    scenarios: str | None,
    tables: Tables,
    jobs: int,
    out: str | Path,
    name: str | None,
    progress: bool,
    track: Sequence[str],
) -> Compared:
    """The runs of `compare` and `sweep`."""
    from coterie.cli.compare import cases_of
    from coterie.cli.sweep import cases_of as sweep_cases
    from coterie.cli.table import completed, written

    numbers = parse_seeds(str(seeds)) if isinstance(seeds, int) else tuple(seeds)
    methods = [algorithms] if isinstance(algorithms, str | Algorithm) else list(algorithms)
    parts = [_objects(method, model, work, loss) for method in methods]
    if jobs > 1 and (isinstance(data, Federation) or any(parts)):
        raise ConfigError("jobs > 1 runs in other processes: give data, models and methods by name or path, or jobs=1.")
    # A fair comparison: if one method needs indicator samples, they are held out for all.
    known = [find_algorithm(method) if isinstance(method, str) else method for method in methods]
    reserve = max(getattr(method, "indicators", 0) for method in known)
    held = {} if isinstance(data, Federation) else {"scenario": {"reserve": reserve}}

    def each(point: Tables, seed: int) -> Iterator[tuple[str, Experiment]]:
        for method, own in zip(methods, parts, strict=True):
            fields = fields_of(find_algorithm(method)) if isinstance(method, str) else {}
            mine = {key: value for key, value in point["algorithm"].items() if key in fields}
            make = _maker(method, data, model, loss, own, reserve)
            label = method if isinstance(method, str) else method.key
            yield label, make(merge(point | {"algorithm": mine}, {"run": {"seed": seed}}))

    if scenarios is None:
        situations: list[Any] = []
        cases = sweep_cases(merge(held, tables), numbers, list(grid.items()), each)
    else:
        if isinstance(data, Federation) or any(parts):
            raise ConfigError("scenarios partition data by name: give data, models and methods by name or path.")
        named = {key: value for key, value in (("model", model), ("loss", loss)) if value is not None}
        layer = merge(tables, {"run": {"dataset": str(data), **named}})
        cases, situations = cases_of(layer, [str(method) for method in methods], numbers, scenarios)
    root, outcomes = completed(
        cases, verb, Path(out), name, jobs=jobs, track=list(track), hidden=not progress, situations=situations
    )
    return Compared(root.path, *written(outcomes, root, cases[0].experiment.dataset))
