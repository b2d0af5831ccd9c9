"""The ranks of a job find each other, prove themselves, and name what keeps them from it."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ferrodist import AuthenticationError, InvalidArgument, ProtocolError, RendezvousError
from ferrodist.config import Config, DefaultTimeout
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import (
    Job,
    Member,
    errors,
    handshake,
    meet,
    meeting,
    watch,
)
from ferrodist.rendezvous.handshake import greet_server
from ferrodist.rendezvous.job import Endpoint
from ferrodist.rendezvous.launchers import PLAIN, TORCHRUN
from ferrodist.rendezvous.sockets import UnixPoint, unix_address
from ferrodist.rendezvous.watch import StatusBoard
from ferrodist.rendezvous.wire import (
    HELLO,
    Channel,
    MessageKind,
    RosterEntry,
    close_roster,
    pack_roster,
    run_steps,
    unpack_roster,
)

pytestmark = pytest.mark.timeout(60)

is_root = os.geteuid() == 0


def new_jobs(world_size: int) -> list[Job]:
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)
    return [Job(name, rank, world_size, secret) for rank in range(world_size)]


class Rank(threading.Thread):
    """One rank in a thread: meets the others and keeps the members, or the error."""

    def __init__(self, job: Job, timeout: float = 20.0) -> None:
        super().__init__(daemon=True)
        self.job, self.timeout = job, timeout
        self.members: list[Member] = []
        self.error: Exception | None = None
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        arena = os.memfd_create("test")
        os.write(arena, f"arena {self.job.rank}".encode())
        start = time.monotonic()
        try:
            self.members = meet(self.job, arena, self.timeout)
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            self.error = error
        self.seconds = time.monotonic() - start
        os.close(arena)

    def end(self) -> Rank:
        self.join(40)
        assert not self.is_alive()
        return self


def meet_all(jobs: list[Job], timeout: float = 20.0) -> list[Rank]:
    ranks = [Rank(job, timeout) for job in jobs]
    return [rank.end() for rank in ranks]


def close_members(*ranks: Rank) -> None:
    for rank in ranks:
        for member in rank.members:
            os.close(member.arena)
            os.close(member.watch)


def check_met(ranks: list[Rank]) -> None:
    """Check that every rank has everybody's files, and close them."""
    for rank in ranks:
        assert rank.error is None, rank.error
        assert [member.rank for member in rank.members] == list(range(len(ranks)))
        for member in rank.members:
            assert os.pread(member.arena, 20, 0) == f"arena {member.rank}".encode()
            assert member.pid == os.getpid()
            assert not is_readable(member.watch)
            assert not os.get_inheritable(member.arena)
            assert not os.get_inheritable(member.watch)
    close_members(*ranks)


def is_readable(file: int, seconds: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


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
    while (connection := UnixPoint(job).try_connect()) is None:
        assert deadline.remaining() > 0
    link = Channel(connection)
    try:
        yield link
    finally:
        link.close()


def join_by_hand(link: Channel, job: Job) -> None:
    """Become a client, and do nothing more."""
    run_steps(greet_server(link, job), link, Deadline(10))
    arena = os.memfd_create("test")
    lifeline = watch.Lifeline()
    link.send(MessageKind.HELLO, HELLO.pack(os.getpid(), 20.0, 20.0, True))
    run_steps(link.receive(MessageKind.TAKEN), link, Deadline(10))
    link.send(MessageKind.RECORD, b"", [arena, lifeline.watch])
    lifeline.close()
    os.close(arena)


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 40])
def test_every_rank_gets_the_files_of_all(world_size):
    check_met(meet_all(new_jobs(world_size)))


def test_two_jobs_at_once_do_not_disturb_each_other():
    ranks = [[Rank(job) for job in new_jobs(3)] for _ in range(2)]
    for one in ranks:
        check_met([rank.end() for rank in one])


def test_the_address_is_free_again_afterwards():
    jobs = new_jobs(2)
    for _ in range(3):
        check_met(meet_all(jobs))


