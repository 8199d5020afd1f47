"""Build the wheel into dist/, install it where nothing else of the repository is, and use it.

python .ci/wheel.py [--torch torch==2.13.0]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from versions import ROOT, call, made


def main() -> None:
    """Build, install, use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs first")
    python, wheel = made("wheel", parser.parse_args().torch)
    call(python, "-m", "pip", "install", "--quiet", wheel)
    with tempfile.TemporaryDirectory() as empty:

        def coterie(*words: str) -> str:
            command = [str(python.with_name("coterie")), *words]
            return subprocess.run(command, cwd=empty, check=True, capture_output=True, text=True).stdout

        print("coterie", coterie("--version").strip())
        coterie("init", "-a", "fedavg", "--clients", "8", "--rounds", "2")
        summary = json.loads(coterie("run", "--config", "experiment.toml", "--json", "--quiet"))
        assert summary["rounds"] == 2, summary
        coterie("report", "runs", "--no-tsne")  # the page needs files of the package, and no extra
        assert json.loads(coterie("list", "algorithms", "--json"))
        assert coterie("reproduce", "--list")
    (ROOT / "dist").mkdir(exist_ok=True)
    wheel.replace(ROOT / "dist" / wheel.name)
    print(f"built {Path('dist') / wheel.name}")


if __name__ == "__main__":
    main()
