"""Picture files as uint8 arrays, through Pillow (the optional extra `data`), which is imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers._files import damaged
from coterie.errors import DataError, MissingExtra

Size = tuple[int, int]  # height, width


def pillow() -> Any:
    """The module PIL.Image, or the sentence that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("Reading picture files", "data") from error
    return Image


def read_picture(path: Path, *, size: Size | None = None, channels: int | None = None) -> NDArray[np.uint8]:
    """One picture as uint8 [C, H, W].

    `size` brings it to (height, width); `channels` is 1 (grey) or 3 (colour), by default as in the file.
    """
    image = pillow()
    if not path.is_file():
        raise DataError(f"There is no picture {path}; put it there or take it out of the list.")
    try:
        with image.open(path) as opened:
            grey = opened.mode in ("1", "L", "I", "I;16", "F") if channels is None else channels == 1
            picture = opened.convert("L" if grey else "RGB")
            if size is not None and picture.size != (size[1], size[0]):
                picture = picture.resize((size[1], size[0]), image.Resampling.BILINEAR)
            pixels = np.asarray(picture, dtype=np.uint8)
    # Pillow's decoders raise these, SyntaxError among them, for files that are not pictures or are cut short.
    except (OSError, ValueError, SyntaxError, EOFError, image.DecompressionBombError) as error:
        raise damaged(path, error) from error
    return pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))