def test_a_repr_does_not_show_the_secret():
    (job,) = new_jobs(1)
    assert "secret" not in repr(job)
    assert repr(job.secret) not in repr(job)


@pytest.mark.parametrize("change", [{"secret": b"short"}, {"rank": 2}, {"world_size": 0}])
def test_a_job_that_cannot_be_is_refused(change):
    facts = {"name": "x", "rank": 0, "world_size": 2, "secret": bytes(32)} | change
    with pytest.raises(InvalidArgument):
        Job(**facts)


# -- ranks that do not come, or come twice ----------------------------------------------------


def test_missing_ranks_are_named_on_every_rank_that_came():
    jobs = new_jobs(4)
    ranks = meet_all([jobs[0], jobs[2]], timeout=0.5)
    for rank in ranks:
        assert isinstance(rank.error, RendezvousError)
        assert rank.error.missing == [1, 3]
        text = str(rank.error)
        assert "rank 1, rank 3 of 4 did not join" in text
        assert f"here: rank 0 (pid {os.getpid()}), rank 2 (pid {os.getpid()})" in text
        assert rank.seconds < 1.0


def test_a_rank_that_comes_alone_is_told_how_to_start_all():
    for launcher in (PLAIN, TORCHRUN):
        job = replace(new_jobs(4)[0], launcher=launcher)
        text = str(Rank(job, timeout=0.1).end().error)
        assert f"rank 1, rank 2, rank 3 of 4 did not join job {job.name!r} within 0.1 s" in text
        assert f"WORLD_SIZE=4 is from {launcher.name}\n" in text
        assert "only this process was started, or the others do not call ferrodist.init()" in text
        assert (
            f"has to: {launcher.how_to_start(4)}. If a rank has started this process, RANK" in text
        )
    assert PLAIN.how_to_start(4) == (
        "start one process per rank, with RANK=0 to RANK=3, or all of them with 'ferrodist run "
        "-n 4 script.py'"
    )


def test_ranks_that_may_be_on_other_hosts_are_told_what_they_need():
    job = replace(new_jobs(2)[0], endpoint=Endpoint("10.0.0.1", 29500), has_secret=False)
    words = "if they are on other hosts, all ranks need FERRODIST_SECRET_FILE"
    assert words in str(Rank(job, timeout=0.1).end().error)
    for other in (replace(job, endpoint=Endpoint("localhost", 1)), replace(job, has_secret=True)):
        assert words not in str(Rank(other, timeout=0.1).end().error)


def test_a_guest_with_less_time_hears_the_reasons_too():
    jobs = new_jobs(3)
    ranks = [Rank(jobs[0], timeout=30.0), Rank(jobs[1], timeout=0.5)]
    for rank in ranks:
        assert rank.end().error.missing == [2]
        assert rank.seconds < 1.0


def test_rank_0_missing_is_said_by_the_others():
    jobs = new_jobs(3)
    for rank in meet_all(jobs[1:], timeout=0.3):
        assert isinstance(rank.error, RendezvousError)
        assert rank.error.missing == [0]
        assert repr(jobs[0].name) in str(rank.error)
        assert unix_address(jobs[0].name) in str(rank.error)
        assert f"this is rank {rank.job.rank} of 3, pid {os.getpid()} (the program" in str(
            rank.error
        )
        assert "look at the output of rank 0" in str(rank.error)
        assert rank.seconds < 1.0


def test_a_second_process_of_one_rank_is_refused_and_the_job_goes_on(admitted):
    jobs = [replace(job, launcher=PLAIN) for job in new_jobs(3)]
    first = [Rank(jobs[0]), Rank(jobs[1])]
    assert admitted.acquire(timeout=10)
    second = Rank(jobs[1]).end()
    assert isinstance(second.error, RendezvousError)
    assert second.error.rank == 1
    text = str(second.error)
    pid = os.getpid()
    assert f"rank 1 of job {jobs[0].name!r} exists twice: pid {pid} has joined, pid {pid}" in text
    assert "both have RANK=1, from variables set by hand. Give every process its own RANK" in text
    assert "every job its own MASTER_PORT" in text
    assert f"If a rank has started pid {pid}, RANK is that rank's" in text
    check_met([rank.end() for rank in [*first, Rank(jobs[2])]])


