"""What true groups are called: for tables and pictures. It imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Sequence


def words_of_groups(names: Sequence[str]) -> tuple[str, ...]:
    """What to call the groups of a column: its words, and "group 3" for a number; nothing if they are 0, 1, 2 ...

    >>> words_of_groups(["north", "south"]), words_of_groups(["1", "2.0"]), words_of_groups(["0", "1"])
    (('north', 'south'), ('group 1', 'group 2'), ())
    """
    found = tuple(_word(name) for name in names)
    return () if found == tuple(f"group {number}" for number in range(len(found))) else found


def _word(name: str) -> str:
    try:
        return f"group {float(name):g}"
    except ValueError:
        return name or "no group"


def name_groups(names: Sequence[str], groups: Sequence[int], named: Sequence[str] = ()) -> dict[int, str]:
    """Each group of clients and what to call it: its name, the stem its clients' names share, or its number.

    >>> name_groups(["r000-000", "r000-001", "r090-000"], [0, 0, 3]), name_groups(["a", "b"], [0, 1])
    ({0: 'r000', 3: 'r090'}, {0: 'group 0', 1: 'group 1'})
    >>> name_groups(["a", "b"], [1, 1], ["north", "south"])
    {1: 'south'}
    """
    if named and all(0 <= group < len(named) for group in groups):
        return {group: named[group] for group in sorted(set(groups))}
    stems: dict[int, set[str]] = {group: set() for group in sorted(set(groups))}
    for name, group in zip(names, groups, strict=True):
        stems[group].add(name.rpartition("-")[0])
    shared = {group: next(iter(found)) for group, found in stems.items() if len(found) == 1}
    if len(shared) == len(stems) == len(set(shared.values())) and all(shared.values()):
        return shared
    return {group: f"group {group}" for group in stems}
