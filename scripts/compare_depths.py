#!/usr/bin/env python3
"""Peak memory and step time against the number of layers: stock, "memory" and "speed".

A training step (loss, gradients, SGD) of pre-activation CIFAR ResNets, transformers and
chains of tanh, of growing depth. At the end, all of them take their steps in turn.

  peak        most live bytes of a step over rest, by the allocator's statistics, MiB
  predicted   the plan's simulation, of a step that does not hold its gradients
  of stock    peak and time over stock's of the same network (time: median of pairs)
  step s      seconds of a step: median, rounds scaled to the fastest one
  trend       least squares: in the layers n for stock, in sqrt(n) for "memory"; of
              three depths at least
  deepest     the deepest ResNet that "memory" trains in the memory that stock needs for
              the one of 3 blocks (--reference), and the time for each layer of both;
              stock on the deep one, too, if the machine has the memory; and a ResNet
              ten times as deep with all of that memory as its budget

Writes OUT/depths.csv, OUT/memory.png and OUT/time.png, and prints the tables. What does
not fit into the memory of the machine is left out.

Settings:
  --quick     batch 32 and small networks: two to three minutes on two cores
  (without)   batch 1280, as in the figure of the original project, halved until a
              ResNet of 20 layers fits: an hour or two on two cores
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, count, counts
from tables import MIB, counted, mebibytes, table

if TYPE_CHECKING:
    from depths import Family, Network

MODES = ("stock", "memory", "speed")
TIMES = 10
"""How many times as deep a network with a budget is."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        batch: Images in a batch of the ResNets.
        blocks: Sizes of the ResNets, 6 layers each and 2 besides.
        depths: Layers of the transformers.
        lengths: Of the chains.
        scale: Of the transformers and the chains.
        reference: Blocks of the ResNet that stock gets, one of `blocks`.
        rounds: Steps of each that are timed.
    """

    batch: int
    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    lengths: tuple[int, ...]
    scale: float
    reference: int
    rounds: int


QUICK = Setting(32, (1, 3, 6, 10), (1, 2, 4), (25, 50, 100, 200), 0.5, 3, 3)
FULL = Setting(
    1280, (1, 3, 5, 8, 12, 17, 23), (1, 2, 4, 8, 16), (50, 100, 200, 400), 1.0, 3, 3
)
STOCK_BYTES_PER_IMAGE_AND_LAYER = 76_000  # measured, for the choice of the batch


def parse(
    arguments: list[str] | None = None, with_suite: bool = False
) -> argparse.Namespace:
    """The command line; or, `with_suite`, that of `test/run_all_tests.sh`."""
    parser = command_line(__doc__)
    add = parser.add_argument
    if with_suite:
        # The shell script knows --no-suite by its whole name alone.
        parser.prog, parser.allow_abbrev = "run_all_tests.sh", False
        add("--no-suite", action="store_true", help="leaves out the suite")
    add("--quick", action="store_true", help="the small setting")
    add("--out", type=Path, default=Path("out"), help="folder of the results (out)")
    add("--batch", type=count(), help="images in a batch of the ResNets")
    add("--blocks", type=_numbers, metavar="A,B", help="sizes of the ResNets")
    add("--depths", type=_numbers, metavar="A,B", help="layers of the transformers")
    add("--lengths", type=_numbers, metavar="A,B", help="lengths of the chains")
    add("--rounds", type=count(), help="timed steps of each")
    add(
        "--reference",
        type=count(),
        metavar="N",
        help="blocks of the ResNet of which stock says what memory there is (3)",
    )
    add("--no-deepest", action="store_true", help="no search for the deepest")
    options = parser.parse_args(arguments)
    blocks = options.blocks or (QUICK if options.quick else FULL).blocks
    if options.reference and options.reference not in blocks:
        words = ", ".join(map(str, blocks))
        parser.error(f"--reference must be one of the blocks, {words}")
    return options


def _numbers(words: str) -> tuple[int, ...]:
    """Sizes in ascending order; none at all leaves these networks out."""
    return tuple(sorted(counts(words))) if words else ()


def setting_of(options: argparse.Namespace) -> Setting:
    """The setting, with what the command line says otherwise."""
    from dataclasses import replace

    setting = QUICK if options.quick else FULL
    names = ("batch", "blocks", "depths", "lengths", "rounds", "reference")
    given = {name: getattr(options, name) for name in names}
    setting = replace(setting, **{n: v for n, v in given.items() if v is not None})
    return setting if options.batch else replace(setting, batch=_batch(setting))


def _batch(setting: Setting) -> int:
    """The batch, halved until stock's reference network fits."""
    from depths import USABLE_FRACTION, available_bytes

    usable = USABLE_FRACTION * available_bytes()
    layers, batch = 6 * setting.reference + 2, setting.batch
    while batch > 1 and batch * layers * STOCK_BYTES_PER_IMAGE_AND_LAYER > usable:
        batch //= 2
    return batch


_STARTED = time.monotonic()


def say(text: str) -> None:
    """Progress with the seconds since the start, apart from the tables."""
    elapsed = time.monotonic() - _STARTED
    print(f"[{elapsed:5.0f} s] {text}", file=sys.stderr, flush=True)


def families(setting: Setting) -> list[Family]:
    """The networks, the ResNets first."""
    from depths import Family
    from models import chain, resnet, transformer

    scale = setting.scale
    return [
        Family(
            "ResNet",
            partial(resnet, batch=setting.batch),
            lambda blocks: 6 * blocks + 2,
            setting.blocks,
        ),
        Family(
            "transformer",
            lambda depth: transformer(scale, depth),
            lambda depth: depth,
            setting.depths,
        ),
        Family(
            "chain",
            partial(chain, scale=scale),
            lambda length: length,
            setting.lengths,
        ),
    ]


