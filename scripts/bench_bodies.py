#!/usr/bin/env python3
"""Measures what recomputation inside loops, branches and called functions saves.

Each case is one training step: a model, its gradients, by stock and by the library.

  lstm      `tf.while_loop`, 100 steps of an LSTM cell, batch 512 x 256 units
  long      the same over 400 steps, also with its state held for few of them (rows
            "every sqrt")
  longer    the same over 1600 steps, without stock, whose peak grows with the steps
  branches  8 `tf.cond`s of two branches with 3 dense layers each
  blocks    24 dense layers, each a `tf.function`; and the same inlined
  keras     two layers LSTM(256) over 100 steps, batch 512, with `train_on_batch`
  keras400  one layer LSTM(256) over 400 steps, batch 512, also with its state held for
            few of them

  peak      allocator peak of the step over rest, in MB, and of stock's
  seconds   of one step; other processes count, too
  off by    largest difference of a gradient from stock's, Grappler's meta-optimizer
            off, relative to that variable's largest entry (not for keras)

Examples:
  bench_bodies.py                      all of them: some minutes
  bench_bodies.py lstm blocks --jit    two of them, compiled by XLA
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arguments import command_line, refuse_unknown

CASES = ("lstm", "long", "longer", "branches", "blocks", "keras", "keras400")

Model = Callable[[Any], Any]
Row = dict[str, Any]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {CASES}")
    parser.add_argument("--jit", action="store_true", help="compile steps by XLA")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    given = parser.parse_args(words)
    given.cases = given.cases or list(CASES)
    refuse_unknown(parser, given.cases, CASES, "case")
    return given


def main() -> None:
    given = parse()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from tables import say, table

    heads = ("case", "way", "peak", "of stock", "seconds", "off by")
    columns = [(head, lambda row, head=head: row[head] or None) for head in heads]
    rows: list[Row] = []
    for case in given.cases:
        for row in RUNNERS[case](given.jit):
            rows.append(row)
            say(", ".join(f"{value}" for value in row.values()))
    print(table(columns, rows))
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1), "utf-8")


# -- models ----------------------------------------------------------------------------


def _weights(count: int, *shape: int) -> list[Any]:
    import tensorflow as tf

    return [
        tf.Variable(0.05 * tf.random.stateless_normal(shape, [n, 2]))
        for n in range(count)
    ]


def _lstm(steps: int) -> tuple[Model, list[Any], Any]:
    import tensorflow as tf

    kernel, recurrent = weights = _weights(2, 256, 1024)

    def model(x: Any) -> Any:
        def cell(i: Any, h: Any, c: Any) -> Any:
            a, b, g, o = tf.split(x @ kernel + h @ recurrent, 4, 1)
            c = tf.sigmoid(a) * c + tf.sigmoid(b) * tf.tanh(g)
            return i + 1, tf.sigmoid(o) * tf.tanh(c), c

        zeros = tf.zeros([512, 256])
        h = tf.while_loop(
            lambda i, *_: i < steps,
            cell,
            [0, zeros, zeros],
            maximum_iterations=steps,
        )[1]
        return tf.reduce_mean(h * h)

    return model, weights, tf.random.stateless_normal([512, 256], [5, 6])


def _layers(x: Any, weights: list[Any]) -> Any:
    import tensorflow as tf

    for w in weights:
        x = tf.tanh(tf.nn.gelu(x @ w))
    return x


def _blocks(wrap: Any) -> tuple[Model, list[Any], Any]:
    import tensorflow as tf

    weights = _weights(24, 512, 512)
    calls = [wrap(lambda x, w=w: _layers(x, [w])) for w in weights]

    def model(x: Any) -> Any:
        for call in calls:
            x = call(x)
        return tf.reduce_mean(x * x)

    return model, weights, tf.random.stateless_normal([2048, 512], [5, 6])


def _branches() -> tuple[Model, list[Any], Any]:
    import tensorflow as tf

    weights = _weights(48, 512, 512)

    def model(x: Any) -> Any:
        for n in range(0, 48, 6):
            x = tf.cond(
                tf.reduce_sum(x) > -1e9,
                lambda x=x, n=n: _layers(x, weights[n : n + 3]),
                lambda x=x, n=n: _layers(x, weights[n + 3 : n + 6]),
            )
        return tf.reduce_mean(x * x)

    return model, weights, tf.random.stateless_normal([2048, 512], [5, 6])


# -- measuring -------------------------------------------------------------------------


def _peak(run: Callable[[], Any]) -> tuple[float, float]:
    """Peak in MB over rest, and seconds, of the second call."""
    import tensorflow as tf

    run()
    tf.config.experimental.reset_memory_stats("CPU:0")
    rest = tf.config.experimental.get_memory_info("CPU:0")["current"]
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"] - rest
    return peak / 1e6, seconds


def _compared(case: str, ways: list[tuple[str, Any, str]], jit: bool) -> Iterator[Row]:
    """Steps by several ways; the first that is stock's is what others are held to."""
    import numpy as np
    import tensorflow as tf

    import memory_saving_gradients as msg
    from measuring import without_meta_optimizer

    stock_peak, stock = 0.0, None
    for name, made, mode in ways:
        model, weights, x = made

        @tf.function(jit_compile=jit, autograph=False)
        def step(x: Any, model=model, weights=weights, mode=mode, name=name) -> Any:
            is_stock = mode == "stock"
            tape = tf.GradientTape if is_stock else msg.GradientTape
            every = "sqrt" if name.startswith("every") else None
            keywords = {} if is_stock else {"checkpoints": mode, "every": every}
            with tape(**keywords) as recording:
                loss = model(x)
            zeros = tf.UnconnectedGradients.ZERO
            return recording.gradient(loss, weights, unconnected_gradients=zeros)

        with without_meta_optimizer():
            found = [np.asarray(g) for g in step(x)]
            peak, seconds = _peak(lambda step=step, x=x: step(x))
        off = ""
        if mode == "stock":
            stock_peak, stock = stock_peak or peak, stock or found
        elif stock is not None:
            pairs = list(zip(stock, found, strict=True))
            same = all(a.tobytes() == b.tobytes() for a, b in pairs)
            worst = max(np.abs(a - b).max() / (np.abs(a).max() or 1) for a, b in pairs)
            off = "0" if same else f"{worst:.1e}"
        yield _row(case, name, peak, stock_peak, seconds, off)