def test_another_world_size_is_refused_naming_both_and_the_job_goes_on():
    jobs = [replace(job, launcher=TORCHRUN) for job in new_jobs(2)]
    first = Rank(jobs[0])
    odd = Rank(replace(jobs[1], world_size=5)).end()
    assert isinstance(odd.error, RendezvousError)
    assert (odd.error.rank, odd.error.got, odd.error.expected) == (1, 5, 2)
    pid = os.getpid()
    assert str(odd.error) == (
        f"rank 1 (pid {pid}) was started for a world of 5, rank 0 (pid {pid}) for a world of 2: "
        "WORLD_SIZE, from torchrun, must be the same on every rank of job "
        f"{jobs[0].name!r}, and another job needs another MASTER_PORT and TORCHELASTIC_RUN_ID"
    )
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


@pytest.mark.slow
def test_a_rank_that_was_refused_is_explained_when_it_is_missing():
    jobs = new_jobs(2)
    first = Rank(jobs[0], timeout=1.0)
    Rank(Job(jobs[1].name, 1, 5, jobs[1].secret)).end()
    text = str(first.end().error)
    assert f"refused: rank 1 (pid {os.getpid()}) was started for a world of 5" in text
    assert "only this process" not in text


def test_a_rank_0_of_a_job_that_runs_already_is_told_so():
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with connected(jobs[0]):  # so the first one listens
        second = Rank(replace(jobs[0], launcher=PLAIN)).end()
    assert isinstance(second.error, RendezvousError)
    text = str(second.error)
    assert f"rank 0 of job {jobs[0].name!r} exists twice: pid {os.getpid()} listens at @" in text
    assert "perhaps for another job of this name" in text
    assert "both have RANK=0, from variables set by hand" in text
    assert "every job its own MASTER_PORT" in text
    assert second.seconds < 1.0
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


# -- ranks that die ------------------------------------------------------------------------------


def test_a_guest_that_leaves_before_all_have_come_is_named_everywhere(admitted):
    jobs = new_jobs(4)
    ranks = [Rank(jobs[0]), Rank(jobs[1])]
    assert admitted.acquire(timeout=10)
    with connected(jobs[2]) as link:
        join_by_hand(link, jobs[2])
        assert admitted.acquire(timeout=10)
    for rank in ranks:
        assert isinstance(rank.end().error, RendezvousError)
        assert rank.error.rank == 2
        assert "rank 2 (pid" in str(rank.error)
        assert rank.seconds < 5


def test_a_guest_that_leaves_while_files_are_handed_out_is_named_everywhere():
    jobs = new_jobs(3)
    ranks = [Rank(jobs[0]), Rank(jobs[1])]
    with connected(jobs[2]) as link:
        join_by_hand(link, jobs[2])
        message = run_steps(link.receive(MessageKind.ROSTER), link, Deadline(10))
        for file in message.files:
            os.close(file)
    for rank in ranks:
        assert isinstance(rank.end().error, RendezvousError)
        assert rank.error.rank == 2


RANK_0 = """
import os, sys
from ferrodist.rendezvous import Job, meet, meeting

admit = meeting.Server._admit
def admit_and_say_so(*args):
    admit(*args)
    print("joined", flush=True)
meeting.Server._admit = admit_and_say_so
name, secret = sys.stdin.readline().split()
meet(Job(name, 0, 3, bytes.fromhex(secret)), os.memfd_create("test"), 30)
"""


