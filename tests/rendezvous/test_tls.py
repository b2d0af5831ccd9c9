"""Encrypted links: the same bytes arrive, nobody on the way reads them, strangers do not get in."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import secrets
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from ferrodist import BackendUnavailable, RendezvousError
from ferrodist.config import Config
from ferrodist.rendezvous import mesh_builder, tls
from ferrodist.rendezvous.job import Endpoint
from ferrodist.rendezvous.mesh import join_mesh
from ferrodist.rendezvous.tls import Tls, Tunnel
from test_mesh import (
    Rank,
    check_mesh,
    close_peers,
    exchanged,
    halted,
    join_all,
    listening,
    new_jobs,
    wait_for,
)

pytestmark = pytest.mark.timeout(60)

__all__ = ["exchanged", "halted"]  # fixtures

SECRET = secrets.token_bytes(32)
LIMIT = 10.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that the relay ends with its last link, and leaves no file open."""

    def files() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests have left
    before = files()
    yield
    wait_for(lambda: tls._relay._thread is None)
    wait_for(lambda: files() == before)


def connection() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection; the first has accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        accepting, _ = listener.accept()
    return accepting, calling


@contextlib.contextmanager
def linked(
    secret: bytes = SECRET, other: bytes = SECRET
) -> Iterator[tuple[socket.socket, socket.socket]]:
    accepting, calling = connection()
    ends = Tls(secret).accept(accepting), Tls(other).connect(calling)
    for end in ends:
        end.settimeout(LIMIT)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def receive_all(end: socket.socket) -> bytes:
    data = bytearray()
    while part := end.recv(1 << 16):
        data += part
    return bytes(data)


