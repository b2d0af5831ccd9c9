# SPDX-License-Identifier: MIT OR Apache-2.0
"""What two doctors have learned of the way between them, as findings on either side."""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.config import variable
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.peer_listen import Visit
from ferrodist.launch.checks.peer_measure import Measured
from ferrodist.launch.demo_report import readable_nbytes
from ferrodist.rendezvous.launch import Endpoint
from ferrodist.version import __version__

about = Subject("between hosts")

_SLOW = 30e6  # bytes per second: less than half of what a network of 1 Gbit/s carries
_FAR = 2e-3  # seconds of a round trip: more than any network of one building
_APART = 0.5  # seconds between two clocks


def peer_findings(measured: Measured) -> Iterator[Finding]:
    """Say on the side that called what was found."""
    other = measured.other
    if measured.calls_back == "":
        yield about.ok(f"both ways are open: to {other}, and from there to {measured.own}")
    elif measured.calls_back is not None:
        yield _blocked(
            f"{other} can be reached from here, but cannot connect back to "
            f"{Endpoint(measured.own or '', measured.back_port or 0)}: {measured.calls_back}",
            "here",
        )
    if measured.seen_as and measured.own and measured.seen_as != measured.own:
        yield about.warning(
            f"this host is {measured.own} here and {measured.seen_as} there: addresses are "
            "translated on the way",
            "other ranks cannot connect to the address that this one knows: set "
            f"{variable('advertise')} to what they can reach",
        )
    yield from _numbers(measured)


def listener_findings(visit: Visit, port: int, waited: float) -> Iterator[Finding]:
    """Say on the side that was called what was found."""
    if visit.num_strangers:
        yield about.note(
            f"{_callers(visit.num_strangers)} sent away, without the right code: "
            f"{', '.join(visit.strangers)}",
            "a mistyped --code, or a stranger: the port is open to others, too",
        )
    measured = visit.measured
    if measured is None:
        yield about.error(
            f"nobody has come to port {port} within {waited:g} s",
            "start the other doctor meanwhile; if it says 'no answer' or 'no route', a firewall "
            f"or a wrong address keeps it from this host: open port {port} here",
        )
        return
    other = measured.other
    if measured.calls_back == "":
        yield about.ok(f"both ways are open: {other} to here, and from here to {other}")
    elif measured.calls_back is not None:
        yield _blocked(
            f"{other} reaches this host, but cannot be connected to at "
            f"{Endpoint(other, measured.back_port or 0)}: {measured.calls_back}",
            f"on {other}",
        )
    yield from _numbers(measured)


def _callers(number: int) -> str:
    return "1 caller was" if number == 1 else f"{number} callers were"


def _blocked(what: str, where: str) -> Finding:
    return about.error(
        what,
        f"a firewall {where} closes the way in: give ranks a range of ports with "
        f"{variable('ports')}=29600-29699 and open it {where}",
    )


def _numbers(measured: Measured) -> Iterator[Finding]:
    """Say what does not depend on the side."""
    if measured.other_version is not None and measured.other_version != __version__:
        yield about.error(
            f"ferrodist {measured.other_version} is there, {__version__} is here",
            "all ranks of a job need the same version: install it on both",
        )
    if measured.round_trip is not None:
        yield _latency(measured.round_trip)
    yield from _speed(measured)
    if measured.ahead is not None:
        yield from _clock(measured.ahead)
    if measured.problem is not None:
        yield _problem(measured)


def _latency(seconds: float) -> Finding:
    what = f"a round trip takes {seconds * 1e3:.3f} ms"
    if seconds > _FAR:
        return about.note(what, "far for ranks that meet in every step: fewer, larger calls help")
    return about.ok(what)


def _speed(measured: Measured) -> Iterator[Finding]:
    to, back = measured.bytes_per_second_to, measured.bytes_per_second_from
    if to is None or back is None:
        return
    what = f"{readable_nbytes(to)} per second to there, {readable_nbytes(back)} from there"
    if min(to, back) < _SLOW:
        yield about.note(
            what,
            f"slow: is this the interface that you mean? {variable('socket_ifname')} chooses "
            "another",
        )
    else:
        yield about.ok(what)


def _clock(ahead: float) -> Iterator[Finding]:
    if abs(ahead) > _APART:
        yield about.note(
            f"the clock there is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}",
            "ferrodist does not mind, but logs of both hosts are hard to compare: use NTP",
        )
    else:
        yield about.ok(f"the clocks of both hosts are {abs(ahead) * 1e3:.1f} ms apart")


def _problem(measured: Measured) -> Finding:
    has_data = None not in (measured.bytes_per_second_from, measured.bytes_per_second_to)
    if measured.round_trip is not None and not has_data:
        return about.error(
            f"small messages pass, large ones do not: {measured.problem}",
            "typical of a wrong MTU on the way (tunnels, overlays, jumbo frames): compare 'ip "
            "link' on both hosts, and lower the larger",
        )
    return about.error(
        f"the talk with {measured.other} broke off: {measured.problem}",
        "try again; if it stays, something between the hosts ends connections",
    )
