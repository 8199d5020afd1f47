"""Coterie: K models for K kinds of client; clustered, personalized federated learning.

The path of the data, which the layout shows:

    source -> scenario -> federation -> engine <-> method -> metrics -> run folder -> report
    (samples) (partition) (client       (runs the   (start,  (numbers)  (files)       (pictures)
                           shards)       clients)    round)

Names are imported when they are first used, so that `coterie --help` does not wait for torch.

Threads of torch that have nothing to do sleep (OMP_WAIT_POLICY=passive, unless it is set). By default they spin, which
takes minutes instead of seconds on a busy machine. OpenMP reads this when torch is imported: import coterie before it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from coterie.version import VERSION

__version__ = VERSION

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from coterie.api import Compared as Compared
    from coterie.api import Result as Result
    from coterie.api import choose_k as choose_k
    from coterie.api import compare as compare
    from coterie.api import open_run as open_run
    from coterie.api import run as run
    from coterie.api import sweep as sweep
    from coterie.client.block import Block as Block
    from coterie.client.block import Mixture as Mixture
    from coterie.client.block import Models as Models
    from coterie.client.block import take as take
    from coterie.client.optimizers import Optimizer as Optimizer
    from coterie.client.optimizers import register_optimizer as register_optimizer
    from coterie.client.serving import serving as serving
    from coterie.client.steps import Answer as Answer
    from coterie.client.steps import client_step as client_step
    from coterie.client.steps import train as train
    from coterie.client.work import SGD as SGD
    from coterie.client.work import Proximal as Proximal
    from coterie.data.dataset import Dataset as Dataset
    from coterie.data.federation import Federation as Federation
    from coterie.engines.base import Chunk as Chunk
    from coterie.engines.base import Engine as Engine
    from coterie.errors import CoterieError as CoterieError
    from coterie.errors import StopRun as StopRun
    from coterie.methods.apfl import APFL as APFL
    from coterie.methods.base import Algorithm as Algorithm
    from coterie.methods.base import ClusterState as ClusterState
    from coterie.methods.base import Personal as Personal
    from coterie.methods.base import register as register
    from coterie.methods.cfl import CFL as CFL
    from coterie.methods.clove import CLoVE as CLoVE
    from coterie.methods.cornflqs import Cornflqs as Cornflqs
    from coterie.methods.coterie import Coterie as Coterie
    from coterie.methods.ditto import Ditto as Ditto
    from coterie.methods.fedala import FedALA as FedALA
    from coterie.methods.fedavg import FedAvg as FedAvg
    from coterie.methods.fedbn import FedBN as FedBN
    from coterie.methods.feddane import FedDANE as FedDANE
    from coterie.methods.feddist import FedDist as FedDist
    from coterie.methods.feddrift import FedDrift as FedDrift
    from coterie.methods.fedds import FedDS as FedDS
    from coterie.methods.fedds import FedDSMIC as FedDSMIC
    from coterie.methods.fedem import FedEM as FedEM
    from coterie.methods.fedfomo import FedFomo as FedFomo
    from coterie.methods.fedgroup import FedGroup as FedGroup
    from coterie.methods.fedper import FedPer as FedPer
    from coterie.methods.fedprox import FedProx as FedProx
    from coterie.methods.fedrep import FedRep as FedRep
    from coterie.methods.fedsgd import FedSGD as FedSGD
    from coterie.methods.fesem import FeSEM as FeSEM
    from coterie.methods.fesem_ma import FeSEMMA as FeSEMMA
    from coterie.methods.flux import Flux as Flux
    from coterie.methods.ifca import IFCA as IFCA
    from coterie.methods.local import Local as Local
    from coterie.methods.md_icfl import MDICFL as MDICFL
    from coterie.methods.pacfl import PACFL as PACFL
    from coterie.methods.parts.clustering import CenterSums as CenterSums
    from coterie.methods.perfedavg import PerFedAvg as PerFedAvg
    from coterie.methods.pfedme import PFedMe as PFedMe
    from coterie.methods.robust_tkm import RobustTKM as RobustTKM
    from coterie.methods.scaffold import Scaffold as Scaffold
    from coterie.methods.srfca import SRFCA as SRFCA
    from coterie.nets.mixture import MixtureModel as MixtureModel
    from coterie.randomness import Rng as Rng
    from coterie.runs.observers import Observer as Observer
    from coterie.settings import setting as setting
    from coterie.views import plots as plots

_HOMES = {
    "api": ("Compared", "Result", "choose_k", "compare", "open_run", "run", "sweep"),
    "client.block": ("Block", "Mixture", "Models", "take"),
    "client.optimizers": ("Optimizer", "register_optimizer"),
    "client.serving": ("serving",),
    "client.steps": ("Answer", "client_step", "train"),
    "client.work": ("SGD", "Proximal"),
    "data.dataset": ("Dataset",),
    "data.federation": ("Federation",),
    "engines.base": ("Chunk", "Engine"),
    "errors": ("CoterieError", "StopRun"),
    "methods.apfl": ("APFL",),
    "methods.base": ("Algorithm", "ClusterState", "Personal", "register"),
    "methods.cfl": ("CFL",),
    "methods.clove": ("CLoVE",),
    "methods.cornflqs": ("Cornflqs",),
    "methods.coterie": ("Coterie",),
    "methods.ditto": ("Ditto",),
    "methods.fedala": ("FedALA",),
    "methods.fedavg": ("FedAvg",),
    "methods.fedbn": ("FedBN",),
    "methods.feddane": ("FedDANE",),
    "methods.feddist": ("FedDist",),
    "methods.feddrift": ("FedDrift",),
    "methods.fedds": ("FedDS", "FedDSMIC"),
    "methods.fedem": ("FedEM",),
    "methods.fedfomo": ("FedFomo",),
    "methods.fedgroup": ("FedGroup",),
    "methods.fedper": ("FedPer",),
    "methods.fedprox": ("FedProx",),
    "methods.fedrep": ("FedRep",),
    "methods.fedsgd": ("FedSGD",),
    "methods.fesem": ("FeSEM",),
    "methods.fesem_ma": ("FeSEMMA",),
    "methods.flux": ("Flux",),
    "methods.ifca": ("IFCA",),
    "methods.local": ("Local",),
    "methods.md_icfl": ("MDICFL",),
    "methods.pacfl": ("PACFL",),
    "methods.parts.clustering": ("CenterSums",),
    "methods.perfedavg": ("PerFedAvg",),
    "methods.pfedme": ("PFedMe",),
    "methods.robust_tkm": ("RobustTKM",),
    "methods.scaffold": ("Scaffold",),
    "methods.srfca": ("SRFCA",),
    "nets.mixture": ("MixtureModel",),
    "randomness": ("Rng",),
    "runs.observers": ("Observer",),
    "settings": ("setting",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "plots":
        return import_module("coterie.views.plots")
    if name not in _HOME:
        raise AttributeError(f"module 'coterie' has no attribute '{name}'")
    found = getattr(import_module(f"coterie.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "plots", "__version__"]
