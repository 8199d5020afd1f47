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
