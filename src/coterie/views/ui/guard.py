"""Who may connect, and the security headers of all responses.

Without a token, the Host header must be that of this machine, so that a website whose name resolves to 127.0.0.1 (DNS
rebinding) can read nothing. With a token, it is compared in constant time. It is sent once in the URL, then kept in a
cookie that scripts cannot read and other sites cannot send.
"""

from __future__ import annotations

import contextlib
import hmac
import re
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "coterie_token"
_HOST = re.compile(r"(\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[^\[\]:@/\\\s]*))(:[0-9]*)?")
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
    """Middleware that refuses requests and adds headers."""

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request or pass it on; every response gets the headers."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in given]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        refused = self._refused(scope)
        await (self._app if refused is None else refused)(scope, receive, with_headers)

    def _refused(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This server is read-only.\n", 405, {"allow": "GET, HEAD"})
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            known = headers.get(name.decode("latin-1"))  # cookies may come in several headers
            headers[name.decode("latin-1")] = "; ".join([*([] if known is None else [known]), value.decode("latin-1")])
        if self._token is None:
            if _host(headers.get("host", "")) not in LOOPBACK:
                return PlainTextResponse("Use the address of this machine: 127.0.0.1 or localhost.\n", 421)
            return None
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in pairs if key == "token"]
        if given and self._is_token(given[0]):
            # Remove it from the URL at once: URLs are displayed, stored and forwarded.
            rest = urlencode([(key, value) for key, value in pairs if key != "token"])
            # Several leading slashes would make it the URL of another machine.
            path = "/" + scope["path"].lstrip("/")
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(COOKIE, given[0], httponly=True, samesite="strict", path="/")
            return answer
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if any(self._is_token(value) for value in _cookies(headers.get("cookie", ""))):
            return None
        return PlainTextResponse("Open the URL with the token that 'coterie ui' has printed.\n", 401)

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _host(header: str) -> str:
    """The host name in a Host header, without the port.

    It is empty if the header is not a name with or without a port.

    >>> _host("localhost:8642"), _host("[::1]:80"), _host("evil.example"), _host("127.0.0.1"), _host("[::1]evil")
    ('localhost', '::1', 'evil.example', '127.0.0.1', '')
    """
    found = _HOST.fullmatch(header.strip().lower())
    return "" if found is None else found["six"] or found["name"]


def _cookies(header: str) -> list[str]:
    """The values of our cookie in a Cookie header. Other cookies of this machine may have any form, even our name."""
    found = []
    for pair in header.split(";"):
        with contextlib.suppress(CookieError):
            if pair.partition("=")[0].strip() == COOKIE:
                found += [cookie.value for cookie in SimpleCookie(pair.strip()).values()]
    return found
