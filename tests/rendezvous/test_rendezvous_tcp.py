"""Ranks of several hosts meet at an address: ranks of the job get in, and nobody else."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import socket
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
from ferrodist.rendezvous import Job, handshake, meeting, sockets
from ferrodist.rendezvous.interfaces import list_interfaces
from ferrodist.rendezvous.job import Endpoint, known_secret
from ferrodist.rendezvous.launchers import PLAIN
from ferrodist.rendezvous.mesh import open_exchange
from ferrodist.rendezvous.sockets import SocketAddress, connect_to_any, resolve
from ferrodist.rendezvous.wire import Channel, MessageKind, run_steps

pytestmark = pytest.mark.timeout(60)

HOST_NAME = socket.gethostname()
NOBODY = "192.0.2.77"  # RFC 5737


def free_port(address: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def new_jobs(world_size: int, address: str = "127.0.0.1", **facts: Any) -> list[Job]:
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)
    facts |= {"hosts": "a test"}
    facts.setdefault("endpoint", Endpoint(address, free_port()))
    return [Job(name, rank, world_size, secret, **facts) for rank in range(world_size)]


class Rank(threading.Thread):
    """One rank in a thread: hears what all have to tell, or keeps the error."""

    def __init__(self, job: Job, timeout: float = 20.0, **settings: Any) -> None:
        super().__init__(daemon=True)
        self.job, self.timeout, self.config = job, timeout, Config(**settings)
        self.heard: list[bytes] = []
        self.towards = ""
        self.error: Exception | None = None
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        start = time.monotonic()
        try:
            with open_exchange(self.job, self.config, Deadline(self.timeout)) as exchange:
                self.towards = exchange.towards
                self.heard = exchange.gather(f"rank {self.job.rank}".encode())
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            self.error = error
        self.seconds = time.monotonic() - start

    def end(self) -> Rank:
        self.join(40)
        assert not self.is_alive()
        return self


def meet_all(jobs: list[Job], timeout: float = 20.0, **settings: Any) -> list[Rank]:
    ranks = [Rank(job, timeout, **settings) for job in jobs]
    return [rank.end() for rank in ranks]


def check_met(ranks: list[Rank]) -> None:
    expected = [f"rank {rank}".encode() for rank in range(len(ranks))]
    for rank in ranks:
        assert rank.error is None, rank.error
        assert rank.heard == expected


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    def files() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests have left
    before = files()
    yield
    assert files() == before


@contextlib.contextmanager
def connected(job: Job) -> Iterator[Channel]:
    """Connect by hand, as a rank or a stranger would."""
    deadline = Deadline(10)
    while True:
        try:
            link = Channel(connect_to_any(resolve(job.endpoint), 10))
            break
        except ConnectionError:
            assert deadline.remaining() > 0
    try:
        yield link
    finally:
        link.close()


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Count the clients that servers in this process have admitted."""
    count = threading.Semaphore(0)
    admit = meeting.Server._admit

    def admit_and_count(*args: object) -> None:
        admit(*args)
        count.release()

    monkeypatch.setattr(meeting.Server, "_admit", admit_and_count)
    return count


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Make up names: what is in this table resolves to these addresses, what is empty does not."""
    table: dict[str, list[str]] = {}

    def look_up(endpoint: Endpoint) -> list[SocketAddress]:
        if endpoint.host not in table:
            return resolve(endpoint)
        if not table[endpoint.host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found = (resolve(Endpoint(host, endpoint.port)) for host in table[endpoint.host])
        return [address for one in found for address in one]

    monkeypatch.setattr(sockets, "resolve", look_up)
    return table


def listening_at(port: int) -> list[str]:
    """Read from the kernel's tables at which addresses somebody listens."""
    found = []
    for table, nbytes in (("/proc/net/tcp", 4), ("/proc/net/tcp6", 16)):
        for line in Path(table).read_text().splitlines()[1:]:
            where, state = line.split()[1], line.split()[3]
            digits, _, number = where.partition(":")
            if state == "0A" and int(number, 16) == port:
                packed = bytes.fromhex(digits)
                words = [packed[i : i + 4][::-1] for i in range(0, nbytes, 4)]
                family = socket.AF_INET if nbytes == 4 else socket.AF_INET6
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


