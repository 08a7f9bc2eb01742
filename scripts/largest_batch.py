#!/usr/bin/env python3
"""The largest batches that fit into a budget, predicted, then run to show that they do.

`max_batch_size` says, without running anything, how many examples fit for stock, for
`memory` and for the budget as `checkpoints=`. Then the gradients of each are built for
batches of just that size, run, and measured by `mem_util`.

  batch       the largest that fits
  predicted   the plan's peak at that size, in MiB
  asked for   what the gradients asked the allocator for at their peak, in MiB
  measured    what it handed out for that, in the worst of three runs, in MiB
  of budget   measured over budget; the script fails if that is above 1

Allocators hand out chunks that are larger than what was asked for, mostly by a few
percent, by more where ops run several times. `--headroom` is what is left to that: it
is not planned with.

Examples:
  largest_batch.py                             an MLP in 64 MiB, in less than a minute
  largest_batch.py resnet62 --budget 256MiB
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, count, positive, refuse_unknown
from tables import Column, mebibytes, say, table

if TYPE_CHECKING:
    from models import Workload

MODEL_NAMES = ("mlp", "transformer", "resnet62", "unet", "densenet121", "resnet50")
STRATEGIES = ("stock", "memory", "budget")
RUNS = 3
Row = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    known = ", ".join(MODEL_NAMES)
    add("model", nargs="?", default="mlp", help=f"one of {known} (mlp)")
    add("--budget", default="64MiB", help="what the peak may be above rest (64MiB)")
    add("--headroom", type=count(0, 50), default=20, help="percent of it (20)")
    add("--scale", type=positive, default=0.25, help="size of the model (0.25)")
    add("--out", type=Path, help="folder for largest_batch.json")
    options = parser.parse_args(arguments)
    refuse_unknown(parser, [options.model], MODEL_NAMES, "model")
    return options


def resized(workload: Workload, batch_size: int) -> Workload:
    """The same model with a batch of so many examples, repeated as often as need be."""
    from dataclasses import replace

    import numpy as np
    import tensorflow as tf

    batch = (
        tf.constant(np.resize(part.numpy(), (batch_size, *part.shape[1:])))
        for part in workload.batch
    )
    return replace(workload, batch=tuple(batch))


def measured(workload: Workload, mode: Any) -> tuple[int, int]:
    """The worst peaks of the gradients above rest: asked for, and handed out."""
    from measuring import build_gradients, peak_bytes, requested_bytes

    built = build_gradients(workload, mode)

    def run() -> Any:
        return built.call(*workload.batch)

    handed_out = int(peak_bytes(run, RUNS).most)
    return int(requested_bytes(run).most), handed_out


def rows_of(workload: Workload, budget: str, headroom_percent: int) -> list[Row]:
    """For each strategy a row: what was predicted, and what came."""
    import tensorflow as tf

    import memory_saving_gradients as msg

    specs = [
        tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in workload.batch
    ]
    limit = msg.Budget(budget)
    if limit.is_share:
        raise SystemExit(f"error: a share such as {budget} is no limit for a batch")
    budget_bytes = limit.allowed(0)
    within = msg.Budget(budget_bytes * (100 - headroom_percent) // 100)
    found = msg.max_batch_size(workload.loss, within, *specs)
    say(f"predicted, nothing was run so far\n{found}")
    rows = []
    for name in STRATEGIES:
        best = getattr(found, name)
        requested = peak = None
        if best.batch_size:
            say(f"{name}: running batches of {best.batch_size}")
            mode = within if name == "budget" else name
            requested, peak = measured(resized(workload, best.batch_size), mode)
        rows.append(
            {
                "strategy": name,
                "batch": best.batch_size,
                "predicted_bytes": best.peak_bytes if best.batch_size else None,
                "requested_bytes": requested,
                "measured_bytes": peak,
                "of_budget": None if peak is None else peak / budget_bytes,
                "extra_percent": 100 * best.extra_fraction,
            }
        )
    return rows


COLUMNS: list[Column] = [
    ("strategy", lambda row: row["strategy"]),
    ("batch", lambda row: row["batch"]),
    ("predicted", lambda row: mebibytes(row["predicted_bytes"])),
    ("asked for", lambda row: mebibytes(row["requested_bytes"])),
    ("measured", lambda row: mebibytes(row["measured_bytes"])),
    ("of budget", lambda row: row["of_budget"] and f"{row['of_budget']:.3f}"),
    ("extra work, %", lambda row: f"{row['extra_percent']:.1f}"),
]


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    options = parse(arguments)
    from models import MODELS

    workload = MODELS[options.model](options.scale)
    rows = rows_of(workload, options.budget, options.headroom)
    print(f"{workload.name} in {options.budget}\n{table(COLUMNS, rows)}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "largest_batch.json"
        path.write_text(json.dumps(rows, indent=1), "utf-8")
    return int(any((row["of_budget"] or 0) > 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