def run(*functions: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()


# -- the certificate -----------------------------------------------------------------------------


def test_every_rank_makes_the_same_certificate_and_another_job_another():
    assert tls._make_certificate(SECRET) == tls._make_certificate(SECRET)
    other = tls._make_certificate(secrets.token_bytes(32))
    assert set(tls._make_certificate(SECRET)).isdisjoint(other)


def test_the_certificate_does_not_show_the_secret():
    _, text, binary = tls._make_certificate(SECRET)
    for shown in (text, binary):
        assert SECRET not in shown
        assert SECRET.hex().encode() not in shown


def test_without_cryptography_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'ferrodist\[tls\]'"):
        Tls(SECRET)


def test_only_the_newest_tls_is_spoken():
    job = Tls(SECRET)
    for context in (job._accepting, job._connecting):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED


# -- a link --------------------------------------------------------------------------------------


def test_what_is_sent_arrives_both_ways_in_any_amount():
    data = [secrets.token_bytes(8_000_000), secrets.token_bytes(5_000_003)]
    received: dict[int, str] = {}

    def send(end: socket.socket, number: int) -> None:
        end.sendall(data[number])
        end.shutdown(socket.SHUT_WR)

    def receive(end: socket.socket, number: int) -> None:
        received[number] = hashlib.sha256(receive_all(end)).hexdigest()

    with linked() as (one, other):
        run(
            lambda: send(one, 0),
            lambda: send(other, 1),
            lambda: receive(one, 1),
            lambda: receive(other, 0),
        )
    assert received == {i: hashlib.sha256(data[i]).hexdigest() for i in range(2)}


def test_one_side_may_end_and_still_hear_the_other():
    with linked() as (one, other):
        one.sendall(b"my last words")
        one.shutdown(socket.SHUT_WR)
        assert receive_all(other) == b"my last words"
        other.sendall(b"and my answer")
        assert one.recv(99) == b"and my answer"
        other.close()
        assert one.recv(99) == b""


def test_what_was_sent_before_closing_arrives():
    data = secrets.token_bytes(3_000_000)
    with linked() as (one, other):
        heard: list[bytes] = []
        thread = threading.Thread(target=lambda: heard.append(receive_all(other)), daemon=True)
        thread.start()
        one.sendall(data)
        one.close()
        thread.join(20)
    assert heard == [data]


def fill(end: socket.socket) -> int:
    """Send until nothing more fits on the way, and return how much did."""
    end.setblocking(False)
    poll = select.poll()
    poll.register(end, select.POLLOUT)
    sent = 0
    while poll.poll(300):
        with contextlib.suppress(BlockingIOError):
            sent += end.send(bytes(1 << 18))
    end.settimeout(LIMIT)
    return sent


def test_it_arrives_too_if_something_else_was_left_unread():
    with linked() as (one, other):
        fill(other)  # nobody reads it
        one.sendall(bytes(2_000_000))  # nobody does yet
        one.close()
        wait_for(lambda: any(map(Tunnel.has_all_left, list(tls._relay._tunnels))))
        assert len(receive_all(other)) == 2_000_000


def test_who_does_not_read_is_not_sent_more_than_fits_on_the_way():
    with linked() as (one, other):
        sent = fill(one)
        for link in list(tls._relay._tunnels):
            kept = link._arrived.pending, link._leaving.pending
            kept += len(link._to_inner), len(link._to_outer)
            assert max(kept) <= 3 * tls._CHUNK
        assert sent > 1 << 16
        one.shutdown(socket.SHUT_WR)
        assert len(receive_all(other)) == sent


def test_other_links_go_on_while_one_is_busy():
    with linked() as (one, other), linked() as (third, fourth):
        is_over = threading.Event()

        def send() -> None:
            while not is_over.is_set():
                one.sendall(bytes(1 << 18))

        def receive() -> None:
            with contextlib.suppress(OSError):
                receive_all(other)

        threads = [threading.Thread(target=function, daemon=True) for function in (send, receive)]
        for thread in threads:
            thread.start()
        for number in range(100):
            third.sendall(b"%d" % number)
            assert fourth.recv(99) == b"%d" % number
        is_over.set()
        threads[0].join(20)
        one.shutdown(socket.SHUT_WR)
        threads[1].join(20)


# -- strangers -----------------------------------------------------------------------------------


def test_another_secret_ends_the_link_on_both_sides():
    with linked(SECRET, secrets.token_bytes(32)) as (one, other):
        with contextlib.suppress(ConnectionError):
            other.sendall(b"let me in")
        assert one.recv(99) == b""
        with contextlib.suppress(ConnectionError):
            assert other.recv(99) == b""


def test_a_client_without_a_certificate_is_refused():
    accepting, calling = connection()
    with Tls(SECRET).accept(accepting) as end:
        end.settimeout(LIMIT)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        calling.settimeout(LIMIT)
        with contextlib.suppress(OSError), context.wrap_socket(calling) as client:
            client.sendall(b"let me in")
            client.recv(99)
        calling.close()
        assert end.recv(99) == b""


def test_another_certificate_of_the_same_key_is_not_taken_for_the_right_one(monkeypatch):
    monkeypatch.setattr(tls, "_FIRST_DAY", datetime(2001, 1, 1))
    _, _, other = tls._make_certificate(SECRET)
    monkeypatch.undo()
    accepting, calling = connection()
    job = Tls(SECRET)
    job._pinned = other
    with job.accept(accepting) as end, Tls(SECRET).connect(calling) as far:
        end.settimeout(LIMIT)
        with contextlib.suppress(ConnectionError):
            far.sendall(b"let me in")
        assert end.recv(99) == b""


@pytest.mark.parametrize("data", [b"frd1\x01\x00\x00\x00\x48", b"GET / HTTP/1.1\r\n\r\n", b""])
def test_what_is_no_tls_is_the_end_of_the_link(data):
    accepting, calling = connection()
    with Tls(SECRET).accept(accepting) as end, calling:
        end.settimeout(LIMIT)
        calling.sendall(data)
        calling.shutdown(socket.SHUT_WR)
        assert end.recv(99) == b""


def test_a_connection_that_is_reset_is_the_end_of_the_link():
    with linked() as (one, other):
        one.sendall(b"hello")
        assert other.recv(99) == b"hello"
        next(iter(tls._relay._tunnels)).outer.shutdown(socket.SHUT_RDWR)
        assert one.recv(99) == b""
        assert other.recv(99) == b""


def test_a_link_that_is_closed_during_its_handshake_is_gone():
    accepting, calling = connection()
    Tls(SECRET).accept(accepting).close()
    with calling:
        calling.settimeout(LIMIT)
        assert calling.recv(99) == b""


# -- processes -----------------------------------------------------------------------------------

SENDER = """
import select, socket, sys
from contextlib import suppress
from ferrodist.rendezvous.tls import Tls

secret, port, ending = sys.stdin.readline().split()
end = Tls(bytes.fromhex(secret)).connect(socket.create_connection(("127.0.0.1", int(port))))
end.setblocking(False)
poll = select.poll()
poll.register(end, select.POLLOUT)
sent = 0
while poll.poll(300) or sent < 1 << 21:  # until nobody takes more
    with suppress(BlockingIOError):
        sent += end.send(bytes(1 << 18))
end.close() if ending == "close" else end.shutdown(socket.SHUT_WR)  # so ends a mesh that is kept
print(sent, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_unread", [False, True])
@pytest.mark.parametrize("ending", ["close", "shutdown"])
def test_what_a_program_sends_before_it_ends_arrives(has_unread, ending):
    """Also when it leaves something unread, for which the kernel resets the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", SENDER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as process:
            process.stdin.write(f"{SECRET.hex()} {listener.getsockname()[1]} {ending}\n".encode())
            process.stdin.flush()
            accepting, _ = listener.accept()
            with Tls(SECRET).accept(accepting) as end:
                end.settimeout(LIMIT)
                if has_unread:
                    end.sendall(bytes(1_500_000))  # more than its relay takes from the kernel
                sent = int(process.stdout.readline())
                assert sent >= 1 << 21
                begun = sum(len(end.recv(1 << 16)) for _ in range(16))  # so that the rest has left
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.7)  # it must not end, but nothing tells that it does not
                with contextlib.suppress(ConnectionResetError):  # the end, if we left it something
                    while part := end.recv(1 << 16):
                        begun += len(part)
                assert begun == sent
    assert process.returncode == 0


