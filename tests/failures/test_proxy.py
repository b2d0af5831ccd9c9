"""The fault proxy: bytes pass unchanged, and each fault strikes at the byte it names."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from ferrodist import InvalidArgument
from ferrodist.testing import FaultProxy, LinkFaults

pytestmark = pytest.mark.timeout(60)

LIMIT = 20.0  # seconds after which a socket that says nothing fails the test
DIRECTIONS = ["to_target", "from_target"]


class Ends:
    """A listener behind a proxy, and connections through it as pairs of sockets."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET, **faults: object) -> None:
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._stack = ExitStack()
        self.listener = self._stack.enter_context(socket.create_server((host, 0), family=family))
        target = self.listener.getsockname()[:2]
        self.proxy = self._stack.enter_context(
            FaultProxy(target, faults=LinkFaults(**faults), host=host)
        )

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = self._stack.enter_context(socket.create_connection(self.proxy.address, LIMIT))
        server = self._stack.enter_context(self.listener.accept()[0])
        server.settimeout(LIMIT)
        return client, server

    def by_direction(self, direction: str) -> tuple[socket.socket, socket.socket]:
        """Connect; return who sends in a direction and who receives."""
        client, server = self.connect()
        return (client, server) if direction == "to_target" else (server, client)


def read_exactly(one: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (part := one.recv(count - len(data))):
        data += part
    return bytes(data)


def read_to_end(one: socket.socket) -> tuple[bytes, str]:
    """Read until nothing more can come; say how it ended."""
    data = bytearray()
    try:
        while part := one.recv(1 << 16):
            data += part
    except ConnectionResetError:
        return bytes(data), "reset"
    return bytes(data), "end"


def is_silent(one: socket.socket) -> bool:
    """Tell whether there is nothing to read, not even an end."""
    one.settimeout(0)
    try:
        one.recv(1)
    except BlockingIOError:
        return True
    finally:
        one.settimeout(LIMIT)
    return False


@contextmanager
def sending(one: socket.socket, data: bytes) -> Iterator[list[OSError]]:
    """Send from a thread, as far as the other side lets it; give the error that ended it."""
    errors: list[OSError] = []

    def send() -> None:
        try:
            one.sendall(data)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield errors
    finally:
        thread.join(LIMIT)
        assert not thread.is_alive()


def bytes_of(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


# without faults


@pytest.mark.slow
def test_bytes_pass_unchanged_both_ways_on_several_connections():
    size, number = 25_000_000, 4  # 100 MB each way

    def talk(one: socket.socket, seed: int) -> str:
        with sending(one, bytes_of(seed, size)):
            return hashlib.sha256(read_exactly(one, size)).hexdigest()

    with Ends() as ends, ThreadPoolExecutor(2 * number) as pool:
        pairs = [ends.connect() for _ in range(number)]
        heard = {}
        for i, (client, server) in enumerate(pairs):
            heard[2 * i + 1] = pool.submit(talk, client, 2 * i)
            heard[2 * i] = pool.submit(talk, server, 2 * i + 1)
        for seed, digest in heard.items():
            assert digest.result(50) == hashlib.sha256(bytes_of(seed, size)).hexdigest()
        ends.proxy.wait_for_bytes(2 * number * size)
        assert ends.proxy.forwarded == (number * size, number * size)
        assert ends.proxy.connections == ends.proxy.open_connections == number


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_side_may_end_while_the_other_goes_on(direction):
    with Ends() as ends:
        one, other = ends.by_direction(direction)
        one.sendall(b"question")
        one.shutdown(socket.SHUT_WR)
        assert read_to_end(other) == (b"question", "end")
        other.sendall(b"answer")
        other.shutdown(socket.SHUT_WR)
        assert read_to_end(one) == (b"answer", "end")
        ends.proxy.wait_for_end(LIMIT)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_reset_of_one_side_is_a_reset_of_the_other_after_what_it_had_said(direction):
    data = bytes_of(1, 3_000_000)
    with Ends() as ends:
        one, other = ends.by_direction(direction)
        with sending(one, data):
            ends.proxy.wait_for_bytes(1)
        other.sendall(b"unread")  # so that close() is a reset
        ends.proxy.wait_for_bytes(len(b"unread"), LIMIT, direction=opposite(direction))
        one.close()
        heard, how = read_to_end(other)
        assert how == "reset"
        assert data.startswith(heard)
        ends.proxy.wait_for_end(LIMIT)


def fill(one: socket.socket) -> int:
    """Send until nothing more is taken; return how much was."""
    sent = 0
    one.settimeout(0.2)
    try:
        while True:
            sent += one.send(bytes(1 << 20))
    except TimeoutError:
        return sent
    finally:
        one.settimeout(LIMIT)


def test_sides_that_die_with_bytes_on_their_way_leave_no_connection_open():
    with Ends() as ends:
        client, server = ends.connect()
        client.sendall(bytes(400_000))
        server.sendall(bytes(400_000))
        ends.proxy.wait_for_bytes(800_000, LIMIT)
        client.close()
        server.close()
        ends.proxy.wait_for_end(LIMIT)


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_sides_that_die_with_bytes_unread_leave_no_connection_open(delay):
    with Ends(delay=delay) as ends:
        client, server = ends.connect()
        fill(client), fill(server)
        client.close()
        server.close()
        ends.proxy.wait_for_end(LIMIT)


def die(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


def test_a_reset_that_writing_meets_first_is_a_reset_after_what_was_said():
    with Ends() as ends:
        client, server = ends.connect()
        fill(server)  # so that the proxy does not read from it
        die(server)
        client.sendall(b"hello?")
        heard, how = read_to_end(client)
        assert len(heard) == ends.proxy.forwarded.from_target > 0
        assert how == "reset"


def test_a_reset_behind_an_end_is_a_reset():
    with Ends() as ends:
        client, server = ends.connect()
        server.shutdown(socket.SHUT_WR)
        assert read_to_end(client) == (b"", "end")
        die(server)
        client.sendall(b"hello?")
        ends.proxy.wait_for_end(LIMIT)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.EPIPE


def test_a_slow_reader_stops_the_sender_and_nothing_piles_up():
    with Ends() as ends:
        client, server = ends.connect()
        sent = fill(client)
        assert sent < 40_000_000  # what the proxy and the kernels hold
        client.shutdown(socket.SHUT_WR)
        assert len(read_to_end(server)[0]) == sent


def test_a_target_that_refuses_is_a_reset():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with FaultProxy(address) as proxy, pytest.raises(ConnectionResetError):
        with socket.create_connection(proxy.address, LIMIT) as client:  # may hear of it at once
            client.recv(1)


def test_hosts_may_speak_ipv6():
    with Ends(socket.AF_INET6) as ends:
        client, server = ends.connect()
        client.sendall(b"hello")
        assert read_exactly(server, 5) == b"hello"
        assert ends.proxy.address[0] == "::1"


# faults at a byte


def opposite(direction: str) -> str:
    return DIRECTIONS[1 - DIRECTIONS.index(direction)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [0, 1, 65_536, 300_001])
def test_cut_after_ends_both_sides_cleanly_at_that_byte(direction, count):
    data = bytes_of(count, 10_000_000)
    with Ends(cut_after=count, direction=direction) as ends:
        one, other = ends.by_direction(direction)
        with sending(one, data) as errors:
            assert read_to_end(other) == (data[:count], "end")
            assert read_to_end(one) == (b"", "end")
        assert errors == []  # it has all been taken, and thrown away
        ends.proxy.wait_for_bytes(count, LIMIT)
        assert sum(ends.proxy.forwarded) == count


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 65_536, 3_000_001])
def test_reset_after_resets_both_sides_at_that_byte(direction, count):
    data = bytes_of(count, 10_000_000)
    with Ends(reset_after=count, direction=direction) as ends:
        one, other = ends.by_direction(direction)
        with sending(one, data) as errors:
            assert read_to_end(other) == (data[:count], "reset")
        if errors:
            assert isinstance(errors[0], ConnectionResetError)
        else:  # all of it had fitted into the buffers
            assert read_to_end(one) == (b"", "reset")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [0, 1, 65_536, 300_001])
