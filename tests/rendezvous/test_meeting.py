"""Ranks meet at rank 0 and tell each other a record: in order, bounded, and all or none."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ferrodist import ProtocolError, RendezvousError
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job, meet, meeting, wire
from ferrodist.rendezvous.exchange import StoreExchange
from ferrodist.rendezvous.meeting import Client, Server
from ferrodist.rendezvous.sockets import UnixPoint
from ferrodist.rendezvous.watch import close_files
from ferrodist.rendezvous.wire import MAX_RECORD, MessageKind

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
                return function(way)
            finally:
                way.close()

        clients: list[Future[Any]] = [
            pool.submit(client, job, function)
            for job, function in zip(jobs[1:], functions[1:], strict=True)
        ]
        try:
            own = functions[0](server)
        except BaseException as error:  # as Server.__exit__ does, which tells the clients of any
            server.give_up(error)
            raise
        finally:
            server.close()
        return [own, *(one.result(20) for one in clients)]

    yield run
    pool.shutdown()  # their files are closed before the next test looks


@pytest.mark.parametrize("world_size", [2, 3, 39])
def test_gathering_gives_every_rank_the_values_of_all_in_order(run, world_size, monkeypatch):
    monkeypatch.setattr(wire, "RANKS_PER_ROSTER", 16)  # so that one message does not hold all

    def share(rank: int) -> Callable[[Any], list[bytes]]:
        return lambda way: way.gather(bytes([way._job.rank]) * rank)

    expected = [bytes([rank]) * rank for rank in range(world_size)]
    assert run(*map(share, range(world_size))) == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 9, 20])
def test_the_roster_takes_one_round_trip_for_each_part_however_many_ranks(
    run, world_size, monkeypatch
):
    """No rank answers before all have got what is to be answered: else this would not end."""
    monkeypatch.setattr(wire, "RANKS_PER_ROSTER", 7)
    num_parts = -(-world_size // 7)
    have_all = threading.Barrier(world_size - 1, timeout=10)

    def answer_late(client: Client) -> int:
        channel, deadline = client.channel, Deadline(20)
        channel.send(MessageKind.RECORD, b"x")
        for _ in range(num_parts):
            wire.run_steps(wire.receive_answer(channel, MessageKind.ROSTER), channel, deadline)
            have_all.wait()
            channel.send(MessageKind.TAKEN)
        wire.run_steps(wire.receive_answer(channel, MessageKind.GO), channel, deadline)
        return num_parts

    ranks = [lambda server: len(server.gather(b"0")), *[answer_late] * (world_size - 1)]
    assert run(*ranks) == [world_size, *[num_parts] * (world_size - 1)]


def test_a_rank_that_leaves_while_others_take_the_roster_is_named(run):
    """Rank 1 never answers: it is not waited for when rank 2 is gone."""
    is_over = threading.Event()

    def tell_and(client: Client) -> None:
        channel = client.channel
        channel.send(MessageKind.RECORD, b"x")
        wire.run_steps(wire.receive_answer(channel, MessageKind.ROSTER), channel, Deadline(20))
        if client._job.rank == 1:
            is_over.wait(20)

    def gather(server: Server) -> str:
        with pytest.raises(RendezvousError) as caught:
            server.gather(b"0")
        is_over.set()
        return f"rank {caught.value.rank}"

    assert run(gather, tell_and, tell_and)[0] == "rank 2"


def test_the_files_of_a_roster_are_in_flight_to_one_rank_at_a_time(monkeypatch):
    """The kernel bounds how many a user may have in flight."""
    events: list[str] = []
    send, receive = wire.Channel.send, meeting.receive_answer

    def sent(channel: wire.Channel, kind: MessageKind, *rest: Any) -> None:
        if kind is MessageKind.ROSTER:
            events.append("sent")
        send(channel, kind, *rest)

    def received(channel: wire.Channel, *kinds: MessageKind) -> wire.Steps[wire.Message]:
        message = yield from receive(channel, *kinds)
        if kinds == (MessageKind.TAKEN,) and events:
            events.append("taken")
        return message

    monkeypatch.setattr(wire.Channel, "send", sent)
    monkeypatch.setattr(meeting, "receive_answer", received)
    with ThreadPoolExecutor(5) as pool, open(os.devnull) as file:
        members = list(pool.map(lambda job: meet(job, file.fileno(), 20), new_jobs(5)))
    close_files(file for world in members for one in world for file in (one.arena, one.watch))
    assert events == ["sent", "taken"] * 4


def test_the_largest_records_of_all_fit_into_one_message(run):
    values = [secrets.token_bytes(MAX_RECORD) for _ in range(wire.RANKS_PER_ROSTER // 2)]
    share = [lambda way: way.gather(values[way._job.rank])] * len(values)
    assert run(*share) == [values] * len(values)


def test_a_rank_that_tells_too_much_says_so(run):
    def tell(way: Any) -> None:
        with pytest.raises(RendezvousError, match=f"rank {way._job.rank} has 1025 bytes to tell"):
            way.gather(bytes(1025))

    run(lambda server: server.serve_until(server.is_full) or tell(server), tell)
    tell(StoreExchange(new_jobs(2)[1], None, Deadline(1)))


def test_a_rank_that_tells_nothing_is_named_when_its_time_is_up():
    jobs = new_jobs(2)
    thread_job = Client(jobs[1], UnixPoint(jobs[1]), Deadline(10))
    thread = threading.Thread(target=thread_job.join, daemon=True)
    with Server(jobs[0], UnixPoint(jobs[0]), Deadline(0.5)) as server:
        thread.start()
        with pytest.raises(RendezvousError, match=r"rank 1 \(pid \d+\) joined job .* and then did"):
            server.gather(b"0")
    thread.join(10)
    thread_job.close()


BOUNDS = {MessageKind.RECORD: MAX_RECORD, MessageKind.FAILURE: 1 << 16}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("excess", [1, (1 << 32) - 1])
def test_a_length_that_cannot_be_is_refused_of_a_rank_that_has_proved_itself(run, kind, excess):
    length = min(BOUNDS[kind] + excess, (1 << 32) - 1)

    def ask(client: Client) -> None:
        client.channel.socket.send(struct.pack("!4sBI", b"frd1", kind, length))
        with pytest.raises(ProtocolError):
            client.gather(b"")

    with pytest.raises(ProtocolError, match="got bytes that are no such message"):
        run(lambda server: server.gather(b""), ask)


def test_a_rank_tells_its_record_once(run):
    def ask(client: Client) -> None:
        client.channel.send(MessageKind.RECORD, b"one")
        with pytest.raises(ProtocolError):
            client.gather(b"other")

    is_over = threading.Event()
    with pytest.raises(ProtocolError, match="expected FAILURE, got bytes that are no such"):
        run(lambda server: server.gather(b""), ask, lambda client: is_over.wait(20))
    is_over.set()


def test_a_rank_that_leaves_without_a_word_is_named(run):
    with pytest.raises(RendezvousError, match=r"rank 1 \(pid \d+\) ended or gave up before all"):
        run(lambda server: server.gather(b""), lambda client: client.close())


def test_ranks_that_make_different_backends_are_told_so_on_all():
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


def test_a_rank_that_fails_while_the_roster_goes_round_is_named():
    job = new_jobs(2)[1]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send_failure(wire.Channel(theirs), RendezvousError("no port is free", rank=1), job)
        steps = meeting._send_roster(wire.Channel(ours), [wire.RosterEntry(0, 1, b"", [])])
        with pytest.raises(RendezvousError, match="no port is free") as caught:
            wire.run_steps(steps, wire.Channel(ours), Deadline(10))
        assert caught.value.rank == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_rank_that_may_open_no_more_files_tells_the_others_how_many_are_needed(
    number, monkeypatch
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    job = new_jobs(16)[3]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send_failure(wire.Channel(theirs), OSError(number, os.strerror(number)), job)
        steps = wire.receive_answer(wire.Channel(ours), MessageKind.GO)
        with pytest.raises(RendezvousError, match="rank 3 could not join job") as caught:
            wire.run_steps(steps, wire.Channel(ours), Deadline(10))
    assert "each of 16 ranks needs about 112; 'ulimit -n 112' in the shell" in str(caught.value)
    assert caught.value.rank == 3


def test_a_rank_that_takes_the_roster_before_it_is_waited_for_is_not_waited_for(monkeypatch):
    jobs = new_jobs(2)
    server = Server(jobs[0], UnixPoint(jobs[0]), Deadline(20))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server._clients[1] = meeting._JoinedRank(wire.Channel(ours), 1, 0, "pid 1")
        wire.Channel(theirs).send(MessageKind.TAKEN)
        monkeypatch.setattr(server._selector, "select", pytest.fail)
        server._hand_out([wire.RosterEntry(rank, 1, b"", []) for rank in range(2)])
    server.close()
