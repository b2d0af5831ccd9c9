# SPDX-License-Identifier: MIT OR Apache-2.0
"""Clocks: whether they can be trusted, and what it costs to look at them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation

about = Subject("clock")

_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"
_READ_BY_CALLS = {"hpet", "acpi_pm", "jiffies", "pit", "refined-jiffies", "xen"}
_SYNCHRONISED = ("run/systemd/timesync/synchronized", "run/chrony/chronyd.pid", "run/chronyd.pid")
_SLOW_NS = 1000.0
_NUM_LOOKS, _NUM_TRIES = 200, 10
_APART = 0.05  # seconds by which two clocks may move apart while this check runs
_LONG_AGO = 1_735_689_600  # 2025: no machine that runs this has an earlier date

Clock = Callable[[], float]


def check(
    situation: Situation, real: Clock = time.time, steady: Clock = time.monotonic
) -> Iterator[Finding]:
    """Look at the date, at the pace of both clocks, and at what a look costs."""
    before = _difference(real, steady)
    yield _source(situation, _cost_ns(steady))
    yield _date(situation, real())
    apart = _difference(real, steady) - before
    if abs(apart) > _APART:
        yield about.warning(
            f"the clock was set by {apart:+.3f} s while it was looked at",
            "times in logs jump; see to NTP: timedatectl, chronyc tracking. Deadlines are not "
            "concerned: they use a clock that nobody sets",
        )


def _difference(real: Clock, steady: Clock) -> float:
    """Return by how much two clocks differ, by the pair of looks that was held up least."""
    looks = [(steady(), real(), steady()) for _ in range(_NUM_TRIES)]
    begin, middle, _ = min(looks, key=lambda look: look[2] - look[0])
    return middle - begin


def _cost_ns(clock: Clock) -> float:
    """Return what a look costs when nobody else has the core."""
    return min(_time_looks(clock) for _ in range(_NUM_TRIES)) / _NUM_LOOKS


def _time_looks(clock: Clock) -> int:
    begin = time.perf_counter_ns()
    for _ in range(_NUM_LOOKS):
        clock()
    return time.perf_counter_ns() - begin


def _source(situation: Situation, cost: float) -> Finding:
    name = situation.try_read(_SOURCE) or "unknown"
    what = f"clock source {name}, {cost:.0f} ns per look"
    if name in _READ_BY_CALLS or cost > _SLOW_NS:
        return about.note(
            what,
            "slow: every timing costs a system call, which small collectives feel; 'tsc', or the "
            f"virtual machine's own clock, is faster (see available_clocksource beside /{_SOURCE})",
        )
    return about.ok(what)


def _date(situation: Situation, now: float) -> Finding:
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
    if now < _LONG_AGO:
        return about.warning(
            f"the date is {date} UTC", "certificates of TLS will not be valid: set the clock"
        )
    is_known = any((situation.root / name).exists() for name in _SYNCHRONISED)
    state = "kept by NTP" if is_known else "whether NTP keeps it cannot be seen"
    return about.ok(f"{date} UTC; {state}; ferrodist needs it for logs only")