OWN_ADDRESSES = [one.address for one in list_interfaces() if "%" not in one.address]


@pytest.mark.parametrize("address", [*OWN_ADDRESSES, "localhost"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_ranks_meet_at_any_address_of_rank_0(address, world_size):
    check_met(meet_all(new_jobs(world_size, address)))


@pytest.mark.parametrize("address", OWN_ADDRESSES)
def test_rank_0_listens_at_that_address_alone(address):
    jobs = new_jobs(2, address)
    first = Rank(jobs[0])
    with connected(jobs[0]):
        assert listening_at(jobs[0].endpoint.port) == [address]
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])
    assert listening_at(jobs[0].endpoint.port) == []


def test_ranks_know_the_address_of_rank_0():
    for rank in meet_all(new_jobs(3, "::1")):
        assert rank.towards == "::1"


def test_two_jobs_at_once_do_not_disturb_each_other():
    ranks = [[Rank(job) for job in new_jobs(3)] for _ in range(2)]
    for one in ranks:
        check_met([rank.end() for rank in one])


def test_the_port_is_free_again_afterwards():
    jobs = new_jobs(3)
    for _ in range(3):
        check_met(meet_all(jobs))


def test_guests_may_come_before_rank_0():
    jobs = new_jobs(3)
    clients = [Rank(job) for job in jobs[1:]]
    with pytest.raises(OSError, match="refused"):  # nobody listens yet
        connect_to_any(resolve(jobs[0].endpoint), 1)
    check_met([rank.end() for rank in [Rank(jobs[0]), *clients]])


# -- names ---------------------------------------------------------------------------------------


def test_an_address_that_does_not_answer_costs_little(names):
    names["rank-0"] = [NOBODY, "::1", "127.0.0.1"]
    ranks = meet_all(new_jobs(3, "rank-0"))
    check_met(ranks)
    assert max(rank.seconds for rank in ranks) < 2


def test_a_name_is_looked_up_once(names, monkeypatch):
    jobs = new_jobs(2, "rank-0")
    names["rank-0"] = ["127.0.0.1"]
    asked: list[Endpoint] = []
    look_up = sockets.resolve
    monkeypatch.setattr(sockets, "resolve", lambda one: asked.append(one) or look_up(one))
    client = Rank(jobs[1], timeout=0.5).end()
    assert "nobody listens at rank-0" in str(client.error)
    assert [one.host for one in asked].count("rank-0") == 1


def test_a_name_that_is_not_known_yet_is_asked_for_again(names, caplog):
    jobs = new_jobs(2, "rank-0")
    names["rank-0"] = []
    with caplog.at_level(logging.WARNING, "ferrodist"):
        client = Rank(jobs[1])
        wait_for(lambda: "cannot be resolved yet" in caplog.text)
        names["rank-0"] = ["127.0.0.1"]
        check_met([rank.end() for rank in [Rank(jobs[0]), client]])


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = Deadline(10)
    while not is_so():
        assert deadline.remaining() > 0


def test_a_name_that_is_never_known_is_told_as_such(names):
    names["rank-0"] = []
    first, second = meet_all(new_jobs(2, "rank-0"), timeout=0.5)
    assert "cannot be resolved: [Errno -2] Name or service not known" in str(first.error)
    assert "nobody listens at rank-0:" in str(second.error)
    assert "(it cannot be resolved: [Errno -2]" in str(second.error)


@pytest.mark.skipif(len(OWN_ADDRESSES) < 3, reason="this host has only loopback")
def test_a_name_that_leads_to_loopback_on_its_own_host_is_listened_for_where_others_reach(names):
    names["rank-0"] = ["127.0.1.1"]
    ranks = meet_all(new_jobs(3, "rank-0"))
    check_met(ranks)
    assert ranks[0].towards == ranks[1].towards
    assert ranks[0].towards in OWN_ADDRESSES
    assert not ranks[0].towards.startswith("127.")


def test_the_interface_that_was_asked_for_is_listened_at(names):
    names["rank-0"] = [*OWN_ADDRESSES]
    ranks = meet_all(new_jobs(2, "rank-0"), socket_ifname="=lo")
    check_met(ranks)
    assert ranks[0].towards in ("127.0.0.1", "::1")


