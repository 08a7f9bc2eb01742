"""Step stats and XSpaces made by hand, in the shapes that TensorFlow gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from mem_util.tf_internals import new_xspace

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
ORIGIN_US = 1_700_000_000_000_000


def add_node(
    metadata: Any,
    device: str,
    name: str,
    start_us: int,
    length_us: int = 1,
    records: Iterable[tuple[int, int]] = (),
    allocator: str = "mklcpu",
    kind: str = "Tanh",
) -> Any:
    """Adds a run of an op, with allocation records (microsecond, bytes)."""
    stats = metadata.step_stats.dev_stats
    entry = next((e for e in stats if e.device == device), None) or stats.add(
        device=device
    )
    node = entry.node_stats.add(
        node_name=name,
        all_start_micros=start_us,
        op_end_rel_micros=length_us,
        all_end_rel_micros=length_us,
        timeline_label=f"{name} = {kind}(x)" if kind else "",
    )
    pairs = list(records)
    if pairs:
        memory = node.memory.add(allocator_name=allocator)
        for micros, size in pairs:
            memory.allocation_records.add(alloc_micros=micros, alloc_bytes=size)
    return node


def chain_metadata(ops: int = 4, size: int = 1000, device: str = CPU) -> Any:
    """Ops one after the other; all outputs live until the end, then go in reverse."""
    metadata = tf.compat.v1.RunMetadata()
    end = ORIGIN_US + 10 * ops
    for index in range(ops):
        start = ORIGIN_US + 10 * index
        free = end + 10 * (ops - index)
        records = [(start, size), (free, -size)]
        add_node(metadata, device, f"op_{index}", start, 9, records)
    return metadata


def gpu_metadata(streams: bool = True) -> Any:
    """A step on a GPU as CUPTI records it, or as it looks where CUPTI is missing."""
    metadata = tf.compat.v1.RunMetadata()
    t = ORIGIN_US
    add_node(metadata, CPU, "feed", t, 5, [(t, 100), (t + 90, -100)], "cpu", "_Arg")
    for index in range(3):
        at = t + 10 + 10 * index
        records = [(at, 5000), (t + 80 - index, -5000)]
        add_node(metadata, GPU, f"conv_{index}", at, 2, records, "GPU_0_bfc", "Conv2D")
    shape = [(t + 45, 64), (t + 50, -64)]
    add_node(metadata, GPU, "shape", t + 45, 2, shape, "gpu_host_bfc", "Shape")
    if streams:
        for index in range(3):
            at, name = t + 20 + 10 * index, f"conv_{index}:Conv2D"
            for stream in ("stream:14", "stream:all"):
                add_node(metadata, f"/device:GPU:0/{stream}", name, at, 8, kind="")
        copy, name = "/device:GPU:0/memcpy", "edge_1_feed:MEMCPYHtoD"
        add_node(metadata, copy, name, t + 12, 4, kind="")
    return metadata


class XSpaceBuilder:
    """Writes an `XSpace` with one host plane, event by event."""

    def __init__(self) -> None:
        self.space = new_xspace()
        self._host = self.space.planes.add(name="/host:CPU")
        self._line = self._host.lines.add(id=1, name="thread", timestamp_ns=0)

    def memory(
        self,
        time_ns: int,
        size: int,
        address: int,
        in_use: int,
        op: str = "",
        allocator: str = "mklcpu",
        slack: int = 0,
    ) -> None:
        """Adds an allocation (size > 0) or a free (size < 0) of a chunk."""
        name = "MemoryAllocation" if size > 0 else "MemoryDeallocation"
        event = self._event(self._host, self._line, name, time_ns, 0)
        for key, value in {
            "allocation_bytes": abs(size),
            "requested_bytes": abs(size) - slack,
            "addr": address,
            "bytes_allocated": in_use,
        }.items():
            event.stats.add(metadata_id=self._stat(self._host, key), int64_value=value)
        for key, text in {"allocator_name": allocator, "tf_op": op}.items():
            if text:
                at = self._stat(self._host, text)
                event.stats.add(metadata_id=self._stat(self._host, key), ref_value=at)

    def op(self, name: str, start_ns: int, end_ns: int) -> None:
        """Adds a run of an op on the host, such as "x:Tanh"."""
        self._event(self._host, self._line, name, start_ns, end_ns)

    def kernel(self, name: str, start_ns: int, end_ns: int) -> None:
        """Adds a kernel on stream 14 of a GPU, as CUPTI records it."""
        planes = self.space.planes
        plane = next((p for p in planes if "GPU" in p.name), None)
        if plane is None:
            plane = planes.add(name="/device:GPU:0 (made up)")
            plane.lines.add(id=14, name="Stream #14(Compute)")
            plane.lines.add(id=90, name="TensorFlow Ops")
        for line in plane.lines:
            self._event(plane, line, name, start_ns, end_ns)

    def _event(self, plane: Any, line: Any, name: str, start: int, end: int) -> Any:
        key = self._key(plane.event_metadata, name)
        length = 1000 * max(0, end - start)
        return line.events.add(
            metadata_id=key, offset_ps=1000 * start, duration_ps=length
        )

    def _stat(self, plane: Any, name: str) -> int:
        return self._key(plane.stat_metadata, name)

    @staticmethod
    def _key(table: Any, name: str) -> int:
        for key, entry in table.items():
            if entry.name == name:
                return key
        key = len(table) + 1
        table[key].id = key
        table[key].name = name
        return key


def counter_values(events: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Counter name to the values of a Chrome trace's counter track."""
    found: dict[str, list[int]] = {}
    for event in events:
        if event["ph"] == "C":
            found.setdefault(event["name"], []).append(event["args"]["bytes"])
    return found
