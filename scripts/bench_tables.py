"""What `bench_models.py` says of its rows: sentences as it runs, tables at its end."""

from __future__ import annotations

from typing import Any

from tables import mebibytes, table

__all__ = ["Row", "sentence", "show"]

Row = dict[str, Any]


def sentence(row: Row) -> str:
    """A row as progress, so that a long run shows what it has."""
    if "error" in row:
        return f"{row['model']} {row['mode']} FAILED: {row['error']}"
    peak, time_of_stock = row["peak_of_stock"], row["time_of_stock"]["median"]
    return (
        f"{row['model']} {row['mode']}: {peak:.3f} of stock's peak, "
        f"{time_of_stock:.2f} of its time"
    )


def _factor(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _spread(spread: Row | None) -> str | None:
    return spread and "{median:.2f} ({least:.2f}-{most:.2f})".format(**spread)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


MODEL_COLUMNS = [
    ("model", lambda row: row["model"]),
    ("mode", lambda row: row["mode"] + (" (XLA)" if row["jit"] else "")),
    ("peak MiB", lambda row: mebibytes(row["peak_bytes"]["most"])),
    ("of stock", lambda row: _factor(row.get("peak_of_stock"))),
    ("time of stock", lambda row: _spread(row.get("time_of_stock"))),
    ("predicted MiB", lambda row: mebibytes(row.get("predicted_bytes"))),
    ("measured/predicted", lambda row: _factor(row.get("of_predicted"))),
    ("extra", lambda row: _percent(row.get("extra_fraction"))),
    ("building s", lambda row: f"{row['building_seconds']:.2f}"),
    ("differs", lambda row: f"{row['difference']:.1e}"),
]
CHAIN_COLUMNS = [
    ("chain", lambda row: row["model"]),
    ("mode", lambda row: row["mode"] + (" (XLA)" if row["jit"] else "")),
    ("threads", lambda row: row["threads"]),
    ("worst peak MiB", lambda row: mebibytes(row["peak_bytes"]["most"])),
    ("predicted MiB", lambda row: mebibytes(row["predicted_bytes"])),
    ("v1 session MiB", lambda row: mebibytes(row["session_peak_bytes"])),
]
BUILDING_COLUMNS = [
    ("ops", lambda row: row["ops"]),
    ("mode", lambda row: row["mode"]),
    ("seconds", lambda row: f"{row['seconds']:.2f}"),
    ("of stock", lambda row: f"{row['of_stock']:.2f}"),
    ("us per op", lambda row: f"{row['microseconds_per_op']:.0f}"),
]


def show(figures: dict[str, list[Row]]) -> None:
    """One table for each kind of figures."""
    tables = (
        ("models", MODEL_COLUMNS),
        ("chains", CHAIN_COLUMNS),
        ("building", BUILDING_COLUMNS),
    )
    for part, columns in tables:
        rows = [row for row in figures[part] if "error" not in row]
        if rows:
            print(table(columns, rows), end="\n\n")


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: bench_models.py imports it.")
