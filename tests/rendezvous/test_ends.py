"""How processes ended: as the kernel tells it, as the launcher notes it, as the rank said it."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from ferrodist.backends.peers import ExitStatuses
from ferrodist.errors import RankLost
from ferrodist.rendezvous import Job, Member, watch
from ferrodist.rendezvous.watch import StatusBoard, describe_exit, try_exit_code

pytestmark = pytest.mark.timeout(30)
NO_FILE = 10**6


@pytest.fixture
def ends() -> Iterator[StatusBoard]:
    ends = StatusBoard.create(3)
    yield ends
    ends.close()


def ended_process(end: Callable[[], object]) -> tuple[int, int]:
    """Start a process that ends so; return its pid and pidfd when it has, not waited for."""
    pid = os.fork()
    if pid == 0:
        end()
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    select.select([pidfd], [], [], 10)
    return pid, pidfd


ENDS = [
    (lambda: os._exit(0), 0),
    (lambda: os._exit(3), 3),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
]


@pytest.mark.parametrize(("end", "code"), ENDS)
def test_the_kernel_tells_how_a_process_ended_that_nobody_has_waited_for(end, code):
    pid, pidfd = ended_process(end)
    try:
        assert try_exit_code(pid, pidfd) == code
        assert try_exit_code(pid, NO_FILE) == code  # by its number alone
    finally:
        os.waitpid(pid, 0)
        os.close(pidfd)


@pytest.mark.parametrize(("end", "code"), ENDS)
def test_a_pidfd_tells_it_even_after_its_parent_has_waited(end, code):
    pid, pidfd = ended_process(end)
    os.waitpid(pid, 0)
    try:
        # Linux 6.15 and later; before that, nobody knows any more.
        assert try_exit_code(pid, pidfd) in (code, None)
        release = tuple(int(part) for part in os.uname().release.split(".")[:2])
        if release >= (6, 15):
            assert try_exit_code(pid, pidfd) == code
    finally:
        os.close(pidfd)


def test_of_a_process_that_runs_nothing_is_told():
    own = os.pidfd_open(os.getpid())
    try:
        assert try_exit_code(os.getpid(), own) is None
    finally:
        os.close(own)


def test_a_lifeline_tells_nothing():
    read, write = os.pipe()
    os.close(write)
    assert watch._status_of_reaped(read) is None
    os.close(read)


def test_the_launcher_notes_ends_for_all(ends):
    seen = StatusBoard(os.dup(ends.file))
    ends.set_exit_code(0, 0)
    ends.set_exit_code(2, -9)
    assert seen.describe(0) == "ended with exit code 0"
    assert seen.describe(1) is None
    assert seen.describe(2) == "was killed by SIGKILL"
    seen.close()


def test_last_words_are_kept_beside_the_end(ends):
    before = time.monotonic()
    ends.set_final_error(1, "ValueError: " + "ä" * 1000, is_consequence=True)
    ends.set_exit_code(1, 1)
    said = ends.final_error(1)
    assert before <= said.when <= time.monotonic()
    assert said.is_consequence
    assert said.text.startswith("ValueError: ääää")
    assert ends.describe(1) == "ended with exit code 1"
    assert ends.final_error(0) is ends.final_error(2) is None


def test_a_file_that_is_something_else_says_nothing(tmp_path):
    file = os.open(tmp_path / "empty", os.O_RDWR | os.O_CREAT)
    assert StatusBoard(file).describe(5) is None
    assert StatusBoard(file).final_error(5) is None
    os.close(file)


def test_signals_without_a_name_have_a_number():
    assert describe_exit(-63) == "was killed by signal 63"


@pytest.fixture
def exit_statuses(ends: StatusBoard) -> ExitStatuses:
    nobody = Member(1, 2**22 + 1, NO_FILE, NO_FILE)  # no process has this number
    return ExitStatuses(Job("name", 0, 2, bytes(32), ends), [nobody, nobody])


def test_what_the_kernel_does_not_tell_is_taken_from_the_launcher(exit_statuses, ends):
    ends.set_exit_code(1, 7)
    assert exit_statuses.leave_reason_of(1).how == "ended with exit code 7"


def test_a_death_that_nobody_explains_is_still_one(exit_statuses):
    assert exit_statuses.leave_reason_of(1).how == "died (its process is gone)"


def test_a_rank_says_whether_its_error_is_only_a_consequence(exit_statuses, ends):
    exit_statuses.say(RankLost("rank 1 is gone", rank=1))
    assert ends.final_error(0).is_consequence
    exit_statuses.say(KeyError("mine"))
    assert not ends.final_error(0).is_consequence
    assert ends.final_error(0).text == "KeyError: 'mine'"
