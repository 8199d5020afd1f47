"""The command line as the tests of `cli` have it."""

from tests.cli.conftest import command

__all__ = ["command"]