def measure(setting: Setting, with_deepest: bool) -> tuple[list[Row], list[Row]]:
    """All rows, and the rows of the deepest network (or none)."""
    from deepest import deepest_rows, find_deepest, times_as_deep
    from depths import add_times, measure_depth
    from measuring import warm_up

    warm_up(MODES[1:])
    measured: list[Network] = []
    pair: tuple[Network, ...] = ()
    for family in families(setting):
        networks = {n: measure_depth(family, n, MODES, say) for n in family.sizes}
        measured += networks.values()
        # At once, while the allocator has seen little else: it fragments.
        small = networks.get(setting.reference)
        if (
            with_deepest
            and family.name == "ResNet"
            and small
            and "stock" in small.calls
        ):
            known = {
                n: network.rows["memory"]["peak_bytes"]
                for n, network in networks.items()
                if "memory" in network.calls
            }
            budget = small.rows["stock"]["peak_bytes"]
            deep = find_deepest(family, "memory", budget, known, say)
            pair = (small, deep)
            if deep.rows["memory"]["layers"] >= TIMES * small.rows["stock"]["layers"]:
                tenfold = times_as_deep(family, TIMES, setting.reference, budget, say)
                pair = (small, deep, tenfold)
            measured += pair[1:]
    say(f"timing all of them in turn, {setting.rounds} times")
    add_times(measured, setting.rounds)
    others = [network for network in measured if network not in pair[1:]]
    rows = [row for network in others for row in network.rows.values()]
    return rows, deepest_rows(*pair) if pair else []


# ---- tables and files


def _mib(key: str) -> Any:
    return lambda row: mebibytes(row.get(key) or None)


def _factor(key: str) -> Any:
    return lambda row: f"{row[key]:.2f}" if key in row else None


COLUMNS = [
    ("", lambda row: row["family"]),
    ("layers", lambda row: row["layers"]),
    ("mode", lambda row: row["mode"]),
    ("peak MiB", _mib("peak_bytes")),
    ("predicted", _mib("predicted_bytes")),
    ("of stock", _factor("peak_of_stock")),
    ("step s", lambda row: f"{row['seconds']:.3f}" if "seconds" in row else None),
    ("of stock", _factor("time_of_stock")),
]
DEEPEST_COLUMNS = [
    ("mode", lambda row: row["mode"]),
    ("layers", lambda row: row["layers"]),
    ("deeper", _factor("deeper")),
    ("peak MiB", _mib("peak_bytes")),
    ("ms per layer", lambda row: f"{1e3 * row['seconds_per_layer']:.2f}"),
    ("of the first", _factor("layer_time_of_stock")),
    ("of stock's step", _factor("time_of_stock")),
]
FIELDS = (
    "part",
    "family",
    "layers",
    "mode",
    "batch",
    "peak_bytes",
    "predicted_bytes",
    "peak_of_stock",
    "seconds",
    "time_of_stock",
    "seconds_per_layer",
    "layer_time_of_stock",
    "deeper",
    "building_seconds",
)


def write_csv(path: Path, rows: list[Row], deepest: list[Row], batch: int) -> None:
    """All rows; "part" tells those of the deepest network."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, FIELDS, lineterminator="\n", extrasaction="ignore"
        )
        writer.writeheader()
        for part, some in (("depths", rows), ("deepest", deepest)):
            for row in some:
                images = batch if row["family"] == "ResNet" else None
                writer.writerow({"part": part, "batch": images} | row)


def show(rows: list[Row], deepest: list[Row], setting: Setting) -> None:
    """Prints the tables and the trends."""
    from depth_pictures import trends

    print(f"A training step; ResNets on {setting.batch} images of 32 x 32\n")
    print(table(COLUMNS, rows), end="\n\n")
    fitted = trends(rows)
    for family in dict.fromkeys(row["family"] for row in rows):
        if not any(name == family for name, _ in fitted):
            print(f"{family}: too few depths for a trend, which takes three")
    for (family, mode), trend in fitted.items():
        power = "n" if trend.power == 1 else "sqrt(n)"
        print(
            f"{family}, {mode}: peak = {trend.constant / MIB:.1f} + "
            f"{trend.slope / MIB:.2f} {power} MiB, within {100 * trend.worst:.0f} %"
        )
    if deepest:
        _show_deepest(deepest)


def _show_deepest(rows: list[Row]) -> None:
    stock = rows[0]
    print(
        f"\nThe deepest ResNet in the {stock['peak_bytes'] / MIB:.1f} MiB that "
        f"stock needs for {counted(stock['layers'], 'layer')}:\n"
    )
    print(table(DEEPEST_COLUMNS, rows), end="\n\n")
    for row in rows[1:]:
        if row["mode"] != "stock":
            print(
                f"{row['mode']}: {row['deeper']:.1f} times as deep, at "
                f"{row['layer_time_of_stock']:.2f} times the time for each layer"
            )
        if "time_of_stock" in row and row["mode"] != "stock":
            print(f"({row['time_of_stock']:.2f} times stock's time for that network)")


def main() -> int:
    options = parse()
    from depth_pictures import draw_memory, draw_time

    setting = setting_of(options)
    rows, deepest = measure(setting, not options.no_deepest)
    out = options.out
    write_csv(out / "depths.csv", rows, deepest, setting.batch)
    drawn = [row for row in deepest if row["mode"] != "budget"]
    draw_memory(out / "memory.png", rows, drawn, setting.batch)
    draw_time(out / "time.png", rows, drawn, setting.batch)
    show(rows, deepest, setting)
    print(f"\nFigures and pictures: {out.resolve()}")
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
