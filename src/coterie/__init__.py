"""Coterie: K models for K kinds of client; clustered, personalized federated learning.

The path of the data, which the layout shows:

    source -> scenario -> federation -> engine <-> algorithm -> metrics -> run folder -> report
    (samples) (who gets   (client       (work on    (init,       (numbers)  (files)       (pictures)
               what)       shards)       clients)    round)
"""

__version__ = "0.1.0"

from coterie.algorithm import Algorithm, ClusterState, Personal, register
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fesem import FeSEM
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.local import Local
from coterie.api import Result, run
from coterie.block import Answer, Block, Models, client_step, take, train
from coterie.clustering import CenterSums
from coterie.dataset import Dataset
from coterie.engine import Chunk, Engine
from coterie.errors import CoterieError
from coterie.federation import Federation
from coterie.local import SGD, Proximal
from coterie.randomness import Rng
from coterie.settings import setting

__all__ = [
    "IFCA",
    "SGD",
    "Algorithm",
    "Answer",
    "Block",
    "CenterSums",
    "Chunk",
    "ClusterState",
    "CoterieError",
    "Dataset",
    "Engine",
    "FeSEM",
    "FedAvg",
    "Federation",
    "Local",
    "Models",
    "Personal",
    "Proximal",
    "Result",
    "Rng",
    "client_step",
    "register",
    "run",
    "setting",
    "take",
    "train",
]