def _row(
    case: str, way: str, peak: float, stock: float, seconds: float, off: str = ""
) -> Row:
    share = f"{peak / stock:.3f}" if stock else ""
    return {
        "case": case,
        "way": way,
        "peak": f"{peak:.0f}",
        "of stock": share,
        "seconds": f"{seconds:.1f}",
        "off by": off,
    }


def _modes(make: Callable[[], Any]) -> list[tuple[str, Any, str]]:
    return [(mode, make(), mode) for mode in ("stock", "memory", "speed")]


def _long(steps: int, jit: bool) -> Iterator[Row]:
    ways = [
        ("stock", _lstm(steps), "stock"),
        ("memory", _lstm(steps), "memory"),
        ("every sqrt, memory", _lstm(steps), "memory"),
    ]
    case = f"lstm, {steps} steps"
    yield from _compared(case, ways[2:] if steps > 1000 else ways, jit)


def _all_blocks(jit: bool) -> Iterator[Row]:
    import tensorflow as tf

    yield from _compared("blocks", _modes(lambda: _blocks(tf.function)), jit)
    yield from _compared("inlined", _modes(lambda: _blocks(lambda f: f)), jit)


def _lstm_rows(jit: bool) -> Iterator[Row]:
    yield from _compared("lstm", _modes(lambda: _lstm(100)), jit)


def _keras(jit: bool) -> Iterator[Row]:
    ways = [(mode, mode, None) for mode in ("stock", "memory", "speed")]
    return _layers_of_keras("keras", 100, 2, ways, jit)


def _keras400(jit: bool) -> Iterator[Row]:
    ways = [
        ("stock", "stock", None),
        ("memory", "memory", None),
        ("every sqrt, memory", "memory", "sqrt"),
        ("30%", "30%", None),
    ]
    return _layers_of_keras("keras400", 400, 1, ways, jit)


def _layers_of_keras(
    case: str, steps: int, count: int, ways: list[tuple[str, str, Any]], jit: bool
) -> Iterator[Row]:
    import keras
    import numpy as np

    import memory_saving_gradients as msg
    from tables import say

    x = np.random.default_rng(0).standard_normal((512, steps, 256)).astype(np.float32)
    y = np.zeros((512, 1), np.float32)
    stock = 0.0
    for way, mode, every in ways:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((steps, 256)),
                *(
                    keras.layers.LSTM(256, return_sequences=n < count - 1)
                    for n in range(count)
                ),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse", jit_compile=jit)
        if mode != "stock":
            msg.memory_saving(model, mode, every=every)
        try:
            peak, seconds = _peak(lambda model=model: model.train_on_batch(x, y))
        except msg.BudgetError as error:
            say(f"{case}, {way}: {error}")
            continue
        stock = stock or peak
        yield _row(case, way, peak, stock, seconds)


RUNNERS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "lstm": _lstm_rows,
    "long": lambda jit: _long(400, jit),
    "longer": lambda jit: _long(1600, jit),
    "branches": lambda jit: _compared("branches", _modes(_branches), jit),
    "blocks": _all_blocks,
    "keras": _keras,
    "keras400": _keras400,
}

if __name__ == "__main__":
    main()
