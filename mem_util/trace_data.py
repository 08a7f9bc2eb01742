"""`Trace`: what one traced step comes to, wherever it was read from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

from mem_util.device_names import meant_device
from mem_util.errors import MissingDeviceError, NoMemoryDataError, shortened
from mem_util.records import Record, Span, Timeline, build_timeline, format_bytes

__all__ = ["PeakBytes", "Trace", "assemble"]

_logger = logging.getLogger(__name__)


class PeakBytes(dict[str, int]):
    """Peak bytes by short device name; a device without data says why when asked.

    Other names of a device serve as well, where they leave no doubt: "cpu", "GPU:0",
    "/device:GPU:0".

    Attributes:
        missing: device to the reason why it has no peak.
    """

    def __init__(self, peaks: Mapping[str, int], missing: Mapping[str, str]) -> None:
        super().__init__(peaks)
        self.missing = dict(missing)

    def __missing__(self, device: str) -> int:
        device = self.device(device)
        if device in self:
            return self[device]
        reason = self.missing.get(device, "it is not among the devices of this step")
        raise MissingDeviceError(
            f"`mem_util`: no data for device {device}, because {reason}. "
            f"There is data for: {shortened(sorted(self)) or 'none'}."
        )

    def device(self, name: str) -> str:
        """The short name of the device that is meant; the name itself if none is."""
        return meant_device(name, [*self, *self.missing])


@dataclass(frozen=True)
class Trace:
    """One traced step: live bytes by device, and when each op ran.

    Attributes:
        source: where the figures come from, in words.
        timelines: by short device name ("/cpu:0"), the devices with allocations.
        spans: runs of ops, by start.
        missing: device to the reason why it has no timeline.
        notes: what was left out or is not counted, in sentences.
    """

    source: str
    timelines: Mapping[str, Timeline]
    spans: tuple[Span, ...]
    missing: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Where it is from, with the peaks: at a prompt nobody wants all records."""
        peaks = [
            f"{name} peak {format_bytes(line.peak_bytes)}"
            for name, line in self.timelines.items()
        ]
        parts = [*peaks, f"{len(self.spans)} runs of ops", f"from {self.source}"]
        return f"<Trace: {', '.join(parts)}>"

    @property
    def peak_bytes(self) -> PeakBytes:
        """Most bytes alive at once on each device, rest included."""
        peaks = {name: line.peak_bytes for name, line in self.timelines.items()}
        return PeakBytes(peaks, self.missing)

    @property
    def resting_bytes(self) -> dict[str, int]:
        """Bytes alive before the step, where the source knows them (0 otherwise)."""
        return {name: line.rest_bytes for name, line in self.timelines.items()}

    @property
    def above_rest_bytes(self) -> dict[str, int]:
        """What the step itself needed on each device: peak minus rest, in bytes."""
        return {
            name: line.peak_bytes - line.rest_bytes
            for name, line in self.timelines.items()
        }

    @property
    def requested_bytes(self) -> dict[str, int]:
        """`above_rest_bytes` if the allocator had handed out no more than was asked
        for. It varies less, most of all where XLA asks for one large block."""
        return {name: line.requested_bytes for name, line in self.timelines.items()}

    @property
    def origin_ns(self) -> int:
        """The first moment of the trace, which pictures count from."""
        starts = [line.times_ns[0] for line in self.timelines.values()]
        return min([*starts, *(span.start_ns for span in self.spans)], default=0)

    def timeline(self, device: str) -> Timeline:
        """The timeline of a device.

        Args:
            device: its short name, such as "/cpu:0", or another that leaves no doubt:
                "cpu", "CPU:0", "/device:CPU:0", TensorFlow's full name.

        Raises:
            MissingDeviceError: it has none; the message says why.
        """
        peaks = self.peak_bytes
        _ = peaks[device]
        return self.timelines[peaks.device(device)]

    def save_png(self, path: str | PathLike[str]) -> None:
        """Draws live bytes, the largest tensors at the peak, and op spans.

        Args:
            path: of the picture.

        Raises:
            TypeError, ValueError, FileNotFoundError: no picture can be written there.
            NoMemoryDataError: there are neither timelines nor spans.
        """
        from mem_util.plot_trace import draw_trace

        draw_trace(path, self)

    def save_json(self, path: str | PathLike[str]) -> None:
        """Writes a Chrome trace, for Perfetto or chrome://tracing.

        Args:
            path: of the JSON file.

        Raises:
            TypeError, ValueError, FileNotFoundError: no file can be written there.
            NoMemoryDataError: there are neither timelines nor spans.
        """
        from mem_util.chrome_trace import write_chrome_trace

        write_chrome_trace(path, self)


def assemble(
    source: str,
    records: Mapping[str, Sequence[Record]],
    spans: Sequence[Span],
    reasons: Mapping[str, str],
    notes: Mapping[str, Sequence[str]],
    rests: Mapping[str, int] | None = None,
    remarks: Sequence[str] = (),
) -> Trace:
    """Builds a `Trace` out of what a reader found.

    Args:
        source: where the figures come from, in words.
        records: by device.
        spans: in any order.
        reasons: by device, why it would have no allocations, should it have none.
        notes: by device ("" for general ones), sentences.
        rests: by device, bytes alive before the first record, where that is known.
        remarks: notes that are no fault of the figures of memory: they are in the
            trace, and not logged to everyone who asks for a peak.

    Returns:
        The trace.
    """
    timelines, missing = {}, {}
    said = [text for texts in notes.values() for text in texts]
    for device in sorted({*records, *reasons}):
        try:
            line = build_timeline(
                device, records.get(device, ()), (rests or {}).get(device)
            )
        except NoMemoryDataError:
            missing[device] = reasons.get(device, "it has no allocations")
            continue
        timelines[device] = line
        said += line.notes
    for text in said:
        _logger.warning("%s", text)
    ordered = tuple(
        sorted(spans, key=lambda s: (s.start_ns, -s.end_ns, s.device, s.op))
    )
    return Trace(source, timelines, ordered, missing, (*said, *remarks))