def test_freeze_after_stops_both_ways_at_that_byte_and_leaves_the_sockets_open(direction, count):
    data = bytes_of(count, 400_000)
    with Ends(freeze_after=count, direction=direction) as ends:
        one, other = ends.by_direction(direction)
        with sending(one, data):
            assert read_exactly(other, count) == data[:count]
            other.sendall(b"not heard")
            assert ends.proxy.connections == 1  # the thread has looked at all sockets since
            assert ends.proxy.forwarded == ((count, 0) if direction == "to_target" else (0, count))
            assert is_silent(other)
            ends.proxy.thaw()
            assert read_exactly(other, len(data) - count) == data[count:]
        assert read_exactly(one, 9) == b"not heard"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 300_001])
def test_flip_after_flips_the_seeded_bit_of_that_byte_and_no_other(direction, count):
    data = bytes_of(count, 400_000)
    faults = LinkFaults(seed=count, flip_after=count, direction=direction)
    with Ends(seed=count, flip_after=count, direction=direction) as ends:
        for _ in range(2):  # every connection, and alike
            one, other = ends.by_direction(direction)
            with sending(one, data), sending(other, data):
                damaged, whole = read_exactly(other, len(data)), read_exactly(one, len(data))
            assert whole == data
            changed = [i for i in range(len(data)) if damaged[i] != data[i]]
            assert changed == [count]
            assert damaged[count] ^ data[count] == 1 << faults.flipped_bit(direction)


