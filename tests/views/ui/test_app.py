"""The server: what it answers, to whom, and what it refuses."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs pip install 'coterie[ui]'")
pytest.importorskip("uvicorn", reason="needs pip install 'coterie[ui]'")

import httpx
import uvicorn

from coterie.runs.folder import RunFolder
from coterie.views.ui.app import create_app
from coterie.views.ui.guard import COOKIE, HEADERS
from coterie.views.ui.lines import Line, configured
from tests.views.report.made import append_round, make_run

TOKEN = "correct-horse-battery-staple"


@contextmanager
def serving(root: Path, token: str | None = None) -> Iterator[tuple[str, int]]:
    """The real server on a free port of this machine."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(configured(create_app(root, token)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listening.getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make_run(folder, "a", rounds=3)
    make_run(folder / "compare-x", "b-s0", algorithm="b", rounds=3)
    return folder


@pytest.fixture
def client(root: Path) -> Iterator[httpx.Client]:
    with (
        serving(root) as (host, port),
        httpx.Client(base_url=f"http://{host}:{port}", trust_env=False, timeout=60) as found,
    ):
        yield found


def raw(address: tuple[str, int], request: bytes) -> str:
    """An answer to exactly these bytes: clients would tidy a path before they send it."""
    with socket.create_connection(address, timeout=10) as line:
        line.sendall(request)
        parts = []
        while part := line.recv(65536):
            parts.append(part)
    return b"".join(parts).decode("latin-1")


