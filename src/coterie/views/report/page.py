"""The page: one file that needs no network.

Client names, notes and settings come from users. The page holds them as JSON and inserts them as text, never as markup,
and its content security policy allows no scripts but its own two.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from coterie.errors import StorageError
from coterie.runs.reading import RunData
from coterie.settings import counted
from coterie.trust import write_whole
from coterie.views.report.payload import page_payload

SCRIPTS = ("charts.js", "report.js")


@functools.cache
def static(name: str) -> str:
    """A file of the package."""
    return (files("coterie.views.report") / "static" / name).read_text(encoding="utf-8")


def json_inside(value: Any) -> str:
    """JSON for a script element: nothing in it can end the element.

    >>> json_inside({"name": "</script><script>alert(1)</script>"})
    '{"name":"\\\\u003c/script>\\\\u003cscript>alert(1)\\\\u003c/script>"}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    # Half a surrogate pair, as in a damaged name, cannot be written as UTF-8.
    return text.encode("utf-8", "replace").decode()


def source_hash(text: str) -> str:
    """A script or style as a content security policy names it."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def shell(title: str, body: str, policy: str = "") -> str:
    """A page with its style, which loads only what the policy allows."""
    rules = f"default-src 'none'; img-src data:; style-src {source_hash(static('page.css'))}; {policy}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"{rules}base-uri 'none'; form-action 'none'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title><style>{static('page.css')}</style></head>\n<body>{body}</body></html>\n"
    )


def report_html(runs: Sequence[RunData], *, tsne: bool = True, situations: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page of one run or several; `situations` are those of their comparison."""
    payload = page_payload(runs, tsne=tsne, situations=situations)
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs"
    scripts = [static(name) for name in SCRIPTS]
    policy = f"script-src {' '.join(source_hash(script) for script in scripts)}; "
    numbers = ""
    for run in payload["runs"]:
        words = ", ".join(f"{name} {value}" for name, value, _ in run["headline"])
        numbers += f"<li>{escape(run['title'])}: {escape(words)}</li>"
    body = "".join(f"<script>{script}</script>\n" for script in scripts)
    return shell(
        f"{title}: Coterie report",
        f'<header class="top"><h1>{escape(title)}</h1><button id="theme" type="button">dark</button></header>\n'
        f'<main id="page"><noscript><p>Charts require JavaScript. Results:</p><ul>{numbers}</ul></noscript></main>\n'
        "<footer>Created by Coterie. Micro means weigh clients by their test samples; other means weigh all clients "
        "equally. This file needs no network.</footer>\n"
        f'<script type="application/json" id="data">{json_inside(payload)}</script>\n{body}',
        policy,
    )


def write_report(
    runs: Sequence[RunData],
    path: Path,
    *,
    tsne: bool = True,
    say: Callable[[str], None] = lambda text: None,
    situations: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the page completely, or leave the old file as it was."""
    say(f"writing the report of {counted(len(runs), 'run')}")
    text = report_html(runs, tsne=tsne, situations=situations)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.") from error
    return path
