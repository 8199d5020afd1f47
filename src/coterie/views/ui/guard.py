"""Who may ask the server, and what its answers say to browsers.

On this machine only: the Host header must name it, so that a page of somebody else's whose name was pointed at
127.0.0.1 (DNS rebinding) reads nothing. Elsewhere: only with the token, compared in constant time; it comes once in
the address, then lies in a cookie that scripts cannot read and other sites cannot send.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "coterie_token"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class Guard:
    """Stands before the application."""

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or hand on; every answer gets the headers."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in given]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        refused = self._refused(scope)
        await (self._app if refused is None else refused)(scope, receive, dressed)

    def _refused(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Only reading is possible here.\n", 405, {"allow": "GET, HEAD"})
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self._token is None:
            if _host(headers.get("host", "")) not in LOOPBACK:
                return PlainTextResponse("Ask for this machine by its own name: 127.0.0.1 or localhost.\n", 421)
            return None
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in pairs if key == "token"]
        if given and self._is_token(given[0]):
            # Out of the address at once: addresses are seen, kept and sent on.
            rest = urlencode([(key, value) for key, value in pairs if key != "token"])
            # Slashes at the beginning would make it the address of another machine.
            path = "/" + scope["path"].lstrip("/")
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(COOKIE, given[0], httponly=True, samesite="strict", path="/")
            return answer
        bearer = headers.get("authorization", "")
        if bearer[:7].lower() == "bearer " and self._is_token(bearer[7:].strip()):
            return None
        if self._is_token(_cookie(headers.get("cookie", ""))):
            return None
        return PlainTextResponse("This needs the address, token included, that 'coterie ui' has printed.\n", 401)

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _host(header: str) -> str:
    """The name in a Host header, without the port.

    >>> _host("localhost:8642"), _host("[::1]:80"), _host("evil.example"), _host("127.0.0.1")
    ('localhost', '::1', 'evil.example', '127.0.0.1')
    """
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value
