"""Every rank gets a connection to every other, and nobody else gets one."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferrodist import (
    AuthenticationError,
    InvalidArgument,
    ProtocolError,
    RendezvousError,
)
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job, handshake, meeting, mesh, mesh_builder
from ferrodist.rendezvous.job import Endpoint
from ferrodist.rendezvous.mesh import MeshPeer, PeerAddress, join_mesh
from ferrodist.rendezvous.sockets import connect_to_any, resolve
from ferrodist.rendezvous.watch import StatusBoard
from ferrodist.rendezvous.wire import Channel, MessageKind, run_steps

pytestmark = pytest.mark.timeout(60)


def close_peers(peers: list[MeshPeer]) -> None:
    """Close the files of all ranks."""
    for peer in peers:
        for file in (peer.socket, peer.watch):
            if file >= 0:
                os.close(file)


def new_jobs(world_size: int, **facts: Any) -> list[Job]:
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)
    return [Job(name, rank, world_size, secret, **facts) for rank in range(world_size)]


class Rank(threading.Thread):
    """One rank in a thread: joins the mesh and keeps its neighbours, or the error."""

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(daemon=True)
        self.job, self.config = job, Config(**{"join_timeout": 20.0} | settings)
        self.neighbours: list[MeshPeer] = []
        self.error: Exception | None = None
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        start = time.monotonic()
        try:
            self.neighbours = join_mesh(self.job, self.config)
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            self.error = error
        self.seconds = time.monotonic() - start

    def end(self) -> Rank:
        self.join(40)
        assert not self.is_alive()
        return self


def join_all(jobs: list[Job], **settings: Any) -> list[Rank]:
    ranks = [Rank(job, **settings) for job in jobs]
    return [rank.end() for rank in ranks]


def check_mesh(ranks: list[Rank]) -> None:
    """Check that every rank is linked to every other, with one key per link, and close all."""
    for rank in ranks:
        assert rank.error is None, rank.error
        assert [one.rank for one in rank.neighbours] == list(range(len(ranks)))
    for rank in ranks:
        for other in rank.neighbours:
            if other.rank == rank.job.rank:
                assert (other.socket, other.key, other.watch) == (-1, b"", -1)
                continue
            back = ranks[other.rank].neighbours[rank.job.rank]
            assert other.key == back.key
            assert len(other.key) == 32
            assert not os.get_blocking(other.socket)
            assert not os.get_inheritable(other.socket)
            os.write(other.socket, f"{rank.job.rank} to {other.rank}".encode())
    for rank in ranks:
        for other in rank.neighbours:
            if other.rank != rank.job.rank:
                os.set_blocking(other.socket, True)
                assert os.read(other.socket, 99) == f"{other.rank} to {rank.job.rank}".encode()
    for rank in ranks:
        close_peers(rank.neighbours)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    def files() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests have left
    before = files()
    yield
    assert files() == before


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 24])
def test_every_rank_is_linked_to_every_other(world_size):
    check_mesh(join_all(new_jobs(world_size)))


def test_a_world_of_one_has_no_sockets(monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    (own,) = join_mesh(new_jobs(1)[0], Config())
    assert (own.rank, own.pid, own.host_name) == (0, os.getpid(), socket.gethostname())
    assert (own.socket, own.key, own.watch, own.address) == (-1, b"", -1, "")


def on_several_hosts(world_size: int, address: str = "127.0.0.1") -> list[Job]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        endpoint = Endpoint(address, probe.getsockname()[1])
    return new_jobs(world_size, hosts="a test", endpoint=endpoint)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_on_several_hosts_are_linked_by_the_address_they_have_met_at(address):
    ranks = join_all(on_several_hosts(4, address))
    for rank in ranks:
        for other in rank.neighbours:
            assert other.address.rpartition(":")[0].strip("[]") == address
    check_mesh(ranks)


def test_what_a_rank_learns_of_the_others_is_right():
    ranks = join_all(new_jobs(3))
    for rank in ranks:
        for other in rank.neighbours:
            assert other.pid == os.getpid()
            assert other.host == mesh.host_id()
            assert other.host_name == socket.gethostname()
            host, _, port = other.address.partition(":")
            assert host == "127.0.0.1"
            assert int(port) > 0
    check_mesh(ranks)


def test_a_neighbour_does_not_show_its_key():
    ranks = join_all(new_jobs(2))
    other = ranks[0].neighbours[1]
    assert repr(other.key) not in repr(other)
    assert other.key.hex() not in repr(other)
    check_mesh(ranks)


def test_every_link_has_a_key_of_its_own_and_every_mesh_new_ones():
    jobs = new_jobs(4)
    keys = set()
    for _ in range(2):
        ranks = join_all(jobs)
        keys |= {other.key for rank in ranks for other in rank.neighbours if other.key}
        check_mesh(ranks)
    assert len(keys) == 2 * 6


def test_the_kernel_watches_the_links():
    (first, second) = join_all(new_jobs(2), heartbeat_timeout=3.0)
    for rank, other in ((first, 1), (second, 0)):
        with socket.socket(fileno=os.dup(rank.neighbours[other].socket)) as link:
            get = link.getsockopt
            assert get(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert get(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert get(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
            idle = get(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            pause = get(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert idle + 2 * pause <= 4
    check_mesh([first, second])


# -- where ranks listen, and for how long --------------------------------------------------------


def listening(own_only: bool = True) -> dict[int, str]:
    """Read from the kernel's tables at which addresses and ports this process listens."""
    links = (os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd"))
    own = {link.rpartition("[")[2].rstrip("]") for link in links if "socket:[" in link}
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            digits, _, port = fields[1].partition(":")
            if fields[3] == "0A" and (fields[9] in own or not own_only):
                found[int(port, 16)] = digits
    return found


@pytest.fixture
def halted(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every rank when the cards are exchanged, until the event is set."""
    go_on = threading.Event()
    build = mesh_builder.MeshBuilder.build

    def wait_and_build(self: Any) -> Any:
        assert go_on.wait(20)
        return build(self)

    monkeypatch.setattr(mesh_builder.MeshBuilder, "build", wait_and_build)
    yield go_on
    go_on.set()


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[list[PeerAddress]]:
    """Keep the cards that ranks in this process have exchanged."""
    kept: list[list[PeerAddress]] = []
    exchange = mesh.exchange_addresses

    def exchange_and_keep(*args: Any) -> list[PeerAddress]:
        result = exchange(*args)
        kept.append(result)
        return result

    monkeypatch.setattr(mesh, "exchange_addresses", exchange_and_keep)
    return kept


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Count the guests that rank 0 has admitted to the exchange."""
    count = threading.Semaphore(0)
    admit = meeting.Server._admit

    def admit_and_count(*args: object) -> None:
        admit(*args)
        count.release()

    monkeypatch.setattr(meeting.Server, "_admit", admit_and_count)
    return count


def wait_for(is_so: Callable[[], Any]) -> Any:
    deadline = Deadline(10)
    while not (result := is_so()):
        assert deadline.remaining() > 0
    return result


LOOPBACK = "0100007F"
LOOPBACK6 = "00000000000000000000000001000000"


@pytest.mark.parametrize(
    ("make_jobs", "address"),
    [
        (lambda: new_jobs(3), LOOPBACK),
        (lambda: on_several_hosts(3), LOOPBACK),
        (lambda: on_several_hosts(3, "::1"), LOOPBACK6),
    ],
    ids=["one host", "IPv4", "IPv6"],
)
def test_every_rank_listens_at_one_address_until_the_mesh_is_complete(
    make_jobs, address, halted, exchanged
):
    ranks = [Rank(job) for job in make_jobs()]
    wait_for(lambda: len(exchanged) == 3)
    assert set(listening().values()) == {address}
    assert listening().keys() == {card.port for card in exchanged[0]}
    halted.set()
    ends = [rank.end() for rank in ranks]
    assert listening() == {}
    for card in exchanged[0]:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((card.address, card.port))
    check_mesh(ends)


def test_where_a_rank_listens_is_logged(caplog):
    with caplog.at_level(logging.INFO, "ferrodist"):
        ranks = join_all(on_several_hosts(2))
    for other in ranks[0].neighbours:
        assert f"listening at {other.address} on lo, which routes to 127.0.0.1" in caplog.text
    check_mesh(ranks)


def test_ports_are_taken_from_the_range(exchanged):
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first)):
        check_mesh(join_all(new_jobs(2), ports=(first, first + 2)))
    assert {card.port for card in exchanged[0]} == {first + 1, first + 2}


