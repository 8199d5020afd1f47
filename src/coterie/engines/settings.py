"""Settings of the engines: `[engine]` in TOML, `--set engine.FIELD=VALUE`. Imports no torch: --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from coterie.settings import setting

AttackKind = Literal[
    "none", "sign_flip", "gaussian", "label_flip", "alie", "ipm", "min_max", "hijack", "backdoor"
]  # see attacks.py


@dataclass(frozen=True)
class EngineSettings:
    """How the engines in this process compute."""

    table: ClassVar[str] = "engine"

    plan: Literal[
        "auto",
        "native",
        "layers",
        "layers+workers",
        "stacked",
        "loop",
        "layers+graph",
        "folded",
        "folded+graph",
        "streams+graph",
        "stacked+graph",
        "loop+graph",
    ] = setting("auto", "how batches of clients are computed; auto measures the possible plans")
    precision: Literal["auto", "float32", "tf32", "bf16", "float64"] = setting(
        "auto", "arithmetic; auto is float32 on a CPU and tf32 on a GPU, and models stay float32 in tf32 and bf16"
    )
    compile: bool = setting(False, "pass stacked gradients through torch.compile")
    memory: int | None = setting(None, "memory of one chunk of clients in MB", ge=1, default_is="1024, or half a GPU")
    chunk: int | None = setting(None, "clients held in memory at a time", ge=1, default_is="what fits in memory")
    piece: int | None = setting(None, "clients per stack on a CPU", ge=1, default_is="what fits in the cache")
    workers: int | None = setting(None, "stacks computed in parallel on a CPU", ge=1, default_is="torch's threads")


@dataclass(frozen=True)
class RaySettings(EngineSettings):
    """How the workers of engine ray compute, and where they run."""

    workers: int | None = setting(
        None,
        "Ray workers, each with its part of the clients",
        ge=1,
        default_is="one for each GPU, or else each machine",
    )
    cpus: int | None = setting(
        None, "CPU cores of each Ray worker", ge=1, default_is="the cores divided by the workers"
    )
    address: str | None = setting(
        None, "the running Ray cluster to use: auto, or HOST:PORT", default_is="none; Ray starts on this machine"
    )


def settings_class(engine: str) -> type[EngineSettings] | None:
    """The settings of an engine; None for flower, whose settings are declared with it."""
    return {"loop": EngineSettings, "vectorized": EngineSettings, "ray": RaySettings}.get(engine)
