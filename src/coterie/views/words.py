"""Numbers in words, tables in Markdown, and texts of others made safe to show: for pages, pictures, the terminal."""

from collections.abc import Sequence

from coterie.trust import safe_text as safe_text


def size_text(count: float) -> str:
    """A number of bytes.

    >>> size_text(999), size_text(1_540_000), size_text(5e15)
    ('999 B', '1.5 MB', '5000.0 TB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first line is its head, and all columns but the first are on the right.

    >>> print(markdown_table([["method", "accuracy"], ["fesem", "95.1"]]))
    | method | accuracy |
    | --- | ---: |
    | fesem | 95.1 |
    """
    head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in lines]
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ruler, *rows))
