"""The command line as the tests of `cli` have it."""

from tests.cli.conftest import command, small_run

__all__ = ["command", "small_run"]
