"""What is collected: code over Flower or Ray only where it is installed (`make test-flower`, `make test-ray`)."""

from importlib.util import find_spec

_NEEDS = {
    "flwr": ["src/coterie/engines/flower/*", "src/coterie/deploy/*", "tests/flower/[!t_]*.py"],
    "ray": ["src/coterie/engines/ray/cluster.py", "src/coterie/engines/ray/engine.py"],
}

collect_ignore_glob = [path for package, paths in _NEEDS.items() if not find_spec(package) for path in paths]
