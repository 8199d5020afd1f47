"""The tree of errors: what they are, what they say, how the command line ends with them."""

from __future__ import annotations

import pytest

from coterie import errors
from coterie.errors import (
    CheckpointError,
    ConfigError,
    CoterieError,
    DataError,
    EngineError,
    Interrupted,
    MethodError,
    MissingExtra,
    ModelError,
    RunError,
    RunsFailed,
    StopRun,
    StorageError,
    UnknownName,
    nearest_name,
)


@pytest.mark.parametrize(
    ("child", "parents"),
    [
        (ConfigError, (CoterieError, ValueError)),
        (UnknownName, (ConfigError,)),
        (DataError, (CoterieError, ValueError)),
        (ModelError, (CoterieError, ValueError)),
        (EngineError, (CoterieError, RuntimeError)),
        (MethodError, (CoterieError, RuntimeError)),
        (StopRun, (CoterieError,)),
        (MissingExtra, (CoterieError, ImportError)),
        (RunError, (CoterieError,)),
        (CheckpointError, (RunError,)),
        (RunsFailed, (RunError,)),
        (StorageError, (CoterieError, OSError)),
        (Interrupted, (CoterieError,)),
    ],
)
def test_an_error_can_be_caught_as_ours_and_as_pythons(child, parents):
    for parent in parents:
        assert issubclass(child, parent)


def test_the_drawing_names_every_error():
    own = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, CoterieError)]
    assert len(own) == 14
    for error in own:
        assert error.__name__ in errors.__doc__, error


def test_only_an_interruption_has_the_exit_code_of_ctrl_c():
    assert Interrupted("stopped").exit_code == 130
    codes = {e.exit_code for e in (CoterieError, ConfigError, DataError, RunError, StorageError, EngineError)}
    assert codes == {2}


def test_unknown_name_gives_the_nearest_and_all_known():
    error = UnknownName("algorithm", "fesm", ["ifca", "fesem", "fedavg"])
    assert str(error) == "There is no algorithm 'fesm'. Did you mean 'fesem'? Known: fedavg, fesem, ifca."
    assert (error.kind, error.name, error.nearest) == ("algorithm", "fesm", "fesem")
    assert error.known == ["fedavg", "fesem", "ifca"]


def test_unknown_name_does_not_guess_wildly():
    error = UnknownName("dataset", "zzzzzz", ["digits"])
    assert error.nearest is None
    assert str(error) == "There is no dataset 'zzzzzz'. Known: digits."


def test_unknown_name_where_nothing_is_known():
    assert str(UnknownName("run", "a", [])) == "There is no run 'a'. There are none."


@pytest.mark.parametrize(
    ("typed", "known", "nearest"),
    [
        ("MD-ICFL", ["md_icfl", "ifca"], "md_icfl"),  # case and dashes do not count
        ("num_cluster", ["num_clusters", "restarts"], "num_clusters"),
        ("rotated_digits", ["digits", "rotated-digits"], "rotated-digits"),
        ("qqq", ["fedavg"], None),
        ("fedavg", [], None),
    ],
)
def test_nearest_name(typed, known, nearest):
    assert nearest_name(typed, known) == nearest


def test_missing_extra_says_what_to_install():
    error = MissingExtra("The report", "report")
    assert error.extra == "report"
    assert str(error) == "The report requires an optional dependency: pip install 'coterie[report]'."


def test_storage_error_reads_as_its_sentence():
    assert str(StorageError("The disk is full; round 3 is kept.")) == "The disk is full; round 3 is kept."