@pytest.mark.parametrize("fault", ["cut_after", "reset_after", "freeze_after", "flip_after"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bytes_of_the_other_direction_do_not_count(fault, direction):
    data = bytes_of(3, 200_000)
    with Ends(direction=direction, **{fault: 10}) as ends:
        one, other = ends.by_direction(opposite(direction))
        with sending(one, data):
            assert read_exactly(other, len(data)) == data


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_without_a_direction_both_count_apart(direction):
    with Ends(cut_after=10) as ends:
        one, other = ends.by_direction(direction)
        one.sendall(b"123456789")
        other.sendall(b"abcdefghi")
        assert (read_exactly(other, 9), read_exactly(one, 9)) == (b"123456789", b"abcdefghi")
        one.sendall(b"0 and no more")
        assert read_to_end(other) == (b"0", "end")
        assert read_to_end(one) == (b"", "end")


def test_reset_after_nothing_resets_at_once():
    with Ends(reset_after=0) as ends, pytest.raises(ConnectionResetError):
        ends.connect()[0].recv(1)


def test_freeze_after_strikes_a_connection_once():
    with Ends(freeze_after=5) as ends:
        client, server = ends.connect()
        client.sendall(b"hello world")
        assert read_exactly(server, 5) == b"hello"
        ends.proxy.thaw()
        server.sendall(b"goodbye")
        assert read_exactly(server, 6) == b" world"
        assert read_exactly(client, 7) == b"goodbye"


def test_every_connection_is_counted_apart():
    with Ends(cut_after=5, direction="to_target") as ends:
        for _ in range(3):
            client, server = ends.connect()
            client.sendall(b"hello world")
            assert read_to_end(server) == (b"hello", "end")


def test_faults_at_several_bytes_strike_in_turn():
    with Ends(freeze_after=3, reset_after=6, flip_after=0, direction="to_target") as ends:
        client, server = ends.connect()
        client.sendall(b"\0bcdefgh")
        first = read_exactly(server, 3)
        assert first == bytes([1 << ends.proxy.faults.flipped_bit("to_target")]) + b"bc"
        assert ends.proxy.connections == 1
        assert is_silent(server)
        ends.proxy.thaw()
        assert read_to_end(server) == (b"def", "reset")


# slow links


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_delay_holds_everything_back_in_order_and_the_end_too(direction):
    with Ends(delay=0.2, direction=direction) as ends:
        one, other = ends.by_direction(direction)
        start = time.monotonic()
        for letter in (b"a", b"b", b"c"):
            one.sendall(letter)
        one.shutdown(socket.SHUT_WR)
        assert read_exactly(other, 1) == b"a"
        assert time.monotonic() - start >= 0.2  # a link may be slower, never quicker
        assert read_to_end(other) == (b"bc", "end")


def test_jitter_keeps_the_order():
    data = bytes_of(5, 2_000_000)
    with Ends(seed=5, jitter=0.02) as ends:
        client, server = ends.connect()
        with sending(client, data), sending(server, data[::-1]):
            assert read_exactly(server, len(data)) == data
            assert read_exactly(client, len(data)) == data[::-1]


def test_rate_is_never_exceeded():
    size, rate = 60_000, 200_000
    with Ends(rate=rate, direction="to_target") as ends:
        client, server = ends.connect()
        start = time.monotonic()
        with sending(client, bytes(size)):
            read_exactly(server, size)
        assert time.monotonic() - start >= 0.9 * size / rate
        server.sendall(bytes(size))  # the other way is free
        assert len(read_exactly(client, size)) == size


# by order


def test_freeze_holds_old_and_new_connections_until_thaw():
    with Ends() as ends:
        old = ends.connect()
        ends.proxy.freeze()
        new_client = socket.create_connection(ends.proxy.address, LIMIT)
        with new_client, ends.listener.accept()[0] as new_server:
            new_server.settimeout(LIMIT)
            old[0].sendall(b"old")
            new_client.sendall(b"new")
            for _ in range(3):  # each time the thread looks at all sockets: connect, read, write
                assert ends.proxy.connections == 2
            assert is_silent(old[1])
            assert is_silent(new_server)
            ends.proxy.thaw()
            assert read_exactly(old[1], 3) == b"old"
            assert read_exactly(new_server, 3) == b"new"


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(("order", "end"), [("cut", "end"), ("reset", "reset")])
def test_an_order_strikes_every_connection_and_the_next_one_works(order, end, is_frozen):
    with Ends() as ends:
        pairs = [ends.connect() for _ in range(3)]
        if is_frozen:
            ends.proxy.freeze()
        getattr(ends.proxy, order)()
        for one in sum(pairs, ()):
            assert read_to_end(one) == (b"", end)
            one.close()
        ends.proxy.wait_for_end(LIMIT)
        ends.proxy.thaw()
        client, server = ends.connect()
        client.sendall(b"again")
        assert read_exactly(server, 5) == b"again"


def test_an_order_also_means_a_connection_made_just_before():
    for _ in range(50):
        with Ends() as ends, socket.create_connection(ends.proxy.address, LIMIT) as client:
            ends.proxy.reset()
            assert read_to_end(client) == (b"", "reset")


def test_waiting_for_bytes_that_do_not_come_says_how_many_came():
    with Ends() as ends:
        client, _server = ends.connect()
        client.sendall(b"12345")
        ends.proxy.wait_for_bytes(5, LIMIT, direction="to_target")
        with pytest.raises(TimeoutError, match=r"0 of 1 bytes \(from_target\) after 0.01 s"):
            ends.proxy.wait_for_bytes(1, 0.01, direction="from_target")
        with pytest.raises(TimeoutError, match="1 connections open"):
            ends.proxy.wait_for_end(0.01)


# resources, choices, arguments


def open_files() -> set[str]:
    gc.collect()  # what earlier tests have left
    return {f"{name} {os.readlink(f'/proc/self/fd/{name}')}" for name in listed_files()}


def listed_files() -> list[str]:
    return [
        name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")
    ]


def test_many_connections_leave_no_thread_and_no_file():
    files, threads = open_files(), threading.enumerate()
    with Ends() as ends:
        idle = len(open_files())
        for number in range(500):
            client, server = ends.connect()
            client.sendall(b"ping")
            assert read_exactly(server, 4) == b"ping"
            (client, server)[number % 2].close()
            assert read_to_end((server, client)[number % 2]) == (b"", "end")
            (server, client)[number % 2].close()
        ends.proxy.wait_for_end(LIMIT)
        assert ends.proxy.connections == 500
        assert len(open_files()) == idle
        for _ in range(20):  # these are closed with the proxy
            ends.connect()
    assert open_files() == files
    assert threading.enumerate() == threads


def test_closing_ends_frozen_and_full_connections():
    before = open_files()
    with Ends() as ends:
        client, server = ends.connect()
        ends.proxy.freeze()
        ends.proxy.close()
        assert read_to_end(client) == read_to_end(server) == (b"", "end")
        ends.proxy.close()
        ends.proxy.reset()  # nothing left to strike
    assert open_files() == before


def use_up_files(spare: ExitStack) -> None:
    with suppress(OSError):
        while True:
            spare.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def test_a_process_out_of_files_accepts_again_when_it_has_some():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Ends() as ends, socket.socket() as client, ExitStack() as spare:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(listed_files()) + 60, hard))
        try:
            use_up_files(spare)
            client.settimeout(LIMIT)
            client.connect(ends.proxy.address)
            assert ends.proxy.connections == 0
            spare.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with ends.listener.accept()[0] as server:
            client.sendall(b"hello")
            assert read_exactly(server, 5) == b"hello"


