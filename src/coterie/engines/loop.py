"""The reference engine: one client at a time, plain PyTorch. The other engines must equal it."""

from __future__ import annotations

from coterie.client.stack import Plan
from coterie.client.work import SGD
from coterie.engines.in_process import InProcessEngine
from coterie.engines.kernels.plain import PlainKernel


class LoopEngine(InProcessEngine):
    """Trains one client at a time."""

    name = "loop"

    def make_plan(self) -> Plan:
        """Plain autograd."""
        self.network.detect_keyed(self.data.federation.samples(0)[0])
        return Plan("loop", PlainKernel(self.network, self.task.loss), threads=self.threads_of_one())

    def chunk_size(self, work: SGD) -> int:
        """One client."""
        return 1
