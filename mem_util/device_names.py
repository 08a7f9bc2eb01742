"""Short names of devices, and which device a person means by what was typed."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["meant_device", "short_device_name"]

_DEVICE = re.compile(
    r"^(?:/job:(?P<job>[^/]+))?(?:/replica:\d+)?(?:/task:(?P<task>\d+))?"
    r"/(?:device:)?(?P<kind>\w+):(?P<index>\d+)(?:/(?P<rest>.+))?$"
)
_KIND = re.compile(r"^(?:/?device:|/)?(?P<kind>[a-z]\w*)$", re.IGNORECASE)


def short_device_name(name: str) -> tuple[str, str]:
    """Splits a device name of TensorFlow into a short one and what follows it.

    Args:
        name: such as "/job:localhost/replica:0/task:0/device:GPU:0/stream:all".

    Returns:
        Such as ("/gpu:0", "stream:all"); the name itself and "" if it has another form.
    """
    found = _DEVICE.match(name)
    if found is None:
        return name, ""
    job, task = found["job"], int(found["task"] or 0)
    # One process is the rule, and scripts read "/cpu:0"; others keep their own names.
    place = "" if job in {None, "localhost", "worker"} else f"/job:{job}"
    place += f"/task:{task}" if task else ""
    return f"{place}/{found['kind'].lower()}:{found['index']}", found["rest"] or ""


def meant_device(name: str, known: Iterable[str]) -> str:
    """The short name of the device that is meant, where there can be no doubt.

    Args:
        name: such as "/gpu:0", "GPU:0", "/device:GPU:0", TensorFlow's full name, or
            "gpu" where there is one device of that kind.
        known: the short names of the devices that there are.

    Returns:
        One of `known`; where none is meant, or several may be, the name as it came.
    """
    text = str(name).strip()
    devices = list(known)
    for form in (text, f"/{text.removeprefix('/')}"):
        short, rest = short_device_name(form)
        found = [d for d in devices if d.lower() == short.lower() and not rest]
        if found:
            return found[0]
    if match := _KIND.match(text):
        kind = f"/{match['kind'].lower()}:"
        found = [device for device in devices if kind in device]
        if len(found) == 1:
            return found[0]
    return name