def test_an_interface_that_is_not_there_is_told_at_once():
    rank = Rank(new_jobs(2)[0], socket_ifname="wlan").end()
    assert "FERRODIST_SOCKET_IFNAME='wlan' matches no network interface" in str(rank.error)


def test_rank_0_on_the_wrong_host_is_told_so():
    rank = Rank(replace(new_jobs(2, NOBODY)[0], launcher=PLAIN)).end()
    assert isinstance(rank.error, RendezvousError)
    text = str(rank.error)
    assert f"{NOBODY}:" in text
    assert f"rank 0 cannot listen at {NOBODY}, which is not an address of this host" in text
    assert "lo (127.0.0.1)" in text
    assert rank.seconds < 1


# -- ports, missing ranks, duplicates ------------------------------------------------------------


def test_a_port_in_use_is_named_with_who_has_it():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        rank = Rank(new_jobs(2, endpoint=Endpoint("127.0.0.1", port))[0]).end()
    assert isinstance(rank.error, RendezvousError)
    assert f"port {port} is in use at 127.0.0.1: pid {os.getpid()} (" in str(rank.error)
    assert "give this job another port" in str(rank.error)
    assert rank.seconds < 5


def test_missing_ranks_are_named_with_where_the_others_are():
    jobs = new_jobs(4)
    ranks = meet_all([jobs[0], jobs[2]], timeout=0.5)
    pid = os.getpid()
    for rank in ranks:
        assert isinstance(rank.error, RendezvousError)
        assert rank.error.missing == [1, 3]
        text = str(rank.error)
        assert "rank 1, rank 3 of 4 did not join" in text
        assert f"here: rank 0 (pid {pid} on {HOST_NAME}, 127.0.0.1)" in text
        assert f", rank 2 (pid {pid} on {HOST_NAME}, 127.0.0.1:" in text
        assert f"a firewall keeps ranks from {jobs[0].endpoint}" in text
        assert rank.seconds < 1.5


def test_a_missing_rank_0_is_named_with_its_address():
    jobs = new_jobs(3)
    for rank in meet_all(jobs[1:], timeout=0.3):
        assert rank.error.missing == [0]
        assert f"nobody listens at {jobs[0].endpoint} (" in str(rank.error)
        assert "Connection refused" in str(rank.error)


def test_a_second_process_of_one_rank_is_refused_naming_both_addresses(admitted):
    jobs = new_jobs(3)
    first = [Rank(jobs[0]), Rank(jobs[1])]
    assert admitted.acquire(timeout=10)
    second = Rank(jobs[1]).end()
    assert isinstance(second.error, RendezvousError)
    assert second.error.rank == 1
    text = str(second.error)
    assert f"exists twice: pid {os.getpid()} on {HOST_NAME}, 127.0.0.1:" in text
    assert " has joined, 127.0.0.1:" in text
    check_met([rank.end() for rank in [*first, Rank(jobs[2])]])


def test_another_world_size_is_refused_naming_both():
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    odd = Rank(replace(jobs[1], world_size=5)).end()
    assert (odd.error.rank, odd.error.got, odd.error.expected) == (1, 5, 2)
    assert f"(pid {os.getpid()} on {HOST_NAME}, 127.0.0.1) for a world of 2" in str(odd.error)
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


def test_different_versions_are_named_on_every_rank(admitted, monkeypatch):
    jobs = new_jobs(3)
    ranks = [Rank(jobs[0]), Rank(jobs[2])]
    assert admitted.acquire(timeout=10)
    new_greeting = handshake._new_greeting

    def greet(job: Job) -> handshake.Greeting:
        greeting = new_greeting(job)
        return greeting._replace(version="9.9.9") if job.rank == 1 else greeting

    monkeypatch.setattr(handshake, "_new_greeting", greet)
    ranks.append(Rank(jobs[1]))
    for rank in ranks:
        assert isinstance(rank.end().error, ProtocolError)
        assert "rank 1 runs ferrodist 9.9.9, rank 0 runs " in str(rank.error)
        assert handshake.__version__ in str(rank.error)


# -- ranks that die ------------------------------------------------------------------------------

