"""Settings of the local work: flags, `[work]` in TOML, `--set work.FIELD=VALUE`. Imports no torch: --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from coterie.settings import setting

_OWN = "the dataset's"


@dataclass(frozen=True)
class WorkSettings:
    """How a client trains in one round."""

    table: ClassVar[str] = "work"

    lr: float = setting(0.1, "learning rate", gt=0, flag=True, default_is=_OWN)
    momentum: float = setting(0.0, "momentum of SGD", ge=0, lt=1, flag=True, default_is=_OWN)
    weight_decay: float = setting(0.0, "L2 penalty on the parameters", ge=0, flag=True)
    epochs: int = setting(1, "local epochs per round", ge=1, flag=True, default_is=_OWN)
    steps: int | None = setting(None, "local steps per round, instead of epochs", ge=1, flag=True, default_is=_OWN)
    batch_size: int | Literal["full"] = setting(
        20, "batch size; 'full' uses all samples of the client", ge=1, flag=True, default_is=_OWN
    )
    lr_decay: float = setting(1.0, "factor on the learning rate after each round", gt=0, le=1, flag=True)
    optimizer: str = setting("sgd", "client optimizer: sgd, nesterov, adam, adamw, or module:Class", flag=True)
    beta1: float = setting(0.9, "decay of the first moment in adam and adamw", ge=0, lt=1)
    beta2: float = setting(0.999, "decay of the second moment in adam and adamw", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the denominator in adam and adamw", gt=0)
    clip_norm: float | None = setting(
        None, "clip the gradient of each client to this norm", gt=0, flag=True, default_is="no clipping"
    )
    update_clip: float | None = setting(
        None, "clip what a client sends of its training to this norm", gt=0, flag=True, default_is="no clipping"
    )
    update_noise: float | None = setting(
        None,
        "deviation of the noise that a client adds to what it sends, as a multiple of update_clip",
        gt=0,
        flag=True,
        default_is="no noise",
    )
    schedule: str = setting("constant", "learning-rate schedule: constant, exponential, step or cosine", flag=True)
    decay_every: int = setting(10, "rounds between two decays in the schedule 'step'", ge=1)
    lr_floor: float = setting(0.01, "share of lr at the end of the schedule 'cosine'", gt=0, le=1)
    warmup_rounds: int = setting(0, "rounds in which the learning rate rises linearly to lr", ge=0, flag=True)
    total_rounds: int | None = setting(None, "rounds of the run, for the schedule; set when the run starts", ge=1)