def test_the_death_of_rank_0_is_noticed_at_once():
    jobs = new_jobs(3)
    command = [sys.executable, "-c", RANK_0]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(f"{jobs[0].name} {jobs[0].secret.hex()}\n".encode())
        process.stdin.flush()
        rank = Rank(jobs[1], timeout=30.0)
        assert process.stdout.readline() == b"joined\n"
        process.kill()
        killed = time.monotonic()
        rank.end()
        assert time.monotonic() - killed < 1.0
    assert isinstance(rank.error, RendezvousError)
    assert rank.error.rank == 0
    assert f"rank 0 (pid {process.pid}) of job {jobs[0].name!r} is gone" in str(rank.error)


RANK_1 = """
import os, sys
from ferrodist.rendezvous import Job, meet, watch

if sys.argv[1] == "lifeline":
    watch.try_pidfd = lambda pid: None
name, secret = sys.stdin.readline().split()
meet(Job(name, 1, 2, bytes.fromhex(secret)), os.memfd_create("test"), 30)
child = os.fork()
if child == 0:
    sys.stdin.read()  # outlives its parent
    os._exit(0)
print("met", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["pidfd", "lifeline"])
def test_a_watch_tells_when_a_process_is_gone_even_if_a_child_of_it_lives_on(kind, monkeypatch):
    if kind == "lifeline":
        monkeypatch.setattr(meeting, "try_peer_pidfd", lambda connection, pid: None)
    jobs = new_jobs(2)
    command = [sys.executable, "-c", RANK_1, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(f"{jobs[0].name} {jobs[0].secret.hex()}\n".encode())
        process.stdin.flush()
        rank = Rank(jobs[0]).end()
        assert rank.error is None
        assert process.stdout.readline() == b"met\n"
        assert rank.members[1].pid == process.pid
        assert not is_readable(rank.members[1].watch)
        process.kill()
        assert is_readable(rank.members[1].watch, seconds=5)
    close_members(rank)


def test_where_there_are_no_pidfds_lifelines_do_and_nothing_else_stays_open(monkeypatch):
    monkeypatch.setattr(watch, "try_pidfd", lambda pid: None)
    monkeypatch.setattr(meeting, "try_peer_pidfd", lambda connection, pid: None)
    held_before = set(watch._HELD)
    check_met(meet_all(new_jobs(3)))
    held = watch._HELD - held_before
    assert len(held) == 3  # one of each rank, here all in one process
    for file in held:
        assert not os.get_inheritable(file)
        watch._HELD.discard(file)
        os.close(file)


def test_peer_pidfds_fall_back_to_the_pid(monkeypatch):
    monkeypatch.setattr(watch, "_SO_PEERPIDFD", 1 << 20)
    check_met(meet_all(new_jobs(2)))


# -- what the launcher has seen end ----------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[StatusBoard]:
    ends = StatusBoard.create(4)
    yield ends
    ends.close()


HOW = {
    1: "rank 2 ended with exit code 1 before it joined job {!r}; look at its own output",
    -9: "rank 2 was killed by SIGKILL before it joined job {!r}; look at its own output",
    0: (
        "rank 2 ended (exit code 0) without calling ferrodist.init(), which all 4 ranks of job "
        "{!r} have to do, or caught its error; look at its own output"
    ),
}


@pytest.mark.parametrize("code", HOW)
def test_a_rank_that_ends_before_it_joins_is_named_on_all_at_once(code, ends, admitted):
    jobs = [replace(job, status_board=ends) for job in new_jobs(4)]
    ranks = [Rank(jobs[0]), Rank(jobs[1])]
    assert admitted.acquire(timeout=10)
    ends.set_exit_code(2, code)
    noted = time.monotonic()
    for rank in ranks:
        assert isinstance(rank.end().error, RendezvousError)
        assert str(rank.error) == HOW[code].format(jobs[0].name)
        assert rank.error.rank == 2
    assert time.monotonic() - noted < 1.0


@pytest.mark.parametrize("ended", [0, 3])
def test_ranks_that_wait_for_rank_0_are_told_of_an_end_at_once(ended, ends):
    jobs = [replace(job, status_board=ends) for job in new_jobs(4)]
    ranks = [Rank(job) for job in jobs[1:3]]
    ends.set_exit_code(ended, 3)
    for rank in ranks:
        text = f"rank {ended} ended with exit code 3 before it joined job {jobs[0].name!r}"
        assert text in str(rank.end().error)
        assert rank.error.rank == ended
        assert rank.seconds < 5.0


def test_ranks_that_the_launcher_sees_running_are_waited_for_and_named(ends, monkeypatch, caplog):
    monkeypatch.setattr(errors, "_LINE_SECONDS", 0.2)
    jobs = [replace(job, status_board=ends) for job in new_jobs(3)]
    patient = Config(join_timeout=DefaultTimeout(0.1), late_timeout=30.0)
    ranks = [Rank(job, job.join_seconds(patient)) for job in jobs[:2]]
    text = "rank 0: still waiting for rank 2 (running) to call ferrodist.init() after 0 s"
    while text not in caplog.messages:
        assert ranks[0].is_alive()
    ranks.append(Rank(jobs[2]))
    check_met([rank.end() for rank in ranks])


def test_a_rank_that_is_stopped_before_it_joins_is_called_so(ends, monkeypatch, caplog):
    monkeypatch.setattr(errors, "_LINE_SECONDS", 0.0)
    job = replace(new_jobs(3)[0], status_board=ends)
    marks = {"FERRODIST_JOB": job.name, "FERRODIST_RANK": "2"}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **marks}) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        errors.EarlyExits(job).check([1, 2], missing=[1, 2])
        process.kill()
    stopped = f"rank 2 (stopped: 'kill -CONT {process.pid}' continues it)"
    assert f"still waiting for rank 1 (running), {stopped} to call ferrodist.init()" in caplog.text


def test_ranks_that_rank_0_cannot_reach_see_why_it_has_failed(ends, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    jobs = [replace(job, status_board=ends) for job in new_jobs(3)]
    errors.note_own_failure(jobs[0], OSError(errno.EMFILE, "Too many open files"))
    ends.set_exit_code(1, 1)  # as it was told by rank 0
    text = str(Rank(jobs[2]).end().error)
    assert "rank 1 ended with exit code 1 before it joined" in text
    assert "; rank 0 raised RendezvousError: rank 0 could not join" in text
    assert "'ulimit -n 73' in the shell" in text


def test_a_rank_whose_program_has_not_failed_itself_notes_nothing(ends):
    job = replace(new_jobs(3)[0], status_board=ends)
    errors.note_own_failure(job, RendezvousError("rank 1 is gone", rank=1))
    errors.note_own_failure(job, KeyboardInterrupt())
    assert ends.final_error(0) is None


def test_a_rank_that_gives_up_first_names_the_limit_that_was_set(ends):
    jobs = [replace(job, status_board=ends) for job in new_jobs(3)]
    server = Rank(jobs[0], timeout=30.0)
    client = Rank(jobs[1], timeout=0.5)
    texts = [str(rank.end().error) for rank in (server, client)]
    assert texts[0] == texts[1]
    assert "rank 2 of 3 did not join" in texts[0]
    assert "within 0.5 s; here" in texts[0]
    assert "\n" not in texts[0]  # or launchers would show it for every rank


def test_only_the_default_waits_for_ranks_that_run(ends):
    job = new_jobs(2)[0]
    watched, elsewhere = replace(job, status_board=ends), replace(job, hosts="two hosts")
    assert watched.join_seconds(Config()) == Config().late_timeout
    assert watched.join_seconds(Config(late_timeout=4.0)) == 60.0  # as long as a call waits
    assert watched.join_seconds(Config(join_timeout=60.0)) == 60.0
    assert job.join_seconds(Config()) == 60.0
    assert replace(elsewhere, status_board=ends).join_seconds(Config()) == 60.0


def test_all_that_ended_before_they_joined_are_named(ends):
    job = replace(new_jobs(4)[1], status_board=ends)
    ends.set_exit_code(0, 1)
    ends.set_exit_code(2, -9)
    error = Rank(job).end().error
    assert error.missing == [0, 2]
    assert str(error) == (
        f"rank 0 ended with exit code 1 before it joined job {job.name!r}, rank 2 was killed by "
        f"SIGKILL before it joined job {job.name!r}; look at their own output"
    )


def test_a_rank_that_rank_0_leaves_in_the_middle_is_told_whose_end_it_was(ends):
    job = replace(new_jobs(3)[1], status_board=ends)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + unix_address(job.name)[1:])
        listener.listen()
        rank = Rank(job)
        connection, _ = listener.accept()
        ends.set_exit_code(2, 5)
        connection.close()
        assert "rank 2 ended with exit code 5 before it joined" in str(rank.end().error)


def test_a_guest_that_leaves_is_named_with_what_the_launcher_has_seen(ends, admitted):
    jobs = [replace(job, status_board=ends) for job in new_jobs(3)]
    first = Rank(jobs[0])
    with connected(jobs[2]) as link:
        join_by_hand(link, jobs[2])
        assert admitted.acquire(timeout=10)
        ends.set_exit_code(2, 7)
    text = f"rank 2 (pid {os.getpid()}) ended with exit code 7 before all ranks of job"
    assert text in str(first.end().error)


# -- strangers -----------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_at_once_and_the_job_goes_on():
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    stranger = Rank(Job(jobs[1].name, 1, 2, secrets.token_bytes(32))).end()
    assert isinstance(stranger.error, AuthenticationError)
    assert stranger.seconds < 1.0
    assert stranger.job.secret.hex() not in str(stranger.error)
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


def test_a_guest_without_proof_is_told_and_the_job_goes_on():
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with connected(jobs[0]) as link:
        link.send(MessageKind.GREETING, handshake._new_greeting(jobs[1]).pack())
        run_steps(link.receive(MessageKind.GREETING), link, Deadline(10))
        run_steps(link.receive(MessageKind.PROOF), link, Deadline(10))
        link.send(MessageKind.PROOF, bytes(32))
        message = run_steps(link.receive(MessageKind.FAILURE), link, Deadline(10))
        assert b"AuthenticationError" in message.body
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


def test_an_old_conversation_cannot_be_used_again():
    jobs = new_jobs(2)
    greeting = handshake._new_greeting(jobs[1]).pack()
    first = Rank(jobs[0])
    with connected(jobs[0]) as link:
        link.send(MessageKind.GREETING, greeting)
        theirs = run_steps(link.receive(MessageKind.GREETING), link, Deadline(10)).body
        old_proof = handshake._prove(jobs[1], b"clie", greeting, theirs)
    with connected(jobs[0]) as link:
        link.send(MessageKind.GREETING, greeting)
        run_steps(link.receive(MessageKind.GREETING), link, Deadline(10))
        own = run_steps(link.receive(MessageKind.PROOF), link, Deadline(10)).body
        assert own != old_proof
        link.send(MessageKind.PROOF, old_proof)
        assert run_steps(link.receive(MessageKind.FAILURE), link, Deadline(10))
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


NONSENSE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"frd1\x01\xff\xff\xff\xff",
    b"frd1\x01\x00\x00\x00\x48" + b"\xff" * 72,
    b"frd1\x07\x00\x00\x00\x00",
    bytes(4096),
]


@pytest.mark.parametrize("data", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_turned_away_and_the_job_goes_on(data):
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with connected(jobs[0]) as link, contextlib.suppress(BrokenPipeError):
        link.socket.send(data)
        link.socket.shutdown(socket.SHUT_WR)
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


def test_strangers_that_say_nothing_or_little_hold_up_nobody():
    jobs = new_jobs(3)
    first = Rank(jobs[0])
    with contextlib.ExitStack() as stack:
        for number in range(200):  # more than may be there at once
            link = stack.enter_context(connected(jobs[0]))
            if number % 2:
                link.socket.send(b"frd1")
        rest = [Rank(job) for job in jobs[1:]]
        ranks = [rank.end() for rank in [first, *rest]]
    assert ranks[1].seconds < 3.0
    check_met(ranks)


def test_a_thousand_strangers_cost_nothing_and_one_line_a_second(caplog):
    jobs = new_jobs(2)
    with caplog.at_level(logging.WARNING, "ferrodist"):
        first = Rank(jobs[0])
        for _ in range(1000):
            with connected(jobs[0]) as link, contextlib.suppress(BrokenPipeError):
                link.socket.send(secrets.token_bytes(64))
        check_met([rank.end() for rank in [first, Rank(jobs[1])]])
    assert 1 <= len(caplog.records) <= first.seconds + 1
    assert jobs[0].secret.hex() not in caplog.text


def test_ranks_that_are_asked_to_come_again_do(monkeypatch):
    monkeypatch.setattr(handshake, "_MAX_STRANGERS", -3)  # of four ranks one is served at a time
    check_met(meet_all(new_jobs(4)))


def test_a_visitor_that_takes_too_long_is_sent_away(monkeypatch):
    monkeypatch.setattr(handshake, "_HANDSHAKE_SECONDS", 0.1)
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with connected(jobs[0]) as link:
        run_steps(link.receive(MessageKind.BUSY), link, Deadline(10))
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


FOREIGN_GUEST = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as s:
    s.connect("\\0" + sys.argv[1][1:])
    try:
        s.send(b"frd1")
        print(s.recv(1))
    except ConnectionError:
        print(b"")
"""