def test_an_exhausted_range_of_ports_is_named_on_all(admitted):
    jobs = new_jobs(3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ranks = [Rank(jobs[0]), Rank(jobs[2])]
        assert admitted.acquire(timeout=10)
        for rank in [*ranks, Rank(jobs[1], ports=(port, port))]:
            assert isinstance(rank.end().error, RendezvousError)
            text = f"no port from {port} to {port} is free at 127.0.0.1: every rank of a host needs"
            assert text in str(rank.error)
            assert "widen FERRODIST_PORTS" in str(rank.error)


def free_ports(number: int) -> int:
    """Find so many ports in a row that are free, and return the first."""
    for first in range(20_000 + os.getpid() % 10_000, 32_000, number):
        try:
            for port in range(first, first + number):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def test_an_advertised_address_stands_on_the_card(exchanged):
    forward = Forward()
    ranks = [
        Rank(job, advertise=str(forward.endpoint)) if job.rank == 0 else Rank(job)
        for job in new_jobs(2)
    ]
    (own, *_) = wait_for(lambda: exchanged)
    assert (own[0].address, own[0].port) == ("127.0.0.1", forward.endpoint.port)
    (port,) = listening().keys() - {own[1].port, forward.endpoint.port}
    forward.start_to(Endpoint("127.0.0.1", port))
    ends = [rank.end() for rank in ranks]
    assert ends[1].neighbours[0].address == str(forward.endpoint)
    check_mesh(ends)
    forward.close()


class Forward:
    """Forwards one connection, as a host does that has another address outside than inside."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(*self._listener.getsockname())
        self._sockets: list[socket.socket] = []

    def start_to(self, target: Endpoint) -> None:
        here, _ = self._listener.accept()
        there = socket.create_connection(target)
        self._sockets = [here, there]
        for pair in ((here, there), (there, here)):
            threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self._sockets):
            one.close()


@pytest.mark.parametrize("text", ["here", "10.0.0.1", "::1:29500", "host:0"])
def test_an_advertised_address_that_is_none_is_refused(text, admitted):
    jobs = new_jobs(3)
    others = [Rank(jobs[0]), Rank(jobs[2])]
    assert admitted.acquire(timeout=10)
    with pytest.raises(InvalidArgument, match=f"FERRODIST_ADVERTISE='{text}': expected address"):
        join_mesh(jobs[1], Config(advertise=text))
    for other in others:
        assert isinstance(other.end().error, RendezvousError)
        assert "rank 1 gave up: InvalidArgument" in str(other.error)


# -- processes -----------------------------------------------------------------------------------

PROCESS = """
import os, sys, time
from ferrodist.config import Config
from ferrodist.rendezvous import Job, mesh_builder
from ferrodist.rendezvous.mesh import join_mesh

name, rank, size, secret, what = sys.stdin.readline().split()
if what == "stop":
    def stop(self):
        print("stopped", flush=True)
        sys.stdin.read()
    mesh_builder.MeshBuilder.build = stop
neighbours = join_mesh(Job(name, int(rank), int(size), bytes.fromhex(secret)), Config())
print(*(one.pid for one in neighbours), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process_of(job: Job, what: str = "join") -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PROCESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        facts = f"{job.name} {job.rank} {job.world_size} {job.secret.hex()} {what}\n"
        process.stdin.write(facts.encode())
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


def is_readable(file: int, seconds: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def test_a_watch_tells_when_a_process_of_this_host_is_gone():
    jobs = new_jobs(2)
    with process_of(jobs[0]) as process:
        rank = Rank(jobs[1]).end()
        assert rank.error is None
        assert process.stdout.readline().split() == [str(process.pid).encode(), b"%d" % os.getpid()]
        watch = rank.neighbours[0].watch
        assert rank.neighbours[0].pid == process.pid
        assert not os.get_inheritable(watch)
        assert not is_readable(watch)
        process.kill()
        assert is_readable(watch, 10)
        assert is_readable(rank.neighbours[0].socket, 10)
    close_peers(rank.neighbours)


def test_a_process_of_another_host_or_pid_namespace_is_not_watched():
    own = PeerAddress.of_this_process(1, Endpoint("127.0.0.1", 1))
    watch = mesh._open_watch(own, own)
    assert watch >= 0
    os.close(watch)
    assert mesh._open_watch(replace(own, host="other"), own) == -1
    assert mesh._open_watch(replace(own, pid_namespace=1), own) == -1


def test_a_host_may_be_given_another_name():
    jobs = new_jobs(3)
    ranks = [Rank(job, host_id=f"host {job.rank // 2}") for job in jobs]
    ends = [rank.end() for rank in ranks]
    for rank in ends:
        assert [one.host for one in rank.neighbours] == ["host 0", "host 0", "host 1"]
    watched = [[one.watch >= 0 for one in rank.neighbours] for rank in ends]
    assert watched == [[False, True, False], [True, False, False], [False, False, False]]
    check_mesh(ends)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_dies_while_ranks_connect_is_named_on_all_at_once(dead):
    jobs = new_jobs(3)
    with process_of(jobs[dead], "stop") as process:
        ranks = [Rank(job) for job in jobs if job.rank != dead]
        assert process.stdout.readline() == b"stopped\n"
        process.kill()
        killed = time.monotonic()
        for rank in ranks:
            assert isinstance(rank.end().error, RendezvousError)
            assert rank.error.rank == dead
            assert f"rank {dead} (pid {process.pid} on " in str(rank.error)
        assert time.monotonic() - killed < 10


def test_what_the_launcher_has_seen_of_a_dead_rank_is_told(halted, exchanged):
    ends = StatusBoard.create(3)
    jobs = [replace(job, status_board=ends) for job in new_jobs(3)]
    with process_of(jobs[2], "stop") as process:
        ranks = [Rank(job) for job in jobs[:2]]
        assert process.stdout.readline() == b"stopped\n"
        wait_for(lambda: len(exchanged) == 2)
        ends.set_exit_code(2, -9)
        halted.set()
        for rank in ranks:
            assert "rank 2 was killed by SIGKILL before it joined" in str(rank.end().error)
    ends.close()


MANY = """
import os, resource, secrets, sys
from ferrodist.config import Config
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.mesh import join_mesh

size, limit = map(int, sys.argv[1:3])
name, secret = secrets.token_hex(8), secrets.token_bytes(32)
for rank in range(1, size):
    if os.fork() == 0:
        break
else:
    rank = 0
if limit and (rank == size - 1 or "all" in sys.argv):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    neighbours = join_mesh(Job(name, rank, size, secret), Config(join_timeout=40.0))
    text = f"joined {len({one.socket for one in neighbours})}"
except Exception as error:  # it is printed, and the test looks at it
    text = f"{type(error).__name__}: {error}"
if rank:
    if "all" in sys.argv:
        os.write(1, text.encode() + b"\\n")  # in one piece
    os._exit(not text.startswith("joined"))
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(size - 1)]
print(text, sum(codes))
"""


@pytest.mark.slow
def test_a_rank_that_may_not_open_enough_files_says_so_on_all():
    output = subprocess.check_output([sys.executable, "-c", MANY, "20", "16"], text=True)
    assert "RendezvousError: rank 19 cannot connect to rank " in output
    assert "a process may open 16 files here" in output
    assert output.endswith(" 19\n")


@pytest.mark.slow
def test_if_rank_0_runs_out_of_files_while_it_is_connected_to_all_name_how_many_are_needed():
    command = [sys.executable, "-c", MANY, "16", "28", "all"]
    lines = subprocess.check_output(command, text=True, timeout=60).splitlines()
    assert len(lines) == 16
    assert all("rank 0 could not join job" in line for line in lines), lines
    assert all("'ulimit -n 112' in the shell" in line for line in lines), lines


@pytest.mark.slow
def test_many_ranks_are_linked():
    output = subprocess.check_output([sys.executable, "-c", MANY, "70", "0"], text=True)
    assert output == "joined 70 0\n"


# -- cards ---------------------------------------------------------------------------------------


def test_a_card_travels_whole():
    card = PeerAddress(
        7, 1234, 99, "host id", "nöde", "fe80::1", 4567, bytes(range(16)), True, "1.2.3"
    )
    assert PeerAddress.unpack(card.pack()) == card
    assert "token" not in repr(card)


@pytest.mark.parametrize("cut", [0, 10, 50, -1])
def test_a_card_that_is_cut_or_too_long_is_refused(cut):
    data = PeerAddress.of_this_process(1, Endpoint("127.0.0.1", 1)).pack()
    with pytest.raises(ProtocolError):
        PeerAddress.unpack(data[:cut])
    with pytest.raises(ProtocolError):
        PeerAddress.unpack(data + b"x")
    with pytest.raises(ProtocolError):
        PeerAddress.unpack(
            struct.pack("!IQQH16s?4H", 0, 0, 0, 0, b"", False, 2000, 0, 0, 0) + bytes(2000)
        )


def test_hosts_differ_in_network_and_user(monkeypatch):
    own = mesh.host_id()
    assert own == mesh.host_id()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert mesh.host_id() != own
    monkeypatch.undo()
    monkeypatch.setattr(mesh, "_namespace", lambda kind: 1)
    assert mesh.host_id() != own


class Told:
    """An exchange that has happened already."""

    def __init__(self, *told: PeerAddress) -> None:
        self.told = told

    def gather(self, own: bytes) -> list[bytes]:
        return [card.pack() for card in self.told]


def test_cards_of_another_version_or_world_are_refused():
    first, second = (
        PeerAddress.of_this_process(rank, Endpoint("127.0.0.1", 1)) for rank in range(2)
    )
    job = new_jobs(2)[0]
    old = replace(second, version="0.0.1")
    with pytest.raises(ProtocolError, match=r"rank 1 runs ferrodist 0\.0\.1, rank 0 runs"):
        mesh.exchange_addresses(Told(first, old), job, first)
    for odd in ([first], [first, first], [second, first]):
        with pytest.raises(ProtocolError, match="are not of this world"):
            mesh.exchange_addresses(Told(*odd), job, first)


# -- ranks that cannot connect -------------------------------------------------------------------


def change_card(monkeypatch: pytest.MonkeyPatch, rank: int, **changes: Any) -> None:
    """Let a rank tell something else of itself than is so."""
    make = mesh._own_address

    def make_and_change(job: Job, *args: Any) -> PeerAddress:
        card = make(job, *args)
        return replace(card, **changes) if job.rank == rank else card

    monkeypatch.setattr(mesh, "_own_address", make_and_change)


@pytest.mark.slow
def test_a_rank_that_cannot_be_reached_is_named_on_all_with_both_ends(monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        change_card(monkeypatch, 1, port=port)
        ranks = join_all(new_jobs(4))
    for rank in ranks:
        assert isinstance(rank.error, RendezvousError)
        assert rank.error.rank == 1
        text = str(rank.error)
        assert f"rank 1 (pid {os.getpid()} on {socket.gethostname()}) of job" in text
        assert f"at 127.0.0.1:{port}: Connection refused" in text
        assert "could not be reached from rank " in text
        for word in ("FERRODIST_PORTS", "FERRODIST_SOCKET_IFNAME", "firewall", "ferrodist doctor"):
            assert word in text


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named_in_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        change_card(monkeypatch, 0, port=silent.getsockname()[1])
        ranks = join_all(new_jobs(3), join_timeout=2.0)
        for rank in ranks:
            assert isinstance(rank.error, RendezvousError)
            assert rank.error.rank in (0, 1, 2)
            assert rank.seconds < 3
        assert "rank 0 (pid " in str(ranks[1].error)
        assert "could not be reached from rank " in str(ranks[1].error)


def test_a_name_on_a_card_that_nobody_knows_is_told(monkeypatch):
    change_card(monkeypatch, 0, address="rank-0.invalid")
    for rank in join_all(new_jobs(2)):
        assert "could not be reached from rank 1 at rank-0.invalid:" in str(rank.error)


def test_another_rank_at_the_address_is_not_taken_for_the_right_one(monkeypatch, exchanged):
    listener_ports: dict[int, int] = {}
    make = mesh._own_address

    def make_card(job: Job, config: Config, listener: socket.socket) -> PeerAddress:
        listener_ports[job.rank] = listener.getsockname()[1]
        card = make(job, config, listener)
        if job.rank != 1:
            return card
        return replace(card, port=wait_for(lambda: listener_ports.get(0)))  # rank 0's

    monkeypatch.setattr(mesh, "_own_address", make_card)
    for rank in join_all(new_jobs(3)):
        text = str(rank.error)
        if isinstance(rank.error, AuthenticationError):
            assert "where rank 1 should" in text
        else:  # rank 0 was linked to all, and did not listen any more
            assert isinstance(rank.error, RendezvousError)
            assert text.startswith("rank 1 (pid")
            assert "could not be reached from rank 2" in text


def test_a_rank_that_ends_right_after_the_mesh_is_complete_harms_nobody():
    for _ in range(20):
        jobs = new_jobs(4)
        ranks = [Rank(job) for job in jobs]
        for rank in ranks:
            rank.join(20)
            assert rank.error is None, rank.error
            close_peers(rank.neighbours)  # while others may still be in it


def test_what_comes_after_the_mesh_is_left_for_whom_it_is_meant(monkeypatch):
    """Rank 1 is let go first and sends at once, before rank 2 is let go."""
    has_heard = threading.Event()
    send, hear = Channel.send, mesh_builder.MeshBuilder._read
    let_go: list[Channel] = []

    def send_late(link: Channel, kind: MessageKind, *args: Any) -> None:
        if kind is MessageKind.GO:  # two when all have met, then two when all are connected
            let_go.append(link)
            assert len(let_go) <= 3 or has_heard.wait(20)
        send(link, kind, *args)

    def hear_and_tell(self: Any, rank: int, link: Channel) -> None:
        try:
            hear(self, rank, link)
        finally:
            if self._job.rank and rank:  # rank 1 and rank 2 have nothing to say before that
                has_heard.set()

    monkeypatch.setattr(Channel, "send", send_late)
    monkeypatch.setattr(mesh_builder.MeshBuilder, "_read", hear_and_tell)
    ranks = [Rank(job) for job in new_jobs(3)]
    wait_for(lambda: ranks[1].neighbours or ranks[2].neighbours)
    first, second = (1, 2) if ranks[1].neighbours else (2, 1)
    os.write(ranks[first].neighbours[second].socket, b"first data")
    for rank in ranks:
        assert rank.end().error is None
    assert os.read(ranks[second].neighbours[first].socket, 99) == b"first data"
    for rank in ranks:
        close_peers(rank.neighbours)


def test_a_failure_after_all_is_linked_reaches_everybody(monkeypatch):
    see = mesh_builder.MeshBuilder._check_ready

    def fail(self: Any) -> None:
        if self._job.rank == 2 and len(self._links) == 3:
            raise RendezvousError("rank 2 has had enough", rank=2)
        see(self)

    monkeypatch.setattr(mesh_builder.MeshBuilder, "_check_ready", fail)
    for rank in join_all(new_jobs(4)):
        assert str(rank.error) == "rank 2 has had enough"
        assert rank.error.rank == 2


def test_a_link_to_many_is_made_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(mesh_builder, "_MAX_CONNECTING", 2)
    check_mesh(join_all(new_jobs(8)))


# -- strangers -----------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(endpoint: Endpoint) -> Iterator[Channel]:
    link = Channel(connect_to_any(resolve(endpoint), 10))
    try:
        yield link
    finally:
        link.close()


def test_strangers_are_turned_away_and_the_mesh_is_made(halted, exchanged, caplog):
    jobs = new_jobs(3)
    with caplog.at_level(logging.WARNING, "ferrodist"), contextlib.ExitStack() as stack:
        ranks = [Rank(job) for job in jobs]
        told = wait_for(lambda: exchanged and exchanged[0])
        where = Endpoint(told[0].address, told[0].port)
        for _ in range(200):
            stack.enter_context(connected(where)).socket.send(b"GET / HTTP/1.1\r\n\r\n")
        halted.set()
        ends = [rank.end() for rank in ranks]
    check_mesh(ends)
    assert 1 <= len(caplog.records) <= max(rank.seconds for rank in ends) + 1


FLOOD = """
import contextlib, secrets, socket, sys
for i in range(10000):
    with contextlib.suppress(OSError), socket.create_connection(sys.argv[1:], timeout=10) as one:
        one.sendall(secrets.token_bytes(64) if i % 2 else b"GET / HTTP/1.1\\r\\n\\r\\n")
    if i == 1000:
        print("going on", flush=True)
"""


def test_ten_thousand_strangers_do_not_keep_ranks_from_each_other(halted, exchanged, caplog):
    jobs = new_jobs(3)
    first = [Rank(job, join_timeout=50.0) for job in jobs]
    told = wait_for(lambda: exchanged and exchanged[0])
    command = [sys.executable, "-c", FLOOD, told[0].address, str(told[0].port)]
    with caplog.at_level(logging.WARNING, "ferrodist"):
        # More than its queue holds come before rank 0 looks at the first.
        with subprocess.Popen(command, stdout=subprocess.PIPE) as flood:
            assert flood.stdout.readline() == b"going on\n"
            halted.set()
            ends = [rank.end() for rank in first]
            flood.kill()
    check_mesh(ends)
    assert len(caplog.records) <= max(rank.seconds for rank in ends) + 1


STRANGERS = {
    "wrong secret": lambda job: replace(job, secret=secrets.token_bytes(32)),
    "the job's own secret": lambda job: job,
    "the secret of another mesh": lambda job: mesh._job_of_mesh(
        job, job.secret, PeerAddress.of_this_process(0, Endpoint("", 0))
    ),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_who_was_not_at_the_exchange_is_refused(kind, halted, exchanged):
    jobs = new_jobs(3)
    ranks = [Rank(job) for job in jobs]
    told = wait_for(lambda: exchanged and exchanged[0])
    with connected(Endpoint(told[0].address, told[0].port)) as link:
        halted.set()
        stranger = STRANGERS[kind](jobs[2])
        talk = handshake.greet_server(link, stranger, handshake.MESH)
        with pytest.raises((AuthenticationError, EOFError)):
            run_steps(talk, link, Deadline(10))
    check_mesh([rank.end() for rank in ranks])


def test_a_handshake_for_one_purpose_is_no_good_for_another():
    jobs = new_jobs(2)
    left, right = (Channel(end) for end in socket.socketpair())

    def serve() -> None:
        with contextlib.suppress(EOFError, AuthenticationError):
            run_steps(handshake.greet_client(right, jobs[0]), right, Deadline(10))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(AuthenticationError):
        run_steps(handshake.greet_server(left, jobs[1], handshake.MESH), left, Deadline(10))
    left.close()
    thread.join(10)
    right.close()


def test_ctrl_c_on_one_rank_reaches_the_others(monkeypatch):
    jobs = new_jobs(3)
    ranks = [Rank(job) for job in jobs[1:]]
    see = mesh_builder.MeshBuilder._check_ready

    def interrupt(self: Any) -> None:
        if self._job.rank == 0 and self._links:
            os.kill(os.getpid(), signal.SIGINT)
        see(self)

    monkeypatch.setattr(mesh_builder.MeshBuilder, "_check_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        join_mesh(jobs[0], Config(join_timeout=20.0))
    for rank in ranks:
        assert isinstance(rank.end().error, RendezvousError)
        assert "rank 0 gave up: KeyboardInterrupt" in str(rank.error)
        assert rank.seconds < 10


def test_a_call_is_tried_again_when_the_other_side_is_busy(monkeypatch):
    monkeypatch.setattr("ferrodist.rendezvous.handshake._MAX_STRANGERS", -4)
    monkeypatch.setattr(mesh_builder, "_PAUSE", 0.001)
    check_mesh(join_all(new_jobs(6)))
