"""`coterie deploy`: the app it writes, and the keys. No Flower needed for the app."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.deploy.init import write_app
from coterie.errors import StorageError


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code or 0


def test_the_app_is_whole(tmp_path, capsys):
    folder = tmp_path / "My App"
    assert call("deploy", "init", str(folder), "--nodes", "3") == 0
    assert "sites/task.py" in capsys.readouterr().out
    config = tomllib.loads((folder / "pyproject.toml").read_text())
    assert config["project"]["name"] == "my-app"
    assert config["tool"]["flwr"]["app"]["config"]["min-clients"] == 3
    assert config["tool"]["flwr"]["app"]["config"]["run-dir"] == str(folder / "runs")
    left = [p for p in folder.rglob("*") if p.is_file() and "{{" in p.read_text()]
    assert left == []
    for script in folder.glob("*.sh"):
        assert script.stat().st_mode & stat.S_IXUSR
        subprocess.run(["bash", "-n", str(script)], check=True)
    for module in (folder / "sites").glob("*.py"):
        compile(module.read_text(), str(module), "exec")
    assert (folder / "compose.yaml").read_text().count("supernode.sh") == 3


def test_every_key_of_its_config_is_known():
    pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")
    import tempfile

    from coterie.deploy.server import tables_of

    with tempfile.TemporaryDirectory() as folder:
        write_app(Path(folder) / "a")
        config = tomllib.loads((Path(folder) / "a" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    tables = tables_of(config)
    assert tables["run"]["algorithm"] == "coterie"
    assert "num_clusters" not in tables["algorithm"]  # coterie finds it
    assert tables["work"]["epochs"] == 5


def test_every_key_is_documented_and_in_the_app(tmp_path):
    pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")
    from coterie.deploy import client, server

    page = (
        (Path(__file__).parents[2] / "docs" / "deployment.md").read_text().split("## Run config")[1].split("\n## ")[0]
    )
    run, node = (
        {
            key
            for line in table.splitlines()
            if line.startswith("| `")
            for key in re.findall("`(.+?)`", line.split("|")[1])
        }
        for table in page.split("node config")
    )
    known = {*server._PLACES, *server._OWN}
    assert run == known
    assert node == set(re.findall(r'node_config\.get\("(.+?)"', Path(client.__file__).read_text()))
    write_app(tmp_path / "a")
    # Flower overrides only keys that are there.
    assert known == set(tomllib.loads((tmp_path / "a" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])


def test_an_unknown_key_of_the_config_is_refused():
    pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")
    from coterie.deploy.server import tables_of
    from coterie.errors import ConfigError

    with pytest.raises(ConfigError, match="no run config key 'round'"):
        tables_of({"round": 3})


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(StorageError, match="not empty"):
        write_app(tmp_path)
    assert call("deploy", "init", str(tmp_path)) == 2
    assert "not empty" in capsys.readouterr().err
    assert call("deploy", "init", str(tmp_path / "a"), "--name", "...") == 2
    assert call("deploy", "init", str(tmp_path / "a"), "--nodes", "0") == 2


def test_keys_are_private_and_never_replaced(tmp_path, capsys):
    pytest.importorskip("cryptography", reason="needs pip install 'coterie[flower]'")
    assert call("deploy", "keys", str(tmp_path), "--nodes", "2", "--host", "127.0.0.1", "--host", "server.example") == 0
    keys = tmp_path / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    for name in ("ca.key", "server.key", "site-0", "site-1"):
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    told = subprocess.run(
        ["openssl", "verify", "-CAfile", keys / "ca.crt", keys / "server.pem"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    from cryptography import x509

    names = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert [str(n.value) for n in names.value] == ["127.0.0.1", "server.example"]
    before = {p.name: p.read_bytes() for p in keys.iterdir()}
    assert call("deploy", "keys", str(tmp_path), "--nodes", "3") == 0
    after = {p.name: p.read_bytes() for p in keys.iterdir()}
    assert {k: after[k] for k in before} == before
    assert set(after) - set(before) == {"site-2", "site-2.pub"}
    assert call("deploy", "keys", str(tmp_path / "nowhere")) == 2
    (tmp_path / "site").mkdir()
    assert call("deploy", "keys", str(tmp_path / "site"), "--nodes", "0") == 0
    names = sorted(p.name for p in (tmp_path / "site" / "keys").iterdir())
    assert names == ["ca.crt", "ca.key", "server.key", "server.pem"]


def test_without_flower_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert call("run", "--engine", "flower", "--rounds", "1") == 2
    assert "coterie[flower]" in capsys.readouterr().err
    import coterie.deploy
    from coterie.errors import MissingExtra

    for make in (coterie.deploy.client_app, coterie.deploy.server_app):
        with pytest.raises(MissingExtra, match="flower"):
            make(object())


HEAVY = ("sklearn", "scipy", "torch._dynamo", "pandas", "matplotlib", "coterie.runs", "coterie.cli", "coterie.views")


def in_a_site(code):
    """What code prints in a new process, after the imports of a ClientApp."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys, coterie.deploy.client\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout.split()


def test_a_site_imports_little():
    """Flower starts a process for every message."""
    pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")
    loaded = """
from coterie.client.steps import is_step
from coterie.deploy.example import rotated_shares
from coterie.methods.base import load_method_of
rotated_shares(4, (0, 180))
for step in ("coterie.centers:train_member", "coterie.coterie:train_member", "coterie.fedper:served.evaluate"):
    assert not is_step(step), step
    load_method_of(step)
    assert is_step(step), step
print(*sys.modules)
"""
    found = in_a_site(loaded)
    assert "coterie.methods.fedper" in found
    assert "coterie.methods.ifca" not in found
    assert [name for name in HEAVY if name in found] == []


def test_a_site_finds_every_step_and_imports_nothing_else():
    pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")
    from coterie.client.steps import _STEPS
    from coterie.methods.base import algorithms

    algorithms()
    here = ("coterie.client.", "coterie.methods.")
    steps = [name for name, step in _STEPS.items() if step.__module__.startswith(here)]
    assert len(steps) > 40
    code = f"""
from coterie.client.steps import is_step
from coterie.methods.base import load_method_of
for step in ("antigravity:fly", "this:x", "coterie.cli:x", "coterie.methods..runs:x", ":", "coterie.runs.loop:x"):
    load_method_of(step)
    assert not is_step(step)
print(*[step for step in {steps} if not (load_method_of(step) or is_step(step))])
assert not sys.modules.keys() & {{"this", "antigravity", "coterie.cli", "coterie.runs"}}
"""
    assert in_a_site(code) == []


def test_the_example_has_the_digits_of_scikit_learn():
    import torch
    from sklearn.datasets import load_digits

    from coterie.deploy.example import rotated_shares

    whole = rotated_shares(1, (0,))["site-0"]
    order = torch.randperm(len(whole[1]), generator=torch.Generator().manual_seed(0))
    found = load_digits()
    assert torch.equal(whole[0][:, 0] * 16, torch.from_numpy(found.images).float()[order])
    assert torch.equal(whole[1], torch.from_numpy(found.target)[order])
