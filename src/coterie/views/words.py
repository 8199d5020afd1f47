"""Numbers in words, for pages and the terminal."""


def size_text(count: float) -> str:
    """A number of bytes.

    >>> size_text(999), size_text(1_540_000), size_text(5e15)
    ('999 B', '1.5 MB', '5000.0 TB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"
