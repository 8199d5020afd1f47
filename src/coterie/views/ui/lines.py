"""Connections to the live pages: a limited number, and none that only waits.

Browsers open a few connections and use them at once. Somebody who opens hundreds, sends a request byte by byte, or does
not read the answer, would hold the server for ever.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_turns = itertools.count()


class Line(H11Protocol):
    """A connection. It is closed if it waits too long, or if it has waited longest and there are too many."""

    most = 100  # open connections
    patience = 60.0  # seconds to send a whole request, and to read an answer

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._turn = 0  # a clock is too coarse for connections that come at the same time
        self._timer: asyncio.TimerHandle | None = None  # None: an answer is being computed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; if there are too many, close those that have waited longest."""
        super().connection_made(transport)
        self._wait()
        waiting = [line for line in self.connections if isinstance(line, Line) and line._timer is not None]
        waiting.sort(key=lambda line: line._turn)
        for line in waiting[: max(0, len(self.connections) - self.most)]:
            line.transport.abort()
            self.connections.discard(line)  # at once: its end is reported later

    def handle_events(self) -> None:
        """Read what has come; once a request is whole, the client has time until its answer is computed."""
        super().handle_events()
        self._stop_waiting_if_at_work()

    def on_response_complete(self) -> None:
        """Wait until the answer is read, and for the next request."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client reads."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """The client has read; wait for the rest, or for the next request."""
        super().resume_writing()
        self._wait()
        self._stop_waiting_if_at_work()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._turn = next(_turns)
        self._timer = self.loop.call_later(self.patience, self.transport.abort)

    def _stop_waiting_if_at_work(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def configured(app: Any) -> uvicorn.Config:
    """The settings of the server."""
    # No access log: it would contain the token.
    return uvicorn.Config(
        app,
        http=Line,
        ws="none",
        access_log=False,
        log_level="error",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
