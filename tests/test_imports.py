"""What a run and its page need: none of the optional parts; who asks for one is told its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OPTIONAL = ("pandas", "matplotlib", "starlette", "uvicorn", "tensorboard", "mlflow", "selenium", "flwr", "PIL")

CODE = f"""
import sys
sys.argv = ["coterie"]
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # as if none of them were installed
from coterie.cli.main import main
try:
    main(["run", "--rounds", "1", "--clients", "4", "--epochs", "1", "--name", "a", "--quiet", "--json"])
except SystemExit as done:
    assert done.code == 0
    try:
        main(["report", "runs/a", "--quiet", "--json"])
    except SystemExit as done:
        assert done.code == 0
for command, part in ((["report", "runs/a", "--png", "x", "--quiet"], "report"), (["ui"], "ui")):
    try:
        main(command)
    except SystemExit as done:
        assert done.code == 2, part
"""


def test_a_run_and_its_page_need_no_optional_part(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split("pip install ")[1] for line in done.stderr.splitlines()] == [
        "'coterie[report]'.",
        "'coterie[ui]'.",
    ]
