"""FedLab (SMILELab): `StandalonePipeline` with FedAvg's serial trainer and server, in this process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from coterie.peers.base import Peer, Round


class FedLab(Peer):
    """FedLab as in its tutorials: a data loader for each client; the trainer is extended by momentum.

    FedLab has one optimizer for all clients. A new one for each is needed here, since momentum must not pass from
    client to client.
    """

    name = "fedlab"
    packages = ("fedlab", "torchvision", "pynvml")
    distribution = "fedlab"
    remark = "one process, threads as the plain loop"

    def start(self, work: Round) -> None:
        with _quiet():
            self._start(work)

    def _start(self, work: Round) -> None:
        from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
        from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
        from fedlab.core.standalone import StandalonePipeline

        class Data(FedDataset):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.num = len(work.data)
                self._sets = [BaseDataset(x, y) for x, y in work.data]

            def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Any:
                return DataLoader(self._sets[id], batch_size=batch_size)

        class Trainer(FedAvgSerialClientTrainer):  # type: ignore[misc]
            def train(self, model_parameters: Tensor, train_loader: Any) -> Any:
                self.optimizer = torch.optim.SGD(self._model.parameters(), self.lr, momentum=work.momentum)
                return super().train(model_parameters, train_loader)

        class Pipeline(StandalonePipeline):  # type: ignore[misc]
            def evaluate(self) -> None:
                """Nothing: only training is timed."""

        module, cuda = work.module(), work.device.startswith("cuda")
        device = work.device if cuda else None
        self._handler = FedAvgServerHandler(module, global_round=1, sample_ratio=1.0, cuda=cuda, device=device)
        trainer = Trainer(module, num_clients=len(work.data), cuda=cuda, device=device)
        trainer.setup_dataset(Data())
        trainer.setup_optim(epochs=1, batch_size=work.batch, lr=work.lr)
        self._pipeline = Pipeline(self._handler, trainer)
        self._first = self._handler.model_parameters.clone()

    def round(self) -> None:
        self._handler.round = 0
        self._handler.set_model(self._first)
        self._pipeline.main()

    def model(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self._handler.model.named_parameters()}

    def stop(self) -> None:
        """Nothing: all of it is objects."""


@contextmanager
def _quiet() -> Iterator[None]:
    """FedLab sends everyone's logging to stdout, and torchvision misses libraries that nobody here needs."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
