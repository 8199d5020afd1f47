"""Which part of which machine each worker gets. Needs no Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from coterie.engines.settings import RaySettings
from coterie.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """The workers of an engine, and the part of the cluster that each gets."""

    workers: int
    cpus: int  # threads of each worker
    gpus: float  # GPUs of each worker; less than 1: workers share one
    counts_cpus: bool  # whether Ray reserves the cores; on this machine several engines may share them

    @property
    def device(self) -> str:
        """The device of the workers."""
        return "cuda" if self.gpus else "cpu"

    def options(self) -> dict[str, Any]:
        """The options of a worker's actor."""
        threads = {"OMP_NUM_THREADS": str(self.cpus), "OMP_WAIT_POLICY": "passive"}
        return {
            "num_cpus": self.cpus if self.counts_cpus else 0,
            "num_gpus": self.gpus,
            "max_restarts": 0,  # the engine restarts it, with its data and memory
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": threads},
        }


def find_place(settings: RaySettings, device: str, nodes: list[dict[str, float]], counts_cpus: bool) -> Place:
    """A place for the workers on machines with these resources; ConfigError if there is none.

    >>> find_place(RaySettings(), "auto", [{"CPU": 16, "GPU": 4}, {"CPU": 16, "GPU": 4}], True)
    Place(workers=8, cpus=4, gpus=1.0, counts_cpus=True)
    >>> find_place(RaySettings(workers=4), "cpu", [{"CPU": 16, "GPU": 4}, {"CPU": 6}], True)
    Place(workers=4, cpus=3, gpus=0.0, counts_cpus=True)
    """
    gpus = 0 if device == "cpu" else int(sum(node.get("GPU", 0) for node in nodes))
    if device.startswith("cuda") and not gpus:
        raise ConfigError("device 'cuda' was requested, but Ray sees no GPU; use --device cpu.")
    used = [node for node in nodes if node.get("GPU", 0) >= 1] if gpus else nodes
    workers = settings.workers or gpus or len(used)
    share = 0.0 if not gpus else 1.0 if workers <= gpus else 1 / math.ceil(workers / gpus)
    if not counts_cpus:
        return Place(workers, settings.cpus or max(1, torch.get_num_threads() // workers), share, False)
    per_node = math.ceil(workers / len(used))
    cpus = settings.cpus or max(1, int(min(node.get("CPU", 0) for node in used)) // per_node)
    fit = sum(int(min(n.get("CPU", 0) / cpus, n.get("GPU", 0) / share if share else math.inf)) for n in used)
    if fit < workers:
        raise ConfigError(
            f"{workers} Ray workers with {cpus} cores each do not fit into the cluster of {len(used)} machines, which "
            f"has room for {fit}; use fewer with --set engine.workers=N or --set engine.cpus=N."
        )
    return Place(workers, cpus, share, True)
