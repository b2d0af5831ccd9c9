# SPDX-License-Identifier: MIT OR Apache-2.0
"""Two doctors: the way between two hosts, tried as the ranks of a job try it.

The doctor that listens is rank 0 of a job of two ranks, the one that calls is rank 1: they meet,
prove themselves and connect as all ranks do, at the addresses and ports that ranks use. The secret
of the job follows from the code that the listener shows. Then the one that calls listens for a
moment, to see whether the way back is open, too.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import queue
import random
import secrets
import socket
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

import ferrodist
from ferrodist.backends.tcp import TcpBackend
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, DistributedError, ProtocolError, RendezvousError
from ferrodist.launch.doctor.network import try_connect
from ferrodist.launch.doctor.report import LogCollector
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.interfaces import choose_address
from ferrodist.rendezvous.job import Endpoint, try_endpoint
from ferrodist.rendezvous.mesh import open_exchange
from ferrodist.rendezvous.sockets import open_listener_at, resolve

_JOB, _JOB_BACK = "doctor", "doctor-back"
_LISTENER, _CALLER = 0, 1  # ranks
_FOREVER = 1e6  # seconds: a listener listens until it is closed
_JOIN_SECONDS = 5.0  # to meet a listener that is free
_QUEUE_SECONDS = 20.0  # to meet one that others come to as well
_CALL_SECONDS = 90.0  # for any call of the talk: the listener may still look at its own machine
_BACK_SECONDS = 6.0
_STOP_SECONDS = 5.0
_PAUSE = 0.1  # after a peer that did not get through
_MOST_REMEMBERED = 5

_NUM_PINGS = 41
_CHUNK_NBYTES, _MOST_CHUNKS = 1 << 18, 64  # 16 MiB in all
_MOST_SECONDS = 2.0  # of sending, however slow the link is
_MORE, _LAST = 0, 1


@dataclass(slots=True)
class Measured:
    """What two doctors have learned of the way between them; None where they did not get to it.

    ``calls_back`` is why the listener could not connect to the peer, empty if it could. Clocks:
    ``ahead`` is by how many seconds that of the other host is. ``own`` is the address at which this
    host is to be found, ``seen_as`` the one that the other host sees.
    """

    other: str
    other_version: str | None = None
    own: str | None = None
    seen_as: str | None = None
    calls_back: str | None = None
    back_port: int | None = None
    round_trip: float | None = None
    ahead: float | None = None
    bytes_per_second_to: float | None = None
    bytes_per_second_from: float | None = None
    problem: str | None = None


@dataclass(slots=True)
class ListenResult:
    """Who has come: the peers, those that did not get through, and why others were refused."""

    peers: list[Measured] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def _job(code: str, rank: int, endpoint: Endpoint, name: str = _JOB) -> Job:
    key = code.replace("-", "").strip().lower()
    secret = hashlib.sha256(f"ferrodist {name} {key}".encode()).digest()
    return Job(name, rank, 2, secret, hosts="two doctors", endpoint=endpoint)


def free_port(host: str, ports: tuple[int, int]) -> int:
    """Return the first port of a range that is free at an address; 0 is any. Raises OSError."""
    for port in range(ports[0], ports[1] + 1):
        try:
            with open_listener_at(resolve(Endpoint(host, port))[0]) as probe:
                return int(probe.getsockname()[1])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    shown = (
        f"port {ports[0]}" if ports[0] == ports[1] else f"any port from {ports[0]} to {ports[1]}"
    )
    raise OSError(errno.EADDRINUSE, f"{os.strerror(errno.EADDRINUSE)}: {shown}")


# -- the doctor that listens ----------------------------------------------------------------------


class Listener:
    """Rank 0, for one peer after the other: a thread meets them, ``wait`` talks to them.

    So who has come waits for its turn, and the next can come meanwhile. A stranger, who does not
    know the code, is turned away by the rendezvous, beside which others are served.
    """

    def __init__(self, host: str, port: int, config: Config) -> None:
        letters = base64.b32encode(secrets.token_bytes(10)).decode().lower()
        self.code = "-".join(letters[start : start + 4] for start in range(0, len(letters), 4))
        self.endpoint = Endpoint(host, free_port(host, (port, port)))
        free_port(host, config.ports)  # its rank needs one of these, too
        self._config = replace(config, timeout=_CALL_SECONDS, join_timeout=_FOREVER)
        self._arrivals: queue.SimpleQueue[TcpBackend | DistributedError] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._meet_peers, daemon=True)
        self._logs = LogCollector(self._thread)

    def __enter__(self) -> Self:
        self._logs.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closing = True
        deadline = Deadline(_STOP_SECONDS)
        while self._thread.is_alive() and deadline.remaining() > 0:
            # The thread waits in a meeting: come as the peer, and give up.
            job = _job(self.code, _CALLER, self.endpoint)
            with suppress(DistributedError, OSError):
                with open_exchange(job, self._config, Deadline(1.0)):
                    raise RendezvousError("this doctor has finished")
            self._thread.join(0.05)
        self._logs.__exit__()
        while not self._arrivals.empty():
            arrival = self._arrivals.get()
            if isinstance(arrival, TcpBackend):
                arrival.close()

    def _meet_peers(self) -> None:
        while not self._is_closing:
            try:
                job = _job(self.code, _LISTENER, self.endpoint)
                self._arrivals.put(TcpBackend.join(job, config=self._config))
            except DistributedError as error:
                if not self._is_closing:
                    self._arrivals.put(error)
                if _cannot_listen(error):
                    return
                time.sleep(_PAUSE)  # whatever is wrong may stay

    def wait(self, seconds: float, num_peers: int = 1) -> ListenResult:
        """Wait for so many peers, and talk to each; also to those who have come meanwhile."""
        deadline, result = Deadline(seconds), ListenResult()
        while len(result.peers) < num_peers or not self._arrivals.empty():
            try:
                arrival = self._arrivals.get(timeout=max(0.0, deadline.remaining()))
            except queue.Empty:
                break
            if isinstance(arrival, TcpBackend):
                result.peers.append(self._talk_to(arrival))
            elif isinstance(arrival, ProtocolError) and arrival.got:
                result.peers.append(Measured("a peer", other_version=str(arrival.got)))
            elif _cannot_listen(arrival):
                raise arrival
            else:
                result.failures = [*result.failures[1 - _MOST_REMEMBERED :], str(arrival)]
        result.refusals = list(dict.fromkeys(self._logs.warnings))[-_MOST_REMEMBERED:]
        return result

    def _talk_to(self, backend: TcpBackend) -> Measured:
        seen = _address_of(backend, _CALLER)
        measured = Measured(seen)
        try:
            told = _exchange_facts(backend, {"sees": seen})
            measured.other_version = told["version"]
            measured.calls_back = self._try_way_back(backend, measured)
            question = np.zeros(1, np.int64)  # the other half of _ping
            for _ in range(_NUM_PINGS):
                ferrodist.recv(_CALLER, backend, out=question)
                ferrodist.send(np.array([time.time_ns()]), _CALLER, backend)
            found = ferrodist.recv(_CALLER, backend, like=np.zeros(2))
            measured.round_trip = float(found[0])
            measured.ahead = -float(found[1])  # the peer has said it of our clock
            measured.bytes_per_second_from = _receive_much(backend, _CALLER)
            measured.bytes_per_second_to = _send_much(backend, _CALLER)
            backend.close()
        except DistributedError as error:
            measured.problem = _brief(error)
        return measured

    def _try_way_back(self, backend: TcpBackend, measured: Measured) -> str:
        """Connect to where the peer says it listens; tell both sides whether that works."""
        told = ferrodist.broadcast_object(None, backend, root=_CALLER)
        endpoint = try_endpoint(str(told)) or Endpoint(measured.other, 0)
        measured.back_port = endpoint.port
        why = _why_closed(endpoint) or self._meet_at(endpoint)
        ferrodist.broadcast_object(why, backend, root=_LISTENER)
        return why

    def _meet_at(self, endpoint: Endpoint) -> str:
        job = _job(self.code, _CALLER, endpoint, _JOB_BACK)  # the roles are swapped
        try:
            with open_exchange(job, self._config, Deadline(_BACK_SECONDS)) as exchange:
                exchange.gather(b"")
        except DistributedError:
            return "failed"
        return ""


def _cannot_listen(error: DistributedError) -> bool:
    return error.rank == error.this_rank == _LISTENER


def _why_closed(endpoint: Endpoint) -> str:
    error = try_connect(endpoint.host, endpoint.port)
    if error is None:
        return ""
    words = {
        errno.ETIMEDOUT: "no answer",
        errno.ECONNREFUSED: "refused",
        errno.ENETUNREACH: "no route",
        errno.EHOSTUNREACH: "no route",
    }
    return words.get(error.errno or 0, "failed")


# -- the doctor that calls ------------------------------------------------------------------------


def call(peer: Endpoint, code: str, config: Config) -> Measured:
    """Meet the listener, be called back, and measure.

    Raises:
        RendezvousError: if there is no way to the listener; ``errno`` says why if it is known, and
            ``address`` where its ranks cannot be reached though it can itself.
        AuthenticationError: if one of the two does not know the code.
    """
    config = replace(config, timeout=_CALL_SECONDS, join_timeout=_JOIN_SECONDS)
    try:
        backend = _join(peer, code, config)
    except ProtocolError as error:
        if not error.got:
            raise
        return Measured(str(peer), other_version=str(error.got))
    measured = Measured(str(peer))
    try:
        told = _exchange_facts(backend, {})
        measured.other_version, measured.seen_as = told["version"], told.get("sees")
        measured.own = _own_address(backend, config)
        measured.calls_back = _be_called_back(backend, measured, code, config)
        measured.round_trip, measured.ahead = _ping(backend)
        ferrodist.send(np.array([measured.round_trip, measured.ahead]), _LISTENER, backend)
        measured.bytes_per_second_to = _send_much(backend, _LISTENER)
        measured.bytes_per_second_from = _receive_much(backend, _LISTENER)
        backend.close()
    except DistributedError as error:
        measured.problem = _brief(error)
    return measured


def _join(peer: Endpoint, code: str, config: Config) -> TcpBackend:
    """Become rank 1 of the listener's job; again while another peer has that place."""
    deadline = Deadline(_QUEUE_SECONDS)
    while True:
        try:
            return TcpBackend.join(_job(code, _CALLER, peer), config=config)
        except AuthenticationError as error:
            raise AuthenticationError(
                "the code is not the one that the listener shows, or somebody else listens there"
            ) from error
        except RendezvousError as error:
            # The listener was there, but for another peer: its place is free soon.
            is_busy = error.rank is not None and error.missing is None
            if not is_busy or hasattr(error, "address") or deadline.remaining() <= 0:
                # The rendezvous only knows that nobody came; the system may know why.
                refusal = try_connect(*peer) if error.missing == [_LISTENER] else None
                if refusal is None:
                    raise
                text = refusal.strerror or str(refusal)
                raise RendezvousError(text, errno=refusal.errno) from error
            time.sleep(random.uniform(0.1, 0.3))  # not all at the same moment