def num_sockets() -> int:
    links = (f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.exists(link))


def test_a_forked_child_does_not_hold_the_links_of_its_parent():
    before = num_sockets()
    with linked() as (one, other):
        one.sendall(b"hello")
        assert other.recv(99) == b"hello"
        child = os.fork()
        if child == 0:
            one.close()
            other.close()
            os._exit(num_sockets() - before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- the mesh ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_mesh_is_made_of_encrypted_links(world_size):
    check_mesh(join_all(new_jobs(world_size), tls=True))


class Listener:
    """Listens in on a link: passes everything on and keeps it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(*self._listener.getsockname())
        self.heard = bytearray()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def listen_in(self, target: Endpoint) -> None:
        here, _ = self._listener.accept()
        self._listener.close()
        there = socket.create_connection(target)
        self._sockets = [here, there]
        for pair in ((here, there), (there, here)):
            thread = threading.Thread(target=self._pass, args=pair, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(20)
        for one in self._sockets:
            one.close()


@pytest.mark.parametrize("is_tls", [True, False])
def test_who_listens_in_hears_nothing_of_it_with_tls(is_tls, exchanged):
    words = b"the weights of the model"
    ear = Listener()
    jobs = new_jobs(2)
    ranks = [Rank(jobs[0], tls=is_tls, advertise=str(ear.endpoint)), Rank(jobs[1], tls=is_tls)]
    told = wait_for(lambda: exchanged and exchanged[0])
    assert told[0].port == ear.endpoint.port
    (port,) = listening().keys() - {told[1].port, ear.endpoint.port}
    ear.listen_in(Endpoint("127.0.0.1", port))
    ends = [rank.end() for rank in ranks]
    for rank in ends:
        assert rank.error is None, rank.error
    os.write(ends[0].neighbours[1].socket, words)
    os.set_blocking(ends[1].neighbours[0].socket, True)
    assert os.read(ends[1].neighbours[0].socket, 99) == words
    for rank in ends:
        close_peers(rank.neighbours)
    ear.close()
    assert (words in ear.heard) is not is_tls
    assert ear.heard.startswith(b"\x16\x03" if is_tls else b"frd1")


def test_ranks_that_do_not_agree_on_tls_are_told_so():
    jobs = new_jobs(2)
    ranks = [Rank(jobs[0], tls=True), Rank(jobs[1])]
    for rank in ranks:
        assert isinstance(rank.end().error, RendezvousError)
        for words in ("has FERRODIST_TLS=1", "has FERRODIST_TLS=0", "set it on all ranks or on no"):
            assert words in str(rank.error)


def test_strangers_do_not_keep_encrypted_ranks_from_each_other(halted, exchanged):
    ranks = [Rank(job, tls=True) for job in new_jobs(3)]
    told = wait_for(lambda: exchanged and exchanged[0])
    where = told[0].address, told[0].port
    with contextlib.ExitStack() as stack:
        for number in range(150):
            stranger = stack.enter_context(socket.create_connection(where))
            stranger.send(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else b"\x16\x03\x01\x02\x00\x01")
        halted.set()
        ends = [rank.end() for rank in ranks]
    check_mesh(ends)


def test_a_rank_without_cryptography_is_named_on_all(monkeypatch):
    make = mesh_builder._open_tls

    def refuse(secret: bytes) -> Tls:
        if threading.current_thread() is threading.main_thread():
            raise BackendUnavailable("no cryptography here")
        return make(secret)

    monkeypatch.setattr(mesh_builder, "_open_tls", refuse)
    jobs = new_jobs(2)
    other = Rank(jobs[1], tls=True)
    with pytest.raises(BackendUnavailable):
        join_mesh(jobs[0], Config(tls=True))
    assert "rank 0 gave up: BackendUnavailable" in str(other.end().error)