def ask(address: tuple[str, int], path: str, host: str = "127.0.0.1") -> str:
    return raw(address, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1"))


# ---- what it answers ----


def test_the_list_has_every_run_with_state_and_progress(client: httpx.Client, root: Path):
    live = make_run(root, "live", rounds=2, planned=10, finished=False)
    with RunFolder.open(live).held():
        found = {run["id"]: run for run in client.get("/api/runs").json()["runs"]}
    assert set(found) == {"a", "compare-x/b-s0", "live"}
    assert found["a"]["state"] == "finished"
    assert (found["live"]["state"], found["live"]["done"], found["live"]["planned"]) == ("running", 2, 10)
    assert found["compare-x/b-s0"]["algorithm"] == "b"


def test_a_growing_run_grows(client: httpx.Client, root: Path):
    path = make_run(root, "live", rounds=2, planned=10, finished=False)
    first = client.get("/api/run/live")
    assert first.json()["runs"][0]["done"] == 2
    again = client.get("/api/run/live", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    append_round(path, 3)
    later = client.get("/api/run/live", headers={"If-None-Match": first.headers["etag"]})
    assert later.status_code == 200
    assert later.json()["runs"][0]["done"] == 3
    assert later.headers["etag"] != first.headers["etag"]


def test_runs_are_compared(client: httpx.Client):
    answer = client.get("/api/compare", params={"run": ["a", "compare-x/b-s0", "a"]})
    found = answer.json()
    assert [run["id"] for run in found["runs"]] == ["a", "compare-x/b-s0"]
    assert [row["label"] for row in found["compare"]["rows"]] == ["fesem", "b"]
    assert client.get("/compare", params={"run": ["a", "compare-x/b-s0"]}).status_code == 200
    assert client.get("/compare").status_code == 404
    assert client.get("/compare", params={"run": ["a", "nothing"]}).status_code == 404
    assert client.get("/api/compare", params={"run": [f"a{i}" for i in range(51)]}).status_code == 404


def test_the_slow_map_is_asked_for_apart(client: httpx.Client):
    assert client.get("/api/run/a").json()["runs"][0]["map"]["tsne"] is None
    places = client.get("/api/tsne/a").json()
    assert [len(axis) for axis in places] == [12, 12]


def test_pages_and_their_files(client: httpx.Client):
    for path in ("/", "/run/a", "/run/compare-x/b-s0"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
    for name in ("page.css", "charts.js", "report.js", "ui.js"):
        assert len(client.get(f"/static/{name}").text) > 1000
    assert client.head("/").status_code == 200


def test_names_do_not_become_markup(client: httpx.Client, root: Path):
    name = '"><script>alert(1)<'  # a slash would make it two folders
    make_run(root, name)
    page = client.get("/run/" + httpx.URL("http://x/" + name).path.lstrip("/"))
    assert page.status_code == 200
    assert "<script>alert" not in page.text


# ---- malformed folders ----


def test_damaged_runs_are_listed_with_the_reason_and_the_others_are_not_hurt(client: httpx.Client, root: Path):
    damages = {
        "config": ("config.toml", b"\xff"),
        "rows": ("rounds.jsonl", b"{}\n"),
        "summary": ("summary.json", b"[" * 50_000),
    }
    for name, (file, content) in damages.items():
        (make_run(root, name) / file).write_bytes(content)
    (root / "empty").mkdir()
    (root / "empty" / "checkpoint").mkdir()
    piped = make_run(root, "pipe")
    (piped / "rounds.jsonl").unlink()
    os.mkfifo(piped / "rounds.jsonl")
    (make_run(root, "lock") / ".lock").write_bytes(b"\x00" * 100)
    os.mkfifo(make_run(root, "piped-lock", finished=False) / ".lock")
    (make_run(root, "endless-lock", finished=False) / ".lock").symlink_to("/dev/zero")
    found = {run["id"]: run for run in client.get("/api/runs").json()["runs"]}
    for name in (*damages, "empty", "pipe"):
        assert found[name]["state"] == "damaged", name
        assert found[name]["reason"]
        answer = client.get(f"/api/run/{name}")
        assert answer.status_code == 422
        assert answer.json()["state"] == "damaged"
    assert found["a"]["state"] == found["lock"]["state"] == "finished"
    assert found["piped-lock"]["state"] == found["endless-lock"]["state"] == "stopped"
    told = client.get("/api/compare", params={"run": ["rows", "a"]}).json()
    assert len(told["runs"]) == 1
    assert "rounds.jsonl is damaged" in told["runs"][0]["problems"][0]
    assert client.get("/api/compare", params={"run": ["rows", "config"]}).status_code == 422


def test_a_run_that_goes_away_while_it_is_looked_at(client: httpx.Client, root: Path):
    import shutil

    assert client.get("/api/run/a").status_code == 200
    shutil.rmtree(root / "a")
    assert client.get("/api/run/a").status_code == 404
    time.sleep(0.6)  # as long as a list is good for
    assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["compare-x/b-s0"]


def test_a_run_folder_itself_can_be_served(root: Path):
    with serving(root / "a") as (host, port):
        base = f"http://{host}:{port}"
        assert [run["id"] for run in httpx.get(f"{base}/api/runs", trust_env=False).json()["runs"]] == ["a"]
        assert httpx.get(f"{base}/api/run/a", trust_env=False).json()["runs"][0]["done"] == 3


def test_a_folder_that_is_reached_by_a_link(root: Path, tmp_path: Path):
    (tmp_path / "door").symlink_to(root)
    with serving(tmp_path / "door") as (host, port):
        base = f"http://{host}:{port}"
        states = [run["state"] for run in httpx.get(f"{base}/api/runs", trust_env=False).json()["runs"]]
        assert states == ["finished", "finished"]
        assert httpx.get(f"{base}/api/run/a", trust_env=False).status_code == 200


def test_a_folder_that_is_not_there_yet(tmp_path: Path):
    with serving(tmp_path / "later") as (host, port):
        assert httpx.get(f"http://{host}:{port}/api/runs", trust_env=False).json()["runs"] == []


# ---- paths ----

TRICKS = [
    "..",
    "../secret",
    "../../etc/passwd",
    "%2e%2e/secret",
    "%2e%2e%2fsecret",
    "..%2fsecret",
    "a/../../secret",
    "a/%2e%2e/%2e%2e/secret",
    "%2fetc",
    "//etc",
    "/etc/passwd",
    "..\\secret",
    "..%5csecret",
    "a%00",
    "%00",
    ".",
    "./",
    "",
    "~",
    "link",
    "link/secret",
    ".hidden",
    "compare-x",
    "a/artifacts",
    "a" * 5000,
    "%ff%fe",
]


def test_paths_out_of_the_folder_are_refused(root: Path, tmp_path: Path):
    make_run(tmp_path, "secret")
    make_run(root, ".hidden")
    (root / "link").symlink_to(tmp_path / "secret")
    with serving(root) as address:
        for trick in TRICKS:
            for route in ("/api/run/", "/api/tsne/", "/run/", "/static/"):
                answer = ask(address, route + trick)
                status = answer.split(" ")[1]
                assert status in ("404", "400"), (route + trick, answer[:200])
                assert "fesem" not in answer
            assert ask(address, f"/api/compare?run={trick}&run=a").split(" ")[1] in ("404", "400"), trick
        listed = ask(address, "/api/runs")
        assert '"id":"link","state":"damaged"' in listed
        assert "is not followed" in listed
        assert ".hidden" not in listed


def test_links_inside_a_run_are_not_followed(root: Path, tmp_path: Path):
    (tmp_path / "secret.json").write_text('{"rounds": 1, "notes": ["password"]}')
    path = make_run(root, "linked")
    (path / "summary.json").unlink()
    (path / "summary.json").symlink_to(tmp_path / "secret.json")
    (path / "artifacts" / "failures.json").unlink()
    (path / "artifacts" / "failures.json").symlink_to(tmp_path / "secret.json")
    with serving(root) as address:
        answer = ask(address, "/api/run/linked")
        assert " 422 " in answer.splitlines()[0]
        assert "password" not in answer


def test_a_link_within_the_folder_is_followed(client: httpx.Client, root: Path):
    (root / "also-a").symlink_to(root / "a")
    assert client.get("/api/run/also-a").status_code == 200


# ---- headers, hosts, methods, the token ----


def test_every_answer_has_the_headers(client: httpx.Client):
    for path in ("/", "/api/runs", "/api/run/nothing", "/nothing", "/static/page.css", "/static/nothing"):
        answer = client.get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, (path, name)
    assert "'unsafe-inline'" not in HEADERS["content-security-policy"]
    assert "frame-ancestors 'none'" in HEADERS["content-security-policy"]


def test_only_reading_is_possible(client: httpx.Client):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs").status_code == 405


HOSTS = {
    "127.0.0.1:1234": "200",
    "localhost": "200",
    "LOCALHOST:80": "200",
    "[::1]:80": "200",
    "evil.example": "421",
    "127.0.0.1.evil.example": "421",
    "localhost.evil.example:80": "421",
    "[::1]evil": "421",
    "[::1]evil.example:80": "421",
    "[::1]:80evil": "421",
    "localhost:80.evil.example": "421",
    "localhost@evil.example": "421",
    "": "421",
}


def test_names_that_were_pointed_here_are_refused(root: Path):
    with serving(root) as address:
        assert {host: ask(address, "/api/runs", host).split(" ")[1] for host in HOSTS} == HOSTS


def test_with_a_token_nobody_gets_in_without_it(root: Path):
    with serving(root, TOKEN) as (host, port):
        base = f"http://{host}:{port}"
        with httpx.Client(base_url=base, trust_env=False) as client:
            for path in ("/", "/api/runs", "/api/run/a", "/static/ui.js", "/nothing", f"/?token={TOKEN}x", "/?token="):
                answer = client.get(path)
                assert answer.status_code == 401, path
                assert "fesem" not in answer.text
                assert TOKEN not in answer.text
            assert client.get("/", headers={"Authorization": f"Bearer {TOKEN[:-1]}"}).status_code == 401
            assert client.get("/", headers={"Cookie": f"{COOKIE}=wrong"}).status_code == 401
            assert client.get("/", headers={"Cookie": "\x01=;;=\x02"}).status_code == 401
            assert client.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
            entered = client.get(f"/run/a?x=1&token={TOKEN}")
            assert entered.status_code == 303
            assert entered.headers["location"] == "/run/a?x=1"
            cookie = entered.headers["set-cookie"].lower()
            assert "httponly" in cookie
            assert "samesite=strict" in cookie
            assert client.get("/api/runs").status_code == 200  # by the cookie
        for others in ('a b=1; {"x": 1}', "=;;=", "x=[1]; y=(", f"{COOKIE}=wrong", f'{COOKIE}="wrong'):
            cookies = f"{others}; {COOKIE}={TOKEN}; z=\x01"
            found = httpx.get(base + "/api/runs", headers={"Cookie": cookies.encode("latin-1")}, trust_env=False)
            assert found.status_code == 200, others
        with_name = httpx.get(
            base + "/api/runs", headers={"Authorization": f"Bearer {TOKEN}", "Host": "box.example"}, trust_env=False
        )
        assert with_name.status_code == 200


def test_the_token_sends_nobody_elsewhere(root: Path):
    with serving(root, TOKEN) as address:
        answer = ask(address, f"//evil.example/?token={TOKEN}")
        assert "location: /evil.example/" in answer.lower()
        for path in ("/\\evil.example/", "/%5Cevil.example/", "/\\/evil.example/"):
            [place] = [
                line.partition(":")[2].strip()
                for line in ask(address, f"{path}?token={TOKEN}").splitlines()
                if line.lower().startswith("location:")
            ]
            assert "\\" not in place  # browsers read it as a slash
            assert not place.startswith("//")


def test_a_name_may_have_backslashes(root: Path):
    make_run(root, "a\\b", rounds=2)
    with serving(root) as (host, port), httpx.Client(base_url=f"http://{host}:{port}", trust_env=False) as client:
        assert "a\\b" in {run["id"] for run in client.get("/api/runs").json()["runs"]}
        assert client.get("/run/a%5Cb").status_code == 200
        assert client.get("/api/run/a%5Cb").json()["runs"][0]["id"] == "a\\b"
        assert client.get("/api/compare", params={"run": ["a\\b"]}).status_code == 200
        assert client.get("/api/run/a%5C..%5C..%5Cb").status_code == 404


# ---- connections ----


def test_idle_connections_leave_room_for_others(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Line, "most", 5)
    with serving(root) as address:
        idle = [socket.create_connection(address, timeout=10) for _ in range(20)]
        try:
            assert ask(address, "/api/runs").startswith("HTTP/1.1 200")
            closed = 0
            for line in idle[:-5]:
                try:
                    closed += line.recv(1) == b""
                except ConnectionResetError:
                    closed += 1
            assert closed == 15
        finally:
            for line in idle:
                line.close()


@pytest.mark.parametrize("sent", [b"", b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"G"])
def test_a_request_that_never_ends_is_closed(root: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(Line, "patience", 0.2)
    with serving(root) as address, socket.create_connection(address, timeout=20) as line:
        line.sendall(sent)
        with suppress(ConnectionResetError):
            assert line.recv(1) == b""


def test_an_answer_that_nobody_reads_is_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch):
    make_run(root, "large", rounds=200, clients=500)
    lost = threading.Event()

    class Watched(Line):
        patience = 0.2

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    monkeypatch.setattr("coterie.views.ui.lines.Line", Watched)
    with serving(root) as address, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(address)
        line.sendall(b"GET /api/run/large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100)  # more than buffers hold
        assert lost.wait(60)


def test_many_at_once_get_the_same_answer(root: Path):
    make_run(root, "large", rounds=100, clients=300)
    with serving(root) as (host, port):
        answers: list[Any] = []

        def look() -> None:
            answers.append(httpx.get(f"http://{host}:{port}/api/run/large", trust_env=False, timeout=30).content)

        threads = [threading.Thread(target=look) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 12
        assert len(set(answers)) == 1
        assert json.loads(answers[0])["runs"][0]["done"] == 100