FOREIGN_HOST = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as s:
    s.bind("\\0" + sys.argv[1][1:])
    s.listen()
    print("listening", flush=True)
    s.accept()[0].recv(1)
"""


@pytest.mark.skipif(not is_root, reason="needs a second user")
def test_a_guest_of_another_user_is_refused():
    jobs = new_jobs(2)
    first = Rank(jobs[0])
    with connected(jobs[0]):
        pass
    command = [sys.executable, "-c", FOREIGN_GUEST, unix_address(jobs[0].name)]
    assert subprocess.check_output(command) == b"b''\n"
    check_met([rank.end() for rank in [first, Rank(jobs[1])]])


@pytest.mark.skipif(not is_root, reason="needs a second user")
def test_a_host_of_another_user_is_refused():
    jobs = new_jobs(2)
    command = [sys.executable, "-c", FOREIGN_HOST, unix_address(jobs[0].name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"listening\n"
        rank = Rank(jobs[1]).end()
    assert isinstance(rank.error, AuthenticationError)
    assert "user 65534" in str(rank.error)


@pytest.mark.skipif(not is_root, reason="needs a second user")
def test_a_rank_0_whose_address_another_user_has_is_told_whose_process_it_is():
    job, _ = new_jobs(2)
    address = unix_address(job.name)
    command = [sys.executable, "-c", FOREIGN_HOST, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"listening\n"
        error = Rank(job).end().error
    assert isinstance(error, RendezvousError)
    assert f"cannot listen at {address}: pid {process.pid} of user 65534 does" in str(error)
    assert "exists twice" not in str(error)


# -- what arrives is checked ------------------------------------------------------------------


OTHER_VERSION = """
import os, sys
from ferrodist import ProtocolError
from ferrodist.rendezvous import Job, handshake, meet

