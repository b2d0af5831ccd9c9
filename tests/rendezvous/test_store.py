"""The store that rank 0 keeps while ranks meet: set once, wait, count; everything bounded."""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ferrodist import InvalidArgument, ProtocolError, RendezvousError
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job, store
from ferrodist.rendezvous.client import Client
from ferrodist.rendezvous.server import Server
from ferrodist.rendezvous.sockets import UnixPoint
from ferrodist.rendezvous.store import StoreTable
from ferrodist.rendezvous.wire import MAX_VALUE, MessageKind

pytestmark = pytest.mark.timeout(60)


def new_jobs(world_size: int) -> list[Job]:
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)
    return [Job(name, rank, world_size, secret) for rank in range(world_size)]


@pytest.fixture
def run() -> Iterator[Callable[..., list[Any]]]:
    """Give what runs one function per rank, rank 0's in this thread, and returns what they do."""
    pool = ThreadPoolExecutor(max_workers=40)

    def run(*functions: Callable[[Any], Any]) -> list[Any]:
        jobs, deadline = new_jobs(len(functions)), Deadline(20)
        server = Server(jobs[0], UnixPoint(jobs[0]), deadline)

        def client(job: Job, function: Callable[[Client], Any]) -> Any:
            way = Client(job, UnixPoint(job), deadline)
            way.join()
            try:
                result = function(way)
                way.leave()
                return result
            finally:
                way.close()

        clients: list[Future[Any]] = [
            pool.submit(client, job, function)
            for job, function in zip(jobs[1:], functions[1:], strict=True)
        ]
        try:
            own = functions[0](server)
            server.leave()
        except BaseException as error:
            server.give_up(error)
            raise
        finally:
            server.close()
        return [own, *(one.result(20) for one in clients)]

    yield run
    pool.shutdown(wait=False)


def nothing(_: Any) -> None:
    return None


def test_what_one_rank_sets_the_others_get(run):
    results = run(
        lambda server: server.get("b", 10),
        lambda client: client.set("a", b"from 1") or client.get("b", 10),
        lambda client: client.set("b", b"from 2") or client.get("a", 10),
    )
    assert results == [b"from 2", b"from 2", b"from 1"]


def test_a_get_waits_for_the_set(run):
    is_waiting = threading.Event()

    def late(server: Server) -> None:
        server.serve_until(lambda: len(server._waits) == 1)
        is_waiting.set()
        server.set("key", b"late")

    assert run(late, lambda client: client.get("key", 10))[1] == b"late"
    assert is_waiting.is_set()


def test_a_get_ends_at_its_time_and_the_link_goes_on(run):
    def ask(client: Client) -> bytes:
        with pytest.raises(RendezvousError, match="nobody has set 'key' in the store within "):
            client.get("key", 0.05)
        client.set("key", b"now")
        return client.get("key", 10)

    assert run(nothing, ask)[1] == b"now"


def test_rank_0_waits_no_longer_than_it_is_asked_to(run):
    def ask(server: Server) -> None:
        with pytest.raises(RendezvousError, match="nobody has set 'key'"):
            server.get("key", 0.05)

    run(ask, nothing)


def test_a_key_is_set_once(run):
    def twice(client: Client) -> None:
        client.set("key", b"one")
        client.set("key", b"one")
        with pytest.raises(InvalidArgument, match="key 'key' of the store has a value of 3 bytes"):
            client.set("key", b"other")
        assert client.get("key", 10) == b"one"

    run(nothing, twice)


def test_counting_ranks_get_different_numbers(run):
    results = run(nothing, *[lambda client: client.add("count", 1)] * 8)
    assert sorted(results[1:]) == list(range(1, 9))


def test_a_count_is_a_value_too(run):
    def count(client: Client) -> bytes:
        assert client.add("count", 5) == 5
        assert client.add("count", -7) == -2
        client.set("text", b"no number")
        with pytest.raises(InvalidArgument, match="'text' of the store is not a number"):
            client.add("text", 1)
        return client.get("count", 10)

    assert run(nothing, count)[1] == b"-2"


def test_the_largest_value_passes_to_all_at_once(run):
    value = secrets.token_bytes(MAX_VALUE)
    results = run(
        lambda server: server.set("key", value),
        *[lambda client: client.get("key", 10) == value] * 8,
    )
    assert results[1:] == [True] * 8


