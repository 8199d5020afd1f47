"""The pages of `coterie ui` and their data, read-only.

/                    the list of runs               /api/runs
/run/NAME            a run, live                    /api/run/NAME    /api/tsne/NAME
/compare?run=A&run=B several runs                   /api/compare?run=A&run=B
/static/FILE         scripts and styles
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from coterie.errors import RunError
from coterie.views.report.page import static
from coterie.views.ui.guard import Guard
from coterie.views.ui.store import Refused, Store

_SCRIPTS = ("charts.js", "report.js", "ui.js")


def create_app(root: Path, token: str | None = None) -> Starlette:
    """The application for the runs in a folder; with a token, only for those who have it."""
    store = Store(root)

    def front(request: Request) -> Response:
        return _shell("Runs", "list", "/api/runs")

    def run_page(request: Request) -> Response:
        name = request.path_params["name"]
        store.path_of(name)
        return _shell(name, "run", f"/api/run/{quote(name)}")

    def compare_page(request: Request) -> Response:
        names = request.query_params.getlist("run")
        for name in names or [""]:
            store.path_of(name)
        return _shell(f"{len(names)} runs", "run", f"/api/compare?{urlencode([('run', name) for name in names])}")

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in (*_SCRIPTS, "page.css"):
            raise Refused("There is no such file.")
        own = files("coterie.views.ui") / "static" / name
        text = own.read_text(encoding="utf-8") if name == "ui.js" else static(name)
        return Response(text, media_type="text/css" if name == "page.css" else "text/javascript")

    def page(path: str, make: Callable[[Request], Response]) -> Route:
        def answer(request: Request) -> Response:
            try:
                return make(request)
            except Refused:
                return PlainTextResponse("There is no such page.\n", 404)

        return Route(path, answer)

    def data(path: str, make: Callable[[Request], tuple[str, bytes]]) -> Route:
        return Route(path, lambda request: _answer(request, make))

    app = Starlette(
        routes=[
            page("/", front),
            page("/run/{name:path}", run_page),
            page("/compare", compare_page),
            page("/static/{name}", file),
            data("/api/runs", lambda request: store.runs()),
            data("/api/run/{name:path}", lambda request: store.run(request.path_params["name"])),
            data("/api/tsne/{name:path}", lambda request: store.tsne(request.path_params["name"])),
            data("/api/compare", lambda request: store.compare(request.query_params.getlist("run"))),
        ],
        middleware=[Middleware(Guard, token=token)],
    )
    app.router.redirect_slashes = False  # never redirect to an address taken from a request
    return app


def _answer(request: Request, make: Callable[[Request], tuple[str, bytes]]) -> Response:
    """JSON with an ETag, or 304 if the browser has it already; errors are one sentence."""
    try:
        mark, content = make(request)
    except Refused as error:
        return JSONResponse({"error": str(error)}, 404)
    except RunError as error:
        return JSONResponse({"error": str(error), "state": "damaged"}, 422)
    tag = f'"{mark}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type="application/json", headers={"etag": tag})


def _shell(title: str, kind: str, source: str) -> Response:
    back = "" if kind == "list" else '<a href="/">all runs</a>'
    scripts = "".join(f'<script src="/static/{name}" defer></script>' for name in _SCRIPTS)
    return HTMLResponse(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}: Coterie</title><link rel="stylesheet" href="/static/page.css">'
        f'<link rel="icon" href="data:,">{scripts}</head>\n'
        f'<body data-kind="{kind}" data-source="{escape(source, quote=True)}">'
        f'<header class="top"><div>{back}<h1>{escape(title)}</h1></div>'
        '<button id="theme" type="button">dark</button></header>\n'
        '<main><p id="status" class="dim" role="status">loading …</p><div id="page"></div></main></body></html>\n'
    )
