"""Paths to write to, checked before any work is done for what goes there."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from mem_util.errors import got

__all__ = ["output_path", "picture_path", "png_by_default"]


def output_path(path: str | PathLike[str], where: str) -> Path:
    """The path of a file that can be written.

    Args:
        path: what the user gave.
        where: the public function that got it, with its package, for messages.

    Returns:
        The same as a `Path`.

    Raises:
        TypeError: it is no path.
        ValueError: it names no file.
        FileNotFoundError: its folder does not exist.
    """
    if not isinstance(path, str | PathLike) or isinstance(os.fspath(path), bytes):
        raise TypeError(
            f"`{where}`: `path` must be a string or a `pathlib.Path`, but got "
            f"{got(path)}."
        )
    file = Path(path)
    if not file.name or file.is_dir():
        raise ValueError(
            f"`{where}`: `path` must name a file, but got {str(path)!r}"
            f"{', which is a folder' if file.name else ''}. Give one such as "
            '"step.json" or "step.png".'
        )
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"`{where}`: the folder of `path`, {str(file.parent)!r}, does not exist. "
            f"Make it first: os.makedirs({str(file.parent)!r})."
        )
    return file


def picture_path(path: str | PathLike[str], where: str) -> Path:
    """The path of a picture of a kind that matplotlib can write.

    Args:
        path: what the user gave. Without a suffix it becomes a PNG.
        where: the public function that got it, with its package, for messages.

    Returns:
        The path of the file that will be written.

    Raises:
        TypeError: it is no path.
        ValueError: it names no file, or its suffix is that of no picture.
        FileNotFoundError: its folder does not exist.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    file = png_by_default(output_path(path, where))
    kinds = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if file.suffix[1:].lower() not in kinds:
        raise ValueError(
            f"`{where}`: the suffix of `path` must be that of a picture (.png, .svg, "
            f".pdf or another that matplotlib writes), but got {str(path)!r}."
        )
    return file


def png_by_default(file: Path) -> Path:
    """The path of a picture, which is a PNG where the suffix does not say otherwise."""
    return file if file.suffix else file.parent / f"{file.name.rstrip('.')}.png"
