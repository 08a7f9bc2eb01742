"""The running counters of TensorFlow's allocators, and what they leave out.

`tf.config.experimental.get_memory_info` reads two numbers, `current` and `peak`, for a
device. They are exact and cost nothing, with these exceptions, all of them on the CPU:

* With oneDNN (the default on x86) allocations under 256 KiB go to a side allocator that
  is not counted: a model of small tensors has a peak of 0.
* Without oneDNN (`TF_ENABLE_ONEDNN_OPTS=0`, other processors) there are no counters.
* All logical CPU devices share one pool, which is read as "CPU:0".

On all devices a chunk may be larger than the tensor, at the worst twice as large: on
transformers of 60 to 420 MiB this came to 1-5 % of the peak.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from mem_util.required import require_tensorflow

__all__ = [
    "SMALL_CPU_ALLOCATIONS",
    "Counter",
    "Counters",
    "counted_apart",
    "read_counters",
    "require_eager",
    "wait_for_devices",
]

SMALL_CPU_ALLOCATIONS = "allocations under 256 KiB on the CPU"


@dataclass(frozen=True, slots=True)
class Counter:
    """Bytes in use now, and the most since the last reset, of one device."""

    current_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Counters:
    """Counters by short device name, and the reasons where there are none.

    Attributes:
        devices: by name such as "/gpu:0".
        missing: device to the reason why it has no counter.
        pooled: the logical CPU devices that "/cpu:0" stands for, if there are several.
    """

    devices: dict[str, Counter]
    missing: dict[str, str]
    pooled: tuple[str, ...] = ()


def read_counters(reset: bool = False) -> Counters:
    """Reads the counters of all devices.

    Args:
        reset: set each peak to what is in use now, after reading it.

    Returns:
        The counters as they were before the reset.
    """
    found = _read(reset)
    devices = {
        name: replace(now, peak_bytes=max(now.peak_bytes, _earlier.get(name, 0)))
        for name, now in found.devices.items()
    }
    if reset:
        _earlier.clear()
    return replace(found, devices=devices)


_earlier: dict[str, int] = {}
"""Peaks that `counted_apart` has reset, of which others may still ask."""

_Result = TypeVar("_Result")


def counted_apart(
    call: Callable[[], _Result], reset: bool = True
) -> tuple[_Result, Counters, Counters]:
    """Calls something and reads its peaks, though others may be measuring around it.

    Args:
        call: what to call.
        reset: set the peaks to what is in use, so that a call which stays under an
            earlier peak is seen. `read_counters` goes on to know the earlier ones.

    Returns:
        The result, the counters before the call and those after it.
    """
    if reset:
        for name, counter in _read(reset=True).devices.items():
            _earlier[name] = max(counter.peak_bytes, _earlier.get(name, 0))
    before = _read()
    result = call()
    wait_for_devices()
    return result, before, _read()


def _read(reset: bool = False) -> Counters:
    import tensorflow as tf

    names = _own_devices()
    cpus = tuple(f"/{name.lower()}" for name in names if name.startswith("CPU"))
    found, missing = {}, {}
    for name in names:
        short = f"/{name.lower()}"
        if short in cpus[1:]:
            missing[short] = "all logical CPU devices share one pool, see /cpu:0"
            continue
        try:
            info = tf.config.experimental.get_memory_info(name)
            if reset:
                tf.config.experimental.reset_memory_stats(name)
        except ValueError as error:
            missing[short] = f"its allocator keeps no statistics ({error})"
            continue
        found[short] = Counter(int(info["current"]), int(info["peak"]))
    return Counters(found, missing, cpus if len(cpus) > 1 else ())


def _own_devices() -> list[str]:
    """The devices of this process, such as "CPU:0".

    In a cluster (`MultiWorkerMirroredStrategy`) those of the other processes are listed
    as well, under the same name but for the task.
    """
    import tensorflow as tf

    with tf.init_scope():
        here = tf.DeviceSpec.from_string(tf.constant(0).device)
    found = []
    for device in tf.config.list_logical_devices():
        spec = tf.DeviceSpec.from_string(device.name)
        own = (spec.job, spec.task) in {(None, None), (here.job, here.task)}
        if own and spec.device_type in {"CPU", "GPU"}:
            found.append(f"{spec.device_type}:{spec.device_index}")
    return found


def require_eager(function: str) -> None:
    """Checks that something can be run and waited for here.

    Args:
        function: the public function that needs it, for the message.

    Raises:
        MissingTensorFlowError: there is no TensorFlow.
        RuntimeError: a graph is being built.
    """
    require_tensorflow(function)
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise RuntimeError(
            f"`mem_util.{function}` runs a function and waits for it, but was called "
            "while a graph is built, where nothing runs. Call it outside of any "
            "`tf.Graph` and `tf.function`. For a v1 session take `peak_memory` or "
            "`plot_memory_timeline`."
        )


def wait_for_devices() -> None:
    """Waits for kernels that are still under way on other devices.

    TensorFlow cannot in a process of a cluster. There the values of a step are what one
    can wait for.
    """
    import tensorflow as tf

    with contextlib.suppress(tf.errors.InternalError):
        tf.test.experimental.sync_devices()