handshake.__version__ = "9.9.9"
name, secret = sys.stdin.readline().split()
try:
    meet(Job(name, 1, 3, bytes.fromhex(secret)), os.memfd_create("test"), 30)
except ProtocolError as error:
    print(error)
"""


def test_different_versions_are_named_on_every_rank(admitted):
    jobs = new_jobs(3)
    ranks = [Rank(jobs[0]), Rank(jobs[2])]
    assert admitted.acquire(timeout=10)
    secret = f"{jobs[0].name} {jobs[0].secret.hex()}\n"
    other = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION], input=secret, capture_output=True, text=True
    )
    texts = [str(rank.end().error) for rank in ranks] + [other.stdout]
    assert all(isinstance(rank.error, ProtocolError) for rank in ranks)
    for text in texts:
        assert "9.9.9" in text
        assert handshake.__version__ in text


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    left, right = (Channel(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize(
    "data", [b"frd1\x09\xff\xff\xff\xff", b"frd1\x09\x00\x01\x00\x01", b"frd2\x09" + bytes(4)]
)
def test_a_length_that_cannot_be_is_refused_before_anything_is_read(pair, data):
    left, right = pair
    left.socket.send(data)
    with pytest.raises(ProtocolError, match="FAILURE"):
        run_steps(right.receive(MessageKind.FAILURE), right, Deadline(5))


def test_files_that_nobody_expects_are_closed(pair):
    left, right = pair
    left.send(MessageKind.WELCOME, files=[0, 0, 0])
    assert run_steps(right.receive(MessageKind.WELCOME), right, Deadline(5)).files == []
    left.send(MessageKind.RECORD, bytes(16), files=[0, 0, 0])
    with contextlib.suppress(ProtocolError):
        message = run_steps(right.receive(MessageKind.RECORD), right, Deadline(5))
        assert len(message.files) <= 2
        for file in message.files:
            os.close(file)


def test_a_message_that_stops_in_the_middle_is_an_end_of_file(pair):
    left, right = pair
    left.socket.send(b"frd1\x01\x00\x00\x00\x48" + bytes(10))
    left.close()
    with pytest.raises(EOFError):
        run_steps(right.receive(MessageKind.GREETING), right, Deadline(5))


def test_waiting_ends_at_the_deadline(pair):
    with pytest.raises(TimeoutError):
        run_steps(pair[0].receive(MessageKind.GO), pair[0], Deadline(0.05))


def test_a_large_roster_is_cut_into_messages_that_the_kernel_takes(pair):
    left, right = pair
    entries = [
        RosterEntry(rank, 1000 + rank, bytes([rank % 7]) * rank, [0, 1], rank % 2 == 0)
        for rank in range(300)
    ]
    received = []
    for body, files in pack_roster(entries):
        assert len(files) <= 253
        left.send(MessageKind.ROSTER, body, files)
        message = run_steps(right.receive(MessageKind.ROSTER), right, Deadline(5))
        received += unpack_roster(message, 200, files_per_rank=2)
    assert [entry._replace(files=[0, 1]) for entry in received] == entries
    assert {len(entry.files) for entry in received} == {2}
    close_roster(received)


MANY = """
import os, resource, secrets, sys
from ferrodist.rendezvous import Job, meet

