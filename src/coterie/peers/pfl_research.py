"""pfl-research (Apple): `FederatedAveraging.run` on a `SimulatedBackend`, in this process.

Its evaluation of every user before and after training is done in round 0 only, which is not timed.
"""

from __future__ import annotations

import functools
import os
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.peers.base import Peer, Round

_DEVICE = "PFL_PYTORCH_DEVICE"


class PflResearch(Peer):
    """pfl-research as in its benchmarks: users' tensors lie ready, one optimizer a user, central SGD with rate 1."""

    name = "pfl-research"
    packages = ("pfl",)
    distribution = "pfl"
    remark = "one process, threads as the plain loop"

    def __init__(self) -> None:
        self._device_before = os.environ.get(_DEVICE)

    def start(self, work: Round) -> None:
        os.environ[_DEVICE] = work.device
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.metrics import Weighted
        from pfl.model.pytorch import PyTorchModel

        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(module(x), y)

        @torch.no_grad()
        def metrics(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(functional.cross_entropy(module(x), y, reduction="sum").item(), len(y))}

        module: Any = work.module()
        module.loss, module.metrics = types.MethodType(loss, module), types.MethodType(metrics, module)
        users = {str(i): (x.to(work.device), y.to(work.device)) for i, (x, y) in enumerate(work.data)}
        sampler = get_user_sampler("minimize_reuse", list(users))  # a cohort of all is everyone once
        dataset = FederatedDataset.from_slices(users, sampler)
        self._model = PyTorchModel(
            model=module,
            local_optimizer_create=functools.partial(torch.optim.SGD, momentum=work.momentum),
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        )
        self._start = self._model.get_parameters()
        self._algorithm = FederatedAveraging()
        self._backend = SimulatedBackend(training_data=dataset, val_data=dataset)
        self._params = functools.partial(
            NNAlgorithmParams, evaluation_frequency=1 << 30, train_cohort_size=len(users), val_cohort_size=None
        )
        self._train = NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr)
        self._evaluate = NNEvalHyperParams(local_batch_size=work.batch)
        self._rounds = 0

    def round(self) -> None:
        self._rounds += 1  # `run` goes on from the round it is at
        self._model.set_parameters(self._start)
        self._algorithm.run(
            self._params(central_num_iterations=self._rounds),
            self._backend,
            self._model,
            self._train,
            self._evaluate,
            send_metrics_to_platform=False,
        )

    def model(self) -> dict[str, Tensor]:
        return dict(self._model.get_parameters().items())

    def stop(self) -> None:
        if self._device_before is None:
            os.environ.pop(_DEVICE, None)
        else:
            os.environ[_DEVICE] = self._device_before
