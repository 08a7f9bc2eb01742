"""Documents as programs: their code blocks, run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "blocks_of", "run_as_reader"]

ROOT = Path(__file__).resolve().parents[1]


def blocks_of(text: str, language: str) -> list[str]:
    """The fenced code blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def run_as_reader(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `train.py` in a folder of its own."""
    path = folder / "train.py"
    path.write_text(script, "utf-8")
    # Last on the path, so that an installed package wins over the checkout.
    starter = (
        "import runpy, sys; sys.path.append(sys.argv[2]); "
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", starter, path, ROOT],
        cwd=folder,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
    )
