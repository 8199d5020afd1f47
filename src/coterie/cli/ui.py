"""`coterie ui`: the runs of a folder in a browser, while they go on."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.output import stderr
from coterie.cli.run import parse_int
from coterie.errors import ConfigError, MissingExtra

TOKEN = "COTERIE_UI_TOKEN"
_SHORTEST = 16  # letters of a token


def ui(
    runs: Annotated[Path | None, typer.Argument(help="The folder of runs; by default 'runs'.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine only with a token.")
    ] = "127.0.0.1",
    port: Annotated[str, typer.Option(help="Port; 0: any that is free.")] = "8642",
    with_token: Annotated[bool, typer.Option("--with-token", help="Ask for a token on this machine, too.")] = False,
) -> None:
    """Serve a folder of runs: list, live pages, comparisons. Only for this machine, unless told otherwise.

    Beyond this machine (--host 0.0.0.0) everyone must bring a token: that of the variable COTERIE_UI_TOKEN, or one
    that is made up and printed. What travels is not encrypted: put it behind TLS or a tunnel.
    """
    try:
        import uvicorn

        from coterie.views.ui.app import create_app
    except ImportError as error:
        raise MissingExtra("coterie ui", "ui") from error
    root = Path("runs") if runs is None else runs
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; name a folder of runs.")
    if runs is not None and not root.exists():
        raise ConfigError(f"There is no folder {root}.")
    number = parse_int("port", port)
    if number is None or not 0 <= number <= 65535:
        raise ConfigError(f"--port must be an int >= 0 and <= 65535. Got '{port}' instead.")
    token = token_for(host, with_token)
    listening = listen(host, number)
    name, chosen = listening.getsockname()[:2]
    shown = "localhost" if name in ("0.0.0.0", "::") else f"[{name}]" if ":" in name else name
    is_new = token is not None and token != os.environ.get(TOKEN)  # the user knows that one
    address = f"http://{shown}:{chosen}/" + (f"?token={token}" if is_new else "")
    console = stderr()
    if not root.exists():
        console.print(f"{root} is not there yet; runs show up when it is.", markup=False, soft_wrap=True)
    console.print(f"runs of {root.resolve()}: {address}   (Ctrl-C ends it)", markup=False, soft_wrap=True)
    if not is_loopback(host):
        console.print("note: what travels is not encrypted; put it behind TLS or a tunnel.", soft_wrap=True)
    # No access log: it would hold the token.
    settings = uvicorn.Config(
        create_app(root, token), access_log=False, log_level="warning", server_header=False, timeout_graceful_shutdown=2
    )
    try:
        uvicorn.Server(settings).run(sockets=[listening])
    except KeyboardInterrupt:
        console.print("stopped")


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
    """The token that is needed, if any: the one of the environment, or a new one."""
    if is_loopback(host) and not asked:
        return None
    given = os.environ.get(TOKEN, "")
    if given and len(given) < _SHORTEST:
        raise ConfigError(f"{TOKEN} must have at least {_SHORTEST} letters; unset it to have one made up.")
    return given or secrets.token_urlsafe(24)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, or one sentence about why not."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"There is no address {host} to listen on: {error.strerror}.") from error
    # With the protocol named, asyncio sends small answers at once: without it each waited 40 ms for the other side.
    opened = socket.socket(*found[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind(found[4])
        opened.listen(128)  # from here on nobody is turned away
    except OSError as error:
        opened.close()
        raise ConfigError(f"Port {port} of {host} cannot be had: {error.strerror}; choose another --port.") from error
    return opened
