"""The Python API: `run` trains and returns a `Result`; `open_run` opens a finished run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.methods.base import Algorithm, find_algorithm
from coterie.nets.flat import Loss
from coterie.nets.registry import Builder
from coterie.runs import execution
from coterie.runs import result as results
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment, resolve
from coterie.runs.folder import RunFolder
from coterie.runs.observers import Listener
from coterie.runs.settings import Schedule, merge
from coterie.settings import build, fields_of


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
    algorithm: Algorithm[Any] | str = "coterie",
    data: Federation | str = "rotated-digits",
    model: str | Builder | None = None,
    *,
    work: SGD | None = None,
    loss: str | Loss = "cross_entropy",
    engine: str = "vectorized",
    device: str = "auto",
    engine_settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    name: str | None = None,
    observer: Listener | None = None,
    **settings: Any,
) -> Result:
    """Train, and return the result.

    `data` is a federation or the name of a dataset, which has a default model and default local work. `model` is a name
    or a callable that makes an nn.Module. With `out`, the run is saved in a folder there.

    The other arguments are the flags of `coterie run` (`coterie.runs.settings.Schedule`): `rounds`, `seed`,
    `participation`, `unseen`, `dropout`, `attack` ... The folder holds no samples of your own data,
    unless you ask for some pictures with `keep_pictures=True`.

    >>> import torch
    >>> result = run("fesem", "rotated-digits", rounds=3, seed=1)
    >>> result.summary["ari"], result.centers.shape[0]
    (1.0, 4)
    >>> result.personal_model("r090-000")(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    schedule = build(Schedule, settings, "run")
    chosen = find_algorithm(algorithm)() if isinstance(algorithm, str) else algorithm
    if isinstance(data, str):
        reserve = {"reserve": getattr(chosen, "indicators", 0)}
        experiment = resolve(merge({"run": {"dataset": data, **settings}, "scenario": reserve}))
        schedule = experiment.schedule
    else:
        experiment = Experiment(chosen, chosen.key, data.name, "mlp", SGD(), schedule, data=data)
    experiment = replace(
        experiment,
        algorithm=chosen,
        algorithm_name=chosen.key,
        model=experiment.model if model is None else model,
        model_settings=experiment.model_settings if model in (None, experiment.model) else {},
        work=experiment.work if work is None else work,
        loss=loss,
        schedule=schedule,
        engine=engine,
        device=device,
        engine_settings=dict(engine_settings or {}),
        from_python=True,
    )
    folder = None
    if out is not None:
        folder = RunFolder.create(Path(out), name, experiment.default_name, experiment.tables())
    return Result.of(execute(experiment, folder, observer))


# help(run) and editors show the settings as arguments of their own.
_own = [item for item in inspect.signature(run).parameters.values() if item.kind is not item.VAR_KEYWORD]
_flags = [
    inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.kind)
    for field in fields_of(Schedule).values()
]
run.__signature__ = inspect.Signature([*_own, *_flags], return_annotation=Result)  # type: ignore[attr-defined]


def open_run(path: str | Path, *, trust: bool = False, override: bool = False) -> Result:
    """A finished run of the command line, from its folder, which is not changed.

    With `trust`, code that its settings name (`module:callable`) is imported. With `override`, the settings may differ
    from those that the run was trained with.
    """
    return Result.of(execution.open_run(path, trust=trust, override=override))
