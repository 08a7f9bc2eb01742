"""Progress bars for what takes longer than a second.

tqdm, which draws them, is installed along; where somebody left it out (`pip install
--no-deps`), there are no bars.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yields a function that advances a bar; it appears after one second.

    Args:
        label: what is being done.
        total: how many steps there are.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda steps: None
        return
    # Never into a file or a pipe: bars there are noise.
    quiet = not sys.stderr.isatty()
    with tqdm(total=total, desc=label, delay=1.0, disable=quiet, leave=False) as bar:
        yield bar.update
