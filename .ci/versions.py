"""Install coterie as users do and run the tests on it, with the lowest or the newest versions that it allows.

    python .ci/versions.py lowest newest all [--torch torch==2.13.0] [--tests tests/cli -n 2]

`lowest` takes the lowest version of every dependency, and `newest` the newest; both are without Flower, which holds
typer and rich back. `all` only resolves coterie[all], whose versions must fit Flower's. torch is pinned apart, because
the newest one may pull in several GB of CUDA packages. Everything is written below build/versions.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "versions"
EXTRAS = ("report", "ui", "data", "tensorboard", "mlflow", "wandb")  # those that the tests use
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "httpx")
LOWEST = re.compile(r"^([A-Za-z0-9_.-]+)>=([0-9.]+)$")
# Old packages use what others have since deprecated; that is not ours to repair.
QUIET = ("-W", "ignore::DeprecationWarning", "-W", "ignore::PendingDeprecationWarning")


def lowest_versions() -> list[str]:
    """A constraint for each dependency of the package and of the tested extras; torch is not among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for name in EXTRAS for item in extras[name])]
    found = [LOWEST.match(item) for item in wanted]
    if not all(found):
        sys.exit(f"Every dependency must be NAME>=VERSION. Got {wanted}.")
    return [f"{match[1]}=={match[2]}" for match in found if match and match[1] != "torch"]


def made(name: str, torch: str) -> tuple[Path, Path]:
    """A fresh environment with torch, and the wheel of this tree."""
    home = HOME / name
    venv.create(home, clear=True, with_pip=True)
    python = home / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    call(python, "-m", "pip", "install", "--quiet", torch)
    call(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", home / "wheel", ROOT)
    return python, next((home / "wheel").glob("coterie-*.whl"))


def call(*command: object) -> None:
    """Run a command in the repository; its failure is ours."""
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Do what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", nargs="+", choices=("lowest", "newest", "all"))
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs first")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=["tests", "-n", "auto"], help="pytest's arguments")
    given = parser.parse_args()
    for which in given.which:
        python, wheel = made(which, given.torch)
        if which == "all":
            call(python, "-m", "pip", "install", "--quiet", "--dry-run", f"{wheel}[all]", given.torch)
            continue
        limits: list[object] = []
        if which == "lowest":
            (HOME / "lowest.txt").write_text("\n".join([*lowest_versions(), given.torch]) + "\n", encoding="utf-8")
            limits = ["--constraint", HOME / "lowest.txt"]
        wanted = f"{wheel}[{','.join(EXTRAS)}]"
        call(python, "-m", "pip", "install", "--quiet", *limits, wanted, given.torch, *TOOLS)
        call(python, "-m", "pip", "freeze")
        quiet = QUIET if which == "lowest" else ()
        call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *quiet, *given.tests)


if __name__ == "__main__":
    main()