RANK_0 = """
import sys
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job, meeting
from ferrodist.rendezvous.mesh import open_exchange
from ferrodist.rendezvous.job import Endpoint

admit = meeting.Server._admit
def admit_and_say_so(*args):
    admit(*args)
    print("joined", flush=True)
meeting.Server._admit = admit_and_say_so
name, secret, port = sys.stdin.readline().split()
endpoint = Endpoint("127.0.0.1", int(port))
job = Job(name, 0, 3, bytes.fromhex(secret), hosts="a test", endpoint=endpoint)
with open_exchange(job, Config(), Deadline(30)) as exchange:
    exchange.gather(b"")
"""


def test_the_death_of_rank_0_is_noticed_at_once():
    jobs = new_jobs(3)
    command = [sys.executable, "-c", RANK_0]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        facts = f"{jobs[0].name} {jobs[0].secret.hex()} {jobs[0].endpoint.port}\n"
        process.stdin.write(facts.encode())
        process.stdin.flush()
        rank = Rank(jobs[1], timeout=30.0)
        assert process.stdout.readline() == b"joined\n"
        process.kill()
        killed = time.monotonic()
        rank.end()
        assert time.monotonic() - killed < 1.0
    assert isinstance(rank.error, RendezvousError)
    assert rank.error.rank == 0
    assert f"rank 0 ({jobs[0].endpoint}) of job {jobs[0].name!r} is gone" in str(rank.error)


def test_a_rank_0_that_fails_tells_the_others_why():
    jobs = new_jobs(2)
    client = Rank(jobs[1])
    with contextlib.suppress(RendezvousError):
        with open_exchange(jobs[0], Config(), Deadline(20)) as exchange:
            exchange.serve_until(exchange.is_full)
            raise RendezvousError("no interface here", rank=0)
    assert str(client.end().error) == "no interface here"


def test_a_guest_that_leaves_is_named_everywhere(admitted):
    jobs = new_jobs(4)
    ranks = [Rank(jobs[0]), Rank(jobs[1])]
    assert admitted.acquire(timeout=10)
    with open_exchange(jobs[2], Config(), Deadline(10)):
        assert admitted.acquire(timeout=10)
    for rank in ranks:
        assert isinstance(rank.end().error, RendezvousError)
        assert rank.error.rank == 2
        assert f"rank 2 (pid {os.getpid()} on {HOST_NAME}, 127.0.0.1:" in str(rank.error)


# -- strangers -----------------------------------------------------------------------------------


def test_several_hosts_without_a_secret_are_told_how_to_make_one():
    job = new_jobs(2, "10.0.0.1", has_secret=False)[1]
    rank = Rank(replace(job, launcher=PLAIN)).end()
    assert isinstance(rank.error, AuthenticationError)
    text = str(rank.error)
    assert "has ranks on several hosts (variables set by hand: a test) and no secret" in text
    assert "(umask 077; head -c 32 /dev/urandom > ~/.ferrodist-secret)\n" in text
    assert "export FERRODIST_SECRET_FILE=~/.ferrodist-secret\n" in text
    assert "scp -p ~/.ferrodist-secret HOST:" in text
    assert rank.seconds < 1


def test_without_a_secret_ranks_of_loopback_meet_where_the_kernel_names_the_user():
    jobs = new_jobs(2, has_secret=False)
    with open_exchange(jobs[0], Config(), Deadline(10)) as exchange:
        assert exchange._acceptor._listener.family == socket.AF_UNIX
    check_met(meet_all(jobs))


def test_several_hosts_without_an_address_are_refused():
    rank = Rank(new_jobs(2, endpoint=None)[0]).end()
    assert isinstance(rank.error, InvalidArgument)
    assert "nothing says where rank 0 listens" in str(rank.error)


