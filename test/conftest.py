"""Settings of the whole suite."""

from __future__ import annotations

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
