"""Settings of the whole suite."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run: a failure in CI is a failure here. Nothing is timed,
# since the machine may be busy.
settings.register_profile(
    "stable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("stable")


@pytest.fixture
def no_meta_optimizer() -> Iterator[None]:
    """Switches Grappler off: only then do equal graphs give equal bits."""
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    before.setdefault("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options(before)


SLOW_FILES = frozenset(
    (
        "test_bench_peers.py",
        "test_body_budgets.py",
        "test_called.py",
        "test_gpt3_layer.py",
        "test_gradients_before.py",
        "test_kept_inside.py",
        "test_looking_scripts.py",
        "test_measured.py",
        "test_nested.py",
        "test_recurrent.py",
        "test_recurrent_split.py",
        "test_second_order.py",
        "test_split.py",
    )
)
"""Files whose tests take long together."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of these files as slow."""
    for item in items:
        if item.path.name in SLOW_FILES:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Spares the collector what importing has made: half a million objects, no garbage.

    Whatever measures a peak and whatever looks for Keras models goes through all others
    each time.
    """
    gc.collect()
    gc.freeze()
