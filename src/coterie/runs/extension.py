"""Extending a run: one that is finished or was stopped goes on to more rounds.

config.toml gets the new number of rounds, and `artifacts/extended.json` says what it was before.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from coterie.errors import RunError
from coterie.runs.checks import check_data, check_settings
from coterie.runs.experiment import Experiment
from coterie.runs.folder import Checkpoint, RunFolder, to_toml

log = logging.getLogger("coterie.runs")

FILE = "artifacts/extended.json"


def extended(folder: RunFolder, experiment: Experiment, rounds: int, override: bool = False) -> Experiment:
    """The experiment of a folder with this many rounds, which the folder now has; this process holds the folder.

    Nothing happens if it has that many already. `override`: the settings may differ from those of the checkpoint.
    """
    before = experiment.schedule.rounds
    if rounds == before:
        return experiment
    summary, (checkpoint, _) = folder.summary(), folder.load_checkpoint()
    done = 0 if checkpoint is None else checkpoint.round
    # All that could fail comes before the folder is changed.
    if checkpoint is not None:
        check_unchanged(folder, checkpoint, override)
    experiment = experiment.loaded()
    data = experiment.federation()
    check_data(folder, data, data.digest(), experiment.place_of_data)
    if summary is not None and done != summary["rounds"]:
        raise RunError(f"{folder.path} cannot be extended: the checkpoint of its last round is not there.")
    if summary is not None and done < before:
        raise RunError(
            f"{folder.path} ended by its own rule after {done} of {before} rounds; it has nothing left to do."
        )
    if rounds <= done:
        raise RunError(f"{folder.path} has done {done} rounds; --rounds must be larger. Got {rounds} instead.")
    note = record(folder, experiment, done, rounds)
    schedule = replace(experiment.schedule, rounds=rounds)
    return replace(experiment, schedule=schedule, notes=[*experiment.notes, note])


def record(folder: RunFolder, experiment: Experiment, done: int, rounds: int) -> str:
    """Write to the folder of an experiment that it goes on to more rounds after `done`; the sentence about it."""
    note = _sentence(experiment, done, rounds)
    entry = {"after": done, "from": experiment.schedule.rounds, "to": rounds, "note": note}
    folder.write_json(FILE, [*_entries(folder), entry])
    config = folder.config()
    folder.write_text("config.toml", to_toml(config | {"run": config["run"] | {"rounds": rounds}}))
    folder.place("summary.json").unlink(missing_ok=True)
    log.info("%s: %s", folder.path, note)
    return note


def _sentence(experiment: Experiment, done: int, rounds: int) -> str:
    """What extending a run after `done` rounds means for its result."""
    head = f"extended from {experiment.schedule.rounds} to {rounds} rounds after round {done}"
    whole = f"one run of {rounds} rounds"
    ending = experiment.ending
    if ending is None or done < ending[0]:
        return f"{head}; the result equals that of {whole}"
    return f"{head}; the result may differ from that of {whole}, because {ending[1]}"


def notes_of(folder: RunFolder) -> list[str]:
    """A sentence about each time that the run was extended."""
    return [str(entry["note"]) for entry in _entries(folder)]


def check_unchanged(folder: RunFolder, checkpoint: Checkpoint, override: bool) -> None:
    """Raise if the settings of a folder are not those of its checkpoint, unless it was extended."""
    stored, config = checkpoint.plain.get("settings"), folder.config()
    rounds = config["run"].get("rounds")
    is_extended = any(entry.get("to") == rounds for entry in _entries(folder))
    if is_extended and isinstance(stored, dict) and isinstance(stored.get("run"), dict):
        stored = stored | {"run": stored["run"] | {"rounds": rounds}}
    check_settings(stored, config, folder.path, override)


def _entries(folder: RunFolder) -> list[dict[str, Any]]:
    found = folder.read_json(FILE)
    entries = found if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("note"), str)]