def test_what_is_too_large_is_refused_before_it_is_sent(run):
    def ask(client: Client) -> None:
        with pytest.raises(InvalidArgument, match="at most 65536 bytes, got 65537"):
            client.set("key", bytes(MAX_VALUE + 1))
        for key in ("", "k" * 257):
            for call in (lambda key: client.set(key, b""), lambda key: client.get(key, 1)):
                with pytest.raises(InvalidArgument, match="1 to 256 bytes"):
                    call(key)
            with pytest.raises(InvalidArgument, match="1 to 256 bytes"):
                client.add(key, 1)
        client.set("k" * 256, b"")

    run(nothing, ask)


def test_the_number_of_entries_is_bounded(monkeypatch):
    monkeypatch.setattr(store, "_MAX_ENTRIES", 2)
    table = StoreTable()
    table.set("a", b"")
    table.add("b", 1)
    for call in (lambda: table.set("c", b""), lambda: table.add("c", 1)):
        with pytest.raises(InvalidArgument, match="the store is full, with 2 keys"):
            call()
    assert table.add("b", 1) == 2


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessageKind.SET, b"\x00"),
        (MessageKind.SET, b"\x00\x01\xff"),
        (MessageKind.GET, b"123"),
        (MessageKind.ADD, b"1"),
    ],
)
def test_requests_that_cannot_be_read_are_an_error_of_the_protocol(run, kind, body):
    def ask(client: Client) -> None:
        link = client.channel
        link.send(kind, body)
        with pytest.raises(ProtocolError):
            client.get("key", 10)

    with pytest.raises(ProtocolError, match="a request to the store that cannot be decoded"):
        run(lambda server: server.get("key", 10), ask)


BOUNDS = {
    MessageKind.SET: 2 + 256 + 65536,
    MessageKind.GET: 8 + 256,
    MessageKind.ADD: 8 + 256,
    MessageKind.LEAVE: 0,
}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("excess", [1, (1 << 32) - 1])
def test_a_length_that_cannot_be_is_refused_of_a_rank_that_has_proved_itself(run, kind, excess):
    length = min(BOUNDS[kind] + excess, (1 << 32) - 1)

    def ask(client: Client) -> None:
        client.channel.socket.send(struct.pack("!4sBI", b"frd1", kind, length))
        with pytest.raises(ProtocolError):
            client.get("key", 10)

    with pytest.raises(ProtocolError, match="got bytes that are no such message"):
        run(lambda server: server.get("key", 10), ask)


def test_a_rank_that_leaves_without_a_word_is_named(run):
    with pytest.raises(RendezvousError, match=r"rank 1 \(pid \d+\) ended or gave up before all"):
        run(lambda server: server.get("key", 10), lambda client: client.close())


@pytest.mark.parametrize("world_size", [2, 3, 39])
def test_gathering_gives_every_rank_the_values_of_all_in_order(run, world_size, monkeypatch):
    monkeypatch.setattr(store, "_PER_VALUE", 16)  # so that one message does not hold all
    jobs = new_jobs(world_size)

    def share(job: Job) -> Callable[[Any], list[bytes]]:
        value = bytes([job.rank]) * job.rank
        return lambda way: store.gather(way, job, value, Deadline(20))

    expected = [bytes([rank]) * rank for rank in range(world_size)]
    assert run(*map(share, jobs)) == [expected] * world_size


def test_a_rank_that_tells_too_much_says_so():
    job = new_jobs(2)[1]
    with pytest.raises(RendezvousError, match="rank 1 has 1025 bytes to tell"):
        store.gather(StoreTable(), job, bytes(1025), Deadline(1))


def test_ranks_that_make_different_backends_are_told_so_on_all(run):
    from ferrodist.rendezvous import meet

    jobs = new_jobs(2)
    errors: list[Exception] = []

    def other() -> None:
        try:
            meet(jobs[1], 0, 20.0)
        except RendezvousError as error:
            errors.append(error)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    server = Server(jobs[0], UnixPoint(jobs[0]), Deadline(20))
    try:
        with pytest.raises(RendezvousError, match="do not make the same backend"):
            server.serve_until(server.is_full)
    finally:
        server.close()
    thread.join(20)
    assert "rank 1 (pid" in str(errors[0])
    assert "do not make the same backend" in str(errors[0])
