"""`coterie ui`: the runs in a folder, live in a browser."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.flags import whole
from coterie.cli.output import say
from coterie.errors import ConfigError, MissingExtra

TOKEN = "COTERIE_UI_TOKEN"
_SHORTEST = 16  # characters of a token


def ui(
    runs: Annotated[Path | None, typer.Argument(help="Folder of runs; by default 'runs'.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other machines need a token.")] = "127.0.0.1",
    port: Annotated[int, whole("--port", "port, or 0 for any free port", ge=0, le=65535)] = 8642,
    with_token: Annotated[bool, typer.Option("--with-token", help="Require a token on this machine, too.")] = False,
) -> None:
    """Serve a folder of runs to a browser.

    It has a list, live pages and comparisons. By default only this machine can connect. Others (--host 0.0.0.0) need a
    token: that of the variable COTERIE_UI_TOKEN, or a generated one, which is printed. The traffic is not encrypted:
    put the server behind TLS or a tunnel.
    """
    try:
        import uvicorn

        from coterie.views.ui.app import create_app
        from coterie.views.ui.lines import configured
    except ImportError as error:
        raise MissingExtra("coterie ui", "ui") from error
    root = Path("runs") if runs is None else runs
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; name a folder of runs.")
    if runs is not None and not root.exists():
        raise ConfigError(f"There is no folder {root}.")
    token = token_for(host, with_token)
    listening = listen(host, port)
    name, chosen = listening.getsockname()[:2]
    shown = "localhost" if name in ("0.0.0.0", "::") else f"[{name}]" if ":" in name else name
    is_new = token is not None and token != os.environ.get(TOKEN)  # the user knows that one
    address = f"http://{shown}:{chosen}/" + (f"?token={token}" if is_new else "")
    say(f"{root} does not exist yet; runs appear when it does.", hidden=root.exists())
    say(f"runs of {root.resolve()}: {address}   (stop with Ctrl-C)")
    say("note: the traffic is not encrypted; put the server behind TLS or a tunnel.", hidden=is_loopback(host))
    try:
        uvicorn.Server(configured(create_app(root, token))).run(sockets=[listening])
    except KeyboardInterrupt:
        say("stopped")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "192.168.1.5", "example.org")]
    [True, True, True, False, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_for(host: str, asked: bool) -> str | None:
    """The required token, if any: that of the environment, or a new one."""
    if is_loopback(host) and not asked:
        return None
    given = os.environ.get(TOKEN, "")
    if given and len(given) < _SHORTEST:
        raise ConfigError(f"{TOKEN} must have at least {_SHORTEST} characters; unset it to generate one.")
    return given or secrets.token_urlsafe(24)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"There is no address {host} to listen on: {error.strerror}.") from error
    # With the protocol named, asyncio sends small answers at once: without it each waited 40 ms for the other side.
    opened = socket.socket(*found[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind(found[4])
        opened.listen(128)  # from here on connections are accepted
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"Port {port} of {host} is not available: {error.strerror}; choose another --port."
        ) from error
    return opened