def _own_address(backend: TcpBackend, config: Config) -> str:
    advertised = try_endpoint(config.advertise)
    if advertised is not None:
        return advertised.host
    return choose_address(config.socket_ifname, _address_of(backend, _LISTENER))[1]


def _be_called_back(
    backend: TcpBackend, measured: Measured, code: str, config: Config
) -> str | None:
    """Listen where a rank would, and hear from the listener whether it got through."""
    address = choose_address(config.socket_ifname, _address_of(backend, _LISTENER))[1]
    try:
        endpoint = Endpoint(address, free_port(address, config.ports))
    except OSError as error:
        raise RendezvousError(f"no port to listen at here: {error.strerror}") from error
    shown = try_endpoint(config.advertise) or endpoint
    measured.back_port = shown.port
    job = _job(code, _LISTENER, endpoint, _JOB_BACK)  # the roles are swapped
    with suppress(RendezvousError), LogCollector():  # the listener says why
        with open_exchange(job, config, Deadline(_BACK_SECONDS)) as exchange:
            ferrodist.broadcast_object(str(shown), backend, root=_CALLER)
            exchange.gather(b"")
    return str(ferrodist.broadcast_object(None, backend, root=_LISTENER))


# -- both -----------------------------------------------------------------------------------------


def _exchange_facts(backend: TcpBackend, facts: dict[str, Any]) -> dict[str, Any]:
    own = {"version": ferrodist.__version__, **facts}
    told: list[dict[str, Any]] = ferrodist.all_gather_object(own, backend)
    return told[1 - backend.rank]