size, limit = map(int, sys.argv[1:])
secret = secrets.token_bytes(32)
name = secrets.token_hex(8)
for rank in range(1, size):
    if os.fork() == 0:
        break
else:
    rank = 0
if rank == size - 1 and limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    members = meet(Job(name, rank, size, secret), os.memfd_create("test"), 60)
    assert len({os.fstat(member.arena).st_ino for member in members}) == size
    text = "met"
except Exception as error:  # it is printed, and the test looks at it
    text = str(error)
if rank:
    os._exit(text != "met")
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(size - 1)]
print(text, sum(codes))
"""


@pytest.mark.slow
def test_more_ranks_than_fit_one_message_meet():
    output = subprocess.check_output([sys.executable, "-c", MANY, "140", "0"], text=True)
    assert output == "met 0\n"


def test_a_rank_that_may_not_open_enough_files_says_so_and_is_named():
    output = subprocess.check_output([sys.executable, "-c", MANY, "20", "30"], text=True)
    assert "rank 19 (pid" in output
    assert output.endswith(" 19\n")


def test_ctrl_c_on_rank_0_reaches_the_guests(admitted):
    jobs = new_jobs(3)
    client = Rank(jobs[1], timeout=30.0)
    arena = os.memfd_create("test")

    def interrupt() -> None:
        assert admitted.acquire(timeout=10)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        meet(jobs[0], arena, 30.0)
    os.close(arena)
    assert "rank 0 gave up: KeyboardInterrupt" in str(client.end().error)
    assert client.seconds < 5