def test_choices_depend_on_seed_and_direction_alone():
    faults = [LinkFaults(seed=seed, delay=1, jitter=2) for seed in range(50)]
    bits = [one.flipped_bit(way) for one in faults for way in DIRECTIONS]
    assert bits == [one.flipped_bit(way) for one in faults for way in DIRECTIONS]
    assert set(bits) == set(range(8))
    lags = [one.lag("to_target", block * 65_536) for one in faults for block in range(20)]
    assert all(1 <= lag < 3 for lag in lags)
    assert len(set(lags)) == len(lags)
    assert faults[3].lag("to_target", 0) == faults[3].lag("to_target", 65_535)
    assert faults[0].flipped_bit("to_target") == 4  # the same on every machine
    assert faults[0].lag("to_target", 0) == pytest.approx(1.354114)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({"delay": -1}, "delay=-1: expected seconds"),
        ({"jitter": float("nan")}, "jitter=nan"),
        ({"rate": 0}, "rate=0: expected bytes per second"),
        ({"cut_after": -1}, "cut_after=-1: expected a number of bytes"),
        ({"flip_after": 0.5}, "flip_after=0.5"),
        ({"direction": "up"}, "direction='up': expected one of both, to_target, from_target"),
    ],
)
def test_faults_that_mean_nothing_are_refused(faults, text):
    with pytest.raises(InvalidArgument, match=text):
        LinkFaults(**faults)
