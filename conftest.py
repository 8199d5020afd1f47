"""What is collected: code over Flower only where Flower is installed (`make test-flower` installs it)."""

from importlib.util import find_spec

collect_ignore_glob = (
    []
    if find_spec("flwr")
    else [
        "src/coterie/engines/flower/*",
        "src/coterie/deploy/*",
        "tests/flower/fakes.py",
        "tests/flower/sites.py",
    ]
)
