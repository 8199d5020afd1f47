"""What is collected: code over Flower, Ray or Triton only where it is installed (see the Makefile)."""

from importlib.util import find_spec

_NEEDS = {
    "flwr": ["src/coterie/engines/flower/*", "src/coterie/deploy/*", "tests/flower/[!t_]*.py"],
    "ray": ["src/coterie/engines/ray/cluster.py", "src/coterie/engines/ray/engine.py"],
    "triton": ["src/coterie/engines/kernels/fused/*.py"],
}

collect_ignore_glob = [path for package, paths in _NEEDS.items() if not find_spec(package) for path in paths]
