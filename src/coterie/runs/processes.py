"""Processes for several runs at a time. Imports no torch, so that a server of processes can start at once.

On Linux one server process imports torch and the engines, and every other process is a copy of it: importing takes
seconds, copying does not. It runs no kernels and opens no GPU, so copies are safe. Elsewhere each process imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import BaseContext

_HAS_SERVER = sys.platform == "linux"
_IMPORTED = ("coterie.runs.batch",)


def context() -> BaseContext:
    """How processes are started."""
    return multiprocessing.get_context("forkserver" if _HAS_SERVER else "spawn")


def start_server(jobs: int) -> None:
    """Let the server of processes begin to import, if there are to be several processes."""
    if jobs > 1 and _HAS_SERVER:
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload(list(_IMPORTED))
        with without_ctrl_c():
            forkserver.ensure_running()


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Processes started here ignore Ctrl-C: it is the parent's to handle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
