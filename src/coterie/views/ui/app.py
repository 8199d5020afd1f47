"""The pages of `coterie ui` and what they ask for; all of it only reads.

/                    the list of runs               /api/runs
/run/NAME            a run, growing                 /api/run/NAME    /api/tsne/NAME
/compare?run=A&run=B several runs                   /api/compare?run=A&run=B
/static/FILE         scripts and style
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

_KINDS = {
    "page.css": "text/css",
    "charts.js": "text/javascript",
    "report.js": "text/javascript",
    "ui.js": "text/javascript",
}


def create_app(root: Path, token: str | None = None) -> Starlette:
    """The application for the runs in a folder; with a token, only for those who have it."""
    store = Store(root)

    def front(request: Request) -> Response:
        return _shell("Runs", "list", "/api/runs")

    def run_page(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            store.path_of(name)
        except Refused:
            return _nothing()
        return _shell(name, "run", f"/api/run/{quote(name)}")

    def compare_page(request: Request) -> Response:
        names = request.query_params.getlist("run")
        try:
            if not names:
                raise Refused("Nothing was named.")
            for name in names:
                store.path_of(name)
        except Refused:
            return _nothing()
        return _shell(f"{len(names)} runs", "run", f"/api/compare?{urlencode([('run', name) for name in names])}")

    def runs(request: Request) -> Response:
        return _answer(request, store.runs)

    def run(request: Request) -> Response:
        return _answer(request, lambda: store.run(request.path_params["name"]))

    def tsne(request: Request) -> Response:
        return _answer(request, lambda: store.tsne(request.path_params["name"]))

    def compare(request: Request) -> Response:
        return _answer(request, lambda: store.compare(request.query_params.getlist("run")))

    def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _KINDS:
            return _nothing()
        text = (
            (files("coterie.views.ui") / "static" / name).read_text(encoding="utf-8")
            if name == "ui.js"
            else static(name)
        )
        return Response(text, media_type=_KINDS[name])

    app = Starlette(
        routes=[
            Route("/", front),
            Route("/run/{name:path}", run_page),
            Route("/compare", compare_page),
            Route("/api/runs", runs),
            Route("/api/run/{name:path}", run),
            Route("/api/tsne/{name:path}", tsne),
            Route("/api/compare", compare),
            Route("/static/{name}", file),
        ],
        middleware=[Middleware(Guard, token=token)],
    )
    app.router.redirect_slashes = False  # an address is right or it is not; nobody is sent on by what they asked for
    return app


def _answer(request: Request, make: Callable[[], tuple[str, bytes]]) -> Response:
    """JSON with a mark; a browser that has it already is told so. What cannot be read is told in one sentence."""
    try:
        mark, content = make()
    except Refused as error:
        return JSONResponse({"error": str(error)}, 404)
    except RunError as error:
        return JSONResponse({"error": str(error), "state": "damaged"}, 422)
    tag = f'"{mark}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type="application/json", headers={"etag": tag})


def _nothing() -> Response:
    return PlainTextResponse("There is no such page.\n", 404)


def _shell(title: str, kind: str, source: str) -> Response:
    back = "" if kind == "list" else '<a href="/">all runs</a>'
    scripts = "".join(f'<script src="/static/{name}" defer></script>' for name in ("charts.js", "report.js", "ui.js"))
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