def _address_of(backend: TcpBackend, rank: int) -> str:
    """Return the address that the other side has on its connection; with TLS, what it says."""
    mesh_peer = backend.mesh_peers[rank]
    with socket.socket(fileno=os.dup(mesh_peer.socket)) as connection:
        if connection.family != socket.AF_UNIX:
            return str(connection.getpeername()[0])
    told = try_endpoint(mesh_peer.address)
    return mesh_peer.address if told is None else told.host


def _ping(backend: TcpBackend) -> tuple[float, float]:
    trips, there = [], np.zeros(1, np.int64)
    for _ in range(_NUM_PINGS):
        sent, begin = time.time_ns(), time.perf_counter_ns()
        ferrodist.send(np.zeros(1, np.int64), _LISTENER, backend)
        ferrodist.recv(_LISTENER, backend, out=there)
        trip = time.perf_counter_ns() - begin
        trips.append((trip, int(there[0]) - (sent + trip // 2)))
    # The offset is best known from the trip that was held up least.
    return statistics.median(trip for trip, _ in trips) / 1e9, min(trips)[1] / 1e9


def _send_much(backend: TcpBackend, to: int) -> float:
    """Send chunks until it is enough, or has taken long; return the speed the other side saw."""
    chunk = np.zeros(_CHUNK_NBYTES, np.uint8)
    end = time.monotonic() + _MOST_SECONDS
    for number in range(1, _MOST_CHUNKS + 1):
        # Two at least: the first is what the clock is started by.
        is_last = number == _MOST_CHUNKS or (number > 1 and time.monotonic() > end)
        chunk[0] = _LAST if is_last else _MORE
        ferrodist.send(chunk, to, backend)
        if is_last:
            break
    return float(ferrodist.recv(to, backend, like=0.0))


def _receive_much(backend: TcpBackend, source: int) -> float:
    chunk = np.zeros(_CHUNK_NBYTES, np.uint8)
    ferrodist.recv(source, backend, out=chunk)
    begin, num_chunks = time.perf_counter(), 0
    while num_chunks < _MOST_CHUNKS and chunk[0] != _LAST:
        ferrodist.recv(source, backend, out=chunk)
        num_chunks += 1
    speed = num_chunks * _CHUNK_NBYTES / max(time.perf_counter() - begin, 1e-9)
    ferrodist.send(speed, source, backend)
    return speed


def _brief(error: DistributedError) -> str:
    return str(error).partition("\n")[0]
