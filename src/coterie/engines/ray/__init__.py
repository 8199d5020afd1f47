"""The engine over Ray: workers on several GPUs or machines, each a vectorized engine over its part of the clients."""

from __future__ import annotations

import logging
import os
import warnings

from coterie.errors import MissingExtra

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # the default, 15, starves workers on a busy machine
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died",  # Ray prints it to stdout; the run names the worker in its failures
}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # also on Linux: Ray then listens on loopback only


def require_ray(address: str | None) -> None:
    """Import Ray, which reads its environment then; without an address it will run on this machine only.

    Raises MissingExtra if Ray is not installed.
    """
    for key, value in (_QUIET | (_LOOPBACK if address is None else {})).items():
        os.environ.setdefault(key, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray  # noqa: F401
    except ImportError as error:
        raise MissingExtra("engine ray", "ray") from error
    logging.getLogger("ray").setLevel(logging.ERROR)
