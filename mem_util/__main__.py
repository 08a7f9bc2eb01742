"""Command line: tables, pictures and Chrome traces of traces in files.

python -m mem_util run_metadata.pb --png step.png --json step.json
python -m mem_util --compare before.pb after.pb --png both.png
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mem_util.costs import write_costs
from mem_util.errors import MemUtilError
from mem_util.paths import output_path, picture_path, png_by_default
from mem_util.records import format_bytes
from mem_util.text import summary, timeline_lines
from mem_util.trace_data import Trace
from mem_util.tracing import profiler_files, read_trace

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mem_util",
        description="Shows the memory of traced TensorFlow steps, from a serialised "
        "RunMetadata or StepStats (run_metadata.pb, timeline.pb) or from the folder of "
        "a profiler (*.xplane.pb).",
    )
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="file or folder")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two traces, for one picture"
    )
    parser.add_argument("--png", metavar="FILE", help="write a picture")
    parser.add_argument(
        "--json", metavar="FILE", help="write a Chrome trace (Perfetto opens it)"
    )
    parser.add_argument(
        "--costs", metavar="FILE", help="write measured seconds by op name, as JSON"
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help='only this one, as "/gpu:0"; "gpu" where there is one',
    )
    parser.add_argument(
        "--top", type=_count, default=5, help="tensors to list (default: %(default)s)"
    )
    parser.add_argument(
        "--timeline", action="store_true", help="print each change of live bytes too"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: those of the process by default.

    Returns:
        The exit code: 0, or 1 after an error that was printed.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if bool(given.traces) == bool(given.compare):
        parser.error("expected either TRACE or --compare A B")
    if given.compare and (given.json or given.costs):
        parser.error("--json and --costs are of one TRACE, not of --compare")
    if len(given.traces) > 1 and (given.png or given.json or given.costs):
        parser.error("--png, --json and --costs are of one TRACE; or use --compare A B")
    if problem := _overwritten(given):
        parser.error(problem)
    # The notes are part of what is printed: do not say them twice.
    logging.getLogger("mem_util").setLevel(logging.ERROR)
    try:
        _check_outputs(given)
        if given.compare:
            _compare(given)
            return 0
        # One bad trace does not keep the others from being shown.
        good = [_shown(path, given) for path in given.traces]
        return 0 if all(good) else 1
    except MemUtilError as error:
        return _failed(str(error))
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError) as error:
        # A folder that is not there, a suffix that is no kind of picture.
        return _failed(f"cannot write: {error}")


def _failed(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def _overwritten(given: argparse.Namespace) -> str | None:
    """What is wrong where a file to write is one of those to read."""
    outputs = {
        "--png": given.png and png_by_default(Path(given.png)),
        "--json": given.json and Path(given.json),
        "--costs": given.costs and Path(given.costs),
    }
    for path in map(Path, given.compare or given.traces):
        for read in profiler_files(path) if path.is_dir() else [path]:
            for option, file in outputs.items():
                if file and file.exists() and read.exists() and file.samefile(read):
                    return (
                        f"{option}: expected a file of its own, but got {file}, which "
                        f"is the trace to read, {read}: name another"
                    )
    return None


def _check_outputs(given: argparse.Namespace) -> None:
    """Raises what is wrong with the files to write, before anything is printed."""
    if given.png:
        picture_path(given.png, "--png")
    for option, path in (("--json", given.json), ("--costs", given.costs)):
        if path:
            output_path(path, option)


def _count(text: str) -> int:
    """What `--top` takes."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a count, 0 or more, but got {text}")
    return int(text)


def _shown(path: str, given: argparse.Namespace) -> bool:
    """One trace's table, and the files asked for; False after an error."""
    try:
        traced = read_trace(path)
        print(f"{path}\n{summary(traced, given.device, given.top)}")
        if given.timeline:
            for name in [given.device] if given.device else traced.timelines:
                print("\n".join(timeline_lines(traced.timeline(name))))
        if given.png:
            traced.save_png(given.png)
        if given.json:
            traced.save_json(given.json)
        if given.costs:
            write_costs(given.costs, traced)
    except MemUtilError as error:
        _failed(str(error))
        return False
    return True


def _compare(given: argparse.Namespace) -> None:
    """A table of two traces, and both in one picture."""
    labels = _labels(given.compare)
    pair = [read_trace(path) for path in given.compare]
    names = _common(*pair)
    if given.device:
        names = [pair[0].timeline(given.device).device]
    for letter, label in zip("AB", labels, strict=True):
        print(f"{letter} = {label}")
    print(f"{'device':<10} {'peak A':>10} {'peak B':>10} {'B / A':>7}")
    for name in names:
        a, b = (traced.peak_bytes[name] for traced in pair)
        print(f"{name:<10} {format_bytes(a):>10} {format_bytes(b):>10} {b / a:>7.3f}")
    if given.png:
        from mem_util.plot import Curve, draw_curves

        curves = [
            Curve(
                f"{letter}: {label} {name}",
                *traced.timeline(name).curve(),
                dashed=letter == "B",
            )
            for name in names
            for letter, label, traced in zip("AB", labels, pair, strict=True)
        ]
        draw_curves(given.png, curves, title="Live bytes")


def _common(a: Trace, b: Trace) -> list[str]:
    """Devices of both traces; if there are none, the error that says why."""
    names = [name for name in a.timelines if name in b.timelines]
    return names or sorted({*a.timelines, *b.timelines} or {"/cpu:0"})


def _labels(paths: Sequence[str]) -> list[str]:
    """The names of files, or their whole paths where the names agree."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


if __name__ == "__main__":
    sys.exit(main())