STRANGERS = {
    "wrong secret": lambda job: replace(job, secret=secrets.token_bytes(32)),
    "no secret": lambda job: replace(job, secret=known_secret(job.name)),
    "another job's rank": lambda job: replace(job, name="another"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_refused_at_once_and_the_job_goes_on(kind, caplog):
    jobs = new_jobs(2)
    with caplog.at_level(logging.WARNING, "ferrodist"):
        first = Rank(jobs[0])
        for _ in range(20):
            stranger = Rank(STRANGERS[kind](jobs[1])).end()
            assert isinstance(stranger.error, AuthenticationError)
            assert f"the process that listens at {jobs[0].endpoint} for job" in str(stranger.error)
            assert stranger.seconds < 1.0
            assert stranger.job.secret.hex() not in str(stranger.error)
        check_met([rank.end() for rank in [first, Rank(jobs[1])]])
    assert 1 <= len(caplog.records) <= first.seconds + 1


def test_a_guest_does_not_prove_itself_to_a_rank_that_is_not_0():
    jobs = new_jobs(3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", jobs[0].endpoint.port))
        listener.listen()
        rank = Rank(jobs[1])
        link = Channel(listener.accept()[0])
        with pytest.raises(AuthenticationError, match="left when it saw this job's proof"):
            run_steps(handshake.greet_client(link, jobs[2]), link, Deadline(10))
        link.close()
    assert isinstance(rank.end().error, AuthenticationError)
    assert f"rank 2 of job {jobs[0].name!r} listens at" in str(rank.error)


def test_an_http_server_at_the_address_is_no_rank_0():
    jobs = new_jobs(2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", jobs[0].endpoint.port))
        listener.listen()
        rank = Rank(jobs[1])
        connection, _ = listener.accept()
        with connection:
            connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            rank.end()
    assert isinstance(rank.error, ProtocolError)
    assert f"the process that listens at {jobs[0].endpoint} for job" in str(rank.error)
    assert "is not a rank of ferrodist" in str(rank.error)


class Relay(threading.Thread):
    """Sits between clients and rank 0, hears everything, and may change what passes.

    ``change(number, data)`` is called for the bytes that clients send, ``number`` of them so far.
    """

    def __init__(self, target: Endpoint, change: Callable[[int, bytes], bytes]) -> None:
        super().__init__(daemon=True)
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self.sent_by_guest = b""
        self.start()

    def run(self) -> None:
        client, _ = self._listener.accept()
        self._listener.close()
        with client, socket.create_connection(self._target, timeout=10) as rank_0:
            back = threading.Thread(target=self._pass_back, args=(rank_0, client), daemon=True)
            back.start()
            while data := client.recv(1 << 16):
                changed = self._change(len(self.sent_by_guest), data)
                self.sent_by_guest += data
                try:
                    rank_0.sendall(changed)
                except OSError:
                    break
            with contextlib.suppress(OSError):
                rank_0.shutdown(socket.SHUT_WR)
            back.join(10)

    def _pass_back(self, rank_0: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := rank_0.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)


def test_a_recorded_conversation_cannot_be_used_again(caplog):
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with connected(jobs[0]):
        relay = Relay(jobs[0].endpoint, lambda number, data: data)
    second = Rank(replace(jobs[1], endpoint=relay.endpoint))
    check_met([first.end(), second.end()])
    relay.join(10)
    assert len(relay.sent_by_guest) > 150

    first = Rank(jobs[0])
    with connected(jobs[0]) as link, contextlib.suppress(ConnectionResetError):
        link.socket.setblocking(True)
        link.socket.sendall(relay.sent_by_guest)
        while link.socket.recv(1 << 16):
            pass
    wait_for(lambda: "refused a connection: a process does not know the job's" in caplog.text)
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


def test_what_is_changed_on_its_way_is_never_believed():
    handshake_nbytes = 9 + 72 + 9 + 32
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with connected(jobs[0]):
        pass

    def flip(number: int, data: bytes) -> bytes:
        if number < handshake_nbytes or b"rank 1" not in data:
            return data
        return data.replace(b"rank 1", b"rank 7")

    relay = Relay(jobs[0].endpoint, flip)
    second = Rank(replace(jobs[1], endpoint=relay.endpoint))
    for rank in (first, second):
        assert isinstance(rank.end().error, ProtocolError)
        assert "a message was changed on its way" in str(rank.error)
    relay.join(10)


NONSENSE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"frd1\x01\xff\xff\xff\xff",
    b"frd1\x0b\x00\x01\x00\x00",
    bytes(4096),
]


FLOOD = """
import contextlib, secrets, socket, sys
nonsense = eval(sys.stdin.readline())
for i in range(10000):
    with contextlib.suppress(OSError), socket.create_connection(sys.argv[1:], timeout=10) as one:
        one.sendall(nonsense[i % 6] if i % 6 < 5 else secrets.token_bytes(64))
    if i == 1000:
        print("going on", flush=True)
"""


@pytest.mark.slow
def test_ten_thousand_strangers_cost_nothing_and_one_line_a_second(caplog):
    jobs = new_jobs(3)
    command = [sys.executable, "-c", FLOOD, *map(str, jobs[0].endpoint)]
    with caplog.at_level(logging.WARNING, "ferrodist"), contextlib.ExitStack() as stack:
        first = Rank(jobs[0], timeout=50)
        for _ in range(64):  # who say little, and slowly
            stack.enter_context(connected(jobs[0])).socket.send(b"frd1")
        flood = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        flood.stdin.write(f"{NONSENSE!r}\n".encode())
        flood.stdin.flush()
        assert flood.stdout.readline() == b"going on\n"
        second = Rank(jobs[1], timeout=50)  # in the middle of it
        assert flood.wait(50) == 0
        check_met([rank.end() for rank in [first, second, Rank(jobs[2])]])
    assert 1 <= len(caplog.records) <= first.seconds + 1
    assert jobs[0].secret.hex() not in caplog.text


def test_a_visitor_that_takes_too_long_is_sent_away(monkeypatch):
    monkeypatch.setattr(handshake, "_HANDSHAKE_SECONDS", 0.1)
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with connected(jobs[0]) as link:
        run_steps(link.receive(MessageKind.BUSY), link, Deadline(10))
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


def test_visitors_beyond_a_number_are_asked_to_come_again(monkeypatch):
    monkeypatch.setattr(handshake, "_HANDSHAKE_SECONDS", 1000.0)
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with contextlib.ExitStack() as stack:
        oldest = stack.enter_context(connected(jobs[0]))
        for _ in range(2 + handshake._MAX_STRANGERS):
            stack.enter_context(connected(jobs[0]))
        run_steps(oldest.receive(MessageKind.BUSY), oldest, Deadline(10))
        check_met([rank.end() for rank in [first, Rank(jobs[1])]])


def test_a_rank_0_that_is_always_busy_is_given_up():
    jobs = new_jobs(2)
    is_over = threading.Event()

    def be_busy(listener: socket.socket) -> None:
        while not is_over.is_set():
            link = Channel(listener.accept()[0])
            link.send(MessageKind.BUSY)
            link.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", jobs[0].endpoint.port))
        listener.listen()
        thread = threading.Thread(target=be_busy, args=(listener,), daemon=True)
        thread.start()
        rank = Rank(jobs[1], timeout=0.5).end()
        is_over.set()
        socket.create_connection(jobs[0].endpoint).close()
        thread.join(10)
    assert isinstance(rank.error, RendezvousError)
    assert "did not answer within 0.5 s" in str(rank.error)


def test_a_link_is_sealed_both_ways():
    jobs = new_jobs(2)
    left, right = (Channel(end) for end in socket.socketpair())
    results: list[Any] = []

    def serve() -> None:
        results.append(run_steps(handshake.greet_client(right, jobs[0]), right, Deadline(10)))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    _, key = run_steps(handshake.greet_server(left, jobs[1]), left, Deadline(10))
    thread.join(10)
    assert key == results[0][1]
    for here, there in ((left, right), (right, left)):
        here.send(MessageKind.READY)
        message = there.socket.recv(99)
        here.socket.send(message)
        run_steps(there.receive(MessageKind.READY), there, Deadline(10))
        for wrong in (message, message[:9] + bytes(16)):  # once more, and without a seal
            here.socket.send(wrong)
            with pytest.raises(ProtocolError, match="a message was changed on its way"):
                run_steps(there.receive(MessageKind.READY), there, Deadline(10))
    left.close()
    right.close()


def test_an_exchange_on_one_host_needs_no_port():
    jobs = [replace(job, hosts="", endpoint=None) for job in new_jobs(3)]
    before = set(Path("/proc/net/tcp").read_text().split())
    exchange = open_exchange(jobs[0], Config(), Deadline(10))
    with exchange:
        assert isinstance(exchange, meeting.Server)
        assert exchange.towards == ""
        assert exchange._acceptor._listener.family == socket.AF_UNIX
    assert before
    check_met(meet_all(jobs))
