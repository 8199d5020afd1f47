"""Image files as uint8 arrays, through Pillow (the optional extra `data`), imported on first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers._files import damaged
from coterie.errors import DataError, MissingExtra

Size = tuple[int, int]  # height, width


def pillow() -> Any:
    """The module PIL.Image; raises MissingExtra if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("Reading image files", "data") from error
    return Image


def pixels_of(image: Any, *, grey: bool, size: Size | None = None) -> NDArray[np.uint8]:
    """A Pillow image as uint8 [C, H, W], resized to `size`."""
    image = image.convert("L" if grey else "RGB")
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), pillow().Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def read_image(path: Path, *, size: Size | None = None, channels: int | None = None) -> NDArray[np.uint8]:
    """One image as uint8 [C, H, W], resized to `size`; `channels` is 1 (grey), 3 (colour) or as in the file."""
    module = pillow()
    if not path.is_file():
        raise DataError(f"There is no image {path}; add it or remove it from the list.")
    try:
        with module.open(path) as image:
            grey = image.mode in ("1", "L", "I", "I;16", "F") if channels is None else channels == 1
            return pixels_of(image, grey=grey, size=size)
    # Pillow's decoders raise these, including SyntaxError, for files that are truncated or not images.
    except (OSError, ValueError, SyntaxError, EOFError, module.DecompressionBombError) as error:
        raise damaged(path, error) from error
