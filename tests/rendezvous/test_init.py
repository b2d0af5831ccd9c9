"""init() joins the job a launcher has named, and the end of the program is told to the others."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import pytest

import ferrodist
from ferrodist import BackendClosed, InvalidArgument, NotInitialized, RendezvousError
from ferrodist.backends import registry
from ferrodist.backends.threads import SimulatedBackend
from ferrodist.config import Config
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.find_job import run_variables
from ferrodist.rendezvous.watch import StatusBoard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

LAUNCHERS = (
    *("FERRODIST_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_"),
    *("OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_"),
)


class StandIn(SimulatedBackend):
    """Joins any job without a word, as a world of one."""

    jobs: ClassVar[list[Job]] = []

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Any:
        cls.jobs.append(job)
        (backend,) = cls.create_group(1, config=config)
        return backend


class Other(StandIn):
    """Has another name."""


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test begin as a process that has not called init, started by nobody."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.setattr(registry, "_process", registry._Process())
    monkeypatch.setattr(registry.ProgramEnd, "watch", lambda self, backend: None)
    for name in ("shared_memory", "shm"):
        monkeypatch.setitem(registry._BUILT_IN, name, f"{__name__}:StandIn")
    StandIn.jobs.clear()
    yield
    if registry._process.backend is not None:
        registry._process.backend.close()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Make this process rank 2 of 5."""
    secret, ends = secrets.token_bytes(32), StatusBoard.create(5)
    job = Job("a job", 2, 5, secret, ends, local_rank=2, local_world_size=5)
    read, write = os.pipe()
    os.write(write, job.secret)
    os.close(write)
    os.set_inheritable(job.status_board.file, True)
    for name, value in run_variables(job, read, job.status_board.file).items():
        monkeypatch.setenv(name, value)
    yield job
    job.status_board.close()


def test_without_a_launcher_it_is_a_world_of_one_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, "ferrodist"):
        backend = ferrodist.init()
        assert ferrodist.init() is backend
    assert (backend.rank, backend.world_size) == (0, 1)
    assert [record.message for record in caplog.records] == [
        "no launcher has started this process: a world of one"
    ]
    (job,) = StandIn.jobs
    assert (job.rank, job.world_size) == (0, 1)


def test_calls_without_a_backend_use_the_one_of_init():
    with pytest.raises(NotInitialized, match=r"allreduce: call ferrodist.init\(\) first, or pass"):
        ferrodist.allreduce(1.0)
    ferrodist.init()
    np.testing.assert_array_equal(ferrodist.allreduce(np.arange(3.0)), np.arange(3.0))
    ferrodist.barrier()


def test_a_launcher_says_which_rank_of_which_job(launched):
    ferrodist.init()
    (job,) = StandIn.jobs
    assert job == launched
    assert job.launcher.name == "ferrodist run"
    assert job.status_board.file == launched.status_board.file


def test_what_a_rank_starts_inherits_neither_the_secret_nor_the_ends(launched):
    secret = int(os.environ["FERRODIST_SECRET_FD"])
    before = os.fstat(secret)
    ferrodist.init()
    with suppress(OSError):  # the number may be that of another file by now
        after = os.fstat(secret)
        assert (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino)
    assert not os.get_inheritable(launched.status_board.file)


def test_a_process_that_a_rank_has_started_is_no_rank(launched):
    os.close(int(os.environ["FERRODIST_SECRET_FD"]))
    with pytest.raises(RendezvousError) as caught:
        ferrodist.init()
    text = str(caught.value)
    assert text.startswith("FERRODIST_RANK=2 of job 'a job' belongs to another process")
    assert "this process was started by a rank and not by the launcher" in text
    assert "'ferrodist run -n 1 script.py'" in text


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_file_without_a_secret_is_refused_and_nothing_is_read_from_it(
    launched, content, monkeypatch
):
    os.close(int(os.environ["FERRODIST_SECRET_FD"]))
    read, write = os.pipe()
    os.write(write, content)
    monkeypatch.setenv("FERRODIST_SECRET_FD", str(read))
    with pytest.raises(RendezvousError, match="is not a pipe with the secret"):
        ferrodist.init()
    os.close(write)
    assert os.read(read, 100) == content
    os.close(read)


def test_a_secret_is_not_taken_out_of_any_other_kind_of_file(launched, monkeypatch, tmp_path):
    os.close(int(os.environ["FERRODIST_SECRET_FD"]))
    path = tmp_path / "file"
    path.write_bytes(bytes(32))
    with path.open() as file:
        monkeypatch.setenv("FERRODIST_SECRET_FD", str(file.fileno()))
        with pytest.raises(RendezvousError, match="is not a pipe with the secret"):
            ferrodist.init()


def test_a_second_call_after_a_failure_says_that_the_first_error_counts(launched, monkeypatch):
    def join(job: Job, *, config: Config | None = None) -> Any:
        raise RendezvousError("rank 3 did not join")

    monkeypatch.setattr(StandIn, "join", join)
    with pytest.raises(RendezvousError, match="rank 3 did not join"):
        ferrodist.init()
    with pytest.raises(RendezvousError, match=r"init\(\) was tried before and failed: the first"):
        ferrodist.init()


def test_hand_set_variables_say_which_rank_of_which_job(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1234")
    ferrodist.init()
    (job,) = StandIn.jobs
    assert (job.name, job.rank, job.world_size, job.status_board) == ("plain-1234", 1, 3, None)


def test_variables_that_are_half_set_are_never_taken_for_a_world_of_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidArgument, match=r"^RANK, MASTER_ADDR, MASTER_PORT not set, but W"):
        ferrodist.init()
    assert StandIn.jobs == []


def test_a_second_call_may_ask_for_the_same_only():
    backend = ferrodist.init("shm", timeout=7)
    assert backend.timeout == 7.0
    assert ferrodist.init("shared_memory", timeout=7.0) is backend
    with pytest.raises(InvalidArgument, match="made a StandIn, not 'simulated'"):
        ferrodist.init("simulated")
    with pytest.raises(InvalidArgument, match=r"timeout is 7\.0, not 8"):
        ferrodist.init(timeout=8)


def test_a_backend_that_was_closed_is_not_made_again():
    ferrodist.init().close()
    with pytest.raises(InvalidArgument, match="was closed"):
        ferrodist.init()
    with pytest.raises(BackendClosed):
        ferrodist.barrier()


def test_unknown_and_unsuitable_backends_are_refused():
    with pytest.raises(InvalidArgument, match="no backend named 'nonsense'"):
        ferrodist.init("nonsense")
    with pytest.raises(InvalidArgument, match="cannot make backend 'simulated'"):
        ferrodist.init("simulated")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("NCCL", " (did you mean 'nccl'?)"),
        ("cpu:gloo,cuda:nccl", ", which is a name of torch's: 'nccl' alone does arrays of the"),
        ("ucc", ", which is a name of torch's: init() without a name takes"),
    ],
)
def test_a_name_of_torchs_is_answered_with_what_to_write(name, hint):
    with pytest.raises(InvalidArgument) as caught:
        ferrodist.init(name)
    assert str(caught.value).startswith(f"no backend named {name!r}{hint}")
    known = "gloo, hybrid, mpi, nccl, shared_memory, shm, simulated, tcp"
    assert str(caught.value).endswith(f"; known: {known}")


def test_a_misspelt_backend_is_answered_with_the_nearest():
    with pytest.raises(InvalidArgument, match=r"'share_memory' \(did you mean 'shared_memory'"):
        ferrodist.init("share_memory")


def test_a_misspelt_variable_is_warned_of_with_the_nearest(monkeypatch, caplog):
    for name in ("FERRODIST_TIMOUT", "FERRODIST_XYZ", "FERRODIST_SSH", "FERRODIST_TLS"):
        monkeypatch.setenv(name, "")
    ferrodist.init()
    assert [record.getMessage() for record in caplog.records] == [
        "FERRODIST_TIMOUT is no setting of this version, and nobody reads it: did you mean "
        "FERRODIST_TIMEOUT or FERRODIST_LATE_TIMEOUT?",
        "FERRODIST_XYZ is no setting of this version, and nobody reads it",
    ]


def test_a_variable_says_which_backend_and_an_argument_overrides_it(monkeypatch):
    monkeypatch.setenv("FERRODIST_BACKEND", "nonsense")
    with pytest.raises(InvalidArgument, match=r"^FERRODIST_BACKEND: no backend named 'nonsense'"):
        ferrodist.init()
    monkeypatch.setitem(registry._BUILT_IN, "other", f"{__name__}:Other")
    monkeypatch.setenv("FERRODIST_BACKEND", "other")
    backend = ferrodist.init()
    assert type(backend) is Other
    with pytest.raises(InvalidArgument, match="made a Other, not 'shm'"):
        ferrodist.init("shm")
    backend.close()
    monkeypatch.setattr(registry, "_process", registry._Process())
    assert type(ferrodist.init("shm")) is StandIn


# -- the end of the program -----------------------------------------------------------------------

PROGRAM = """
import sys, threading
import ferrodist
from ferrodist.backends import registry
from ferrodist.backends.threads import SimulatedBackend

class StandIn(SimulatedBackend):
    @classmethod
    def join(cls, job, *, config=None):
        return cls.create_group(1, config=config)[0]

    def _end(self, *how):
        print("end", flush=True)
        super()._end(*how)

    def _fail(self, error):
        print("fail", repr(error), flush=True)
        super()._fail(error)

registry._BUILT_IN["shared_memory"] = "__main__:StandIn"
backend = ferrodist.init()
"""


def run_program(code: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_program_that_ends_leaves_the_group_and_keeps_its_exit_code():
    assert run_program("") == (0, "end\n", "")
    assert run_program("sys.exit(3)") == (3, "end\n", "")


def test_a_program_that_was_closed_leaves_in_silence():
    assert run_program("backend.close()") == (0, "end\n", "")


def test_an_exception_that_leaves_the_program_is_told_to_the_others():
    code, output, errors = run_program("raise KeyError('boom')")
    assert code == 1
    assert output == "fail KeyError('boom')\nend\n"
    assert errors.count("KeyError: 'boom'") == 1


def test_a_hook_of_the_users_is_still_called():
    code, output, _ = run_program(
        """
        sys.excepthook = lambda *args, ours=sys.excepthook: (print("mine"), ours(*args))
        raise ValueError
        """
    )
    assert (code, output) == (1, "mine\nfail ValueError()\nend\n")


def test_the_error_of_a_work_nobody_asked_for_is_one_line_at_the_end():
    code, _, errors = run_program(
        """
        import logging
        logging.basicConfig()
        from ferrodist.backends.running_call import Prepared
        from ferrodist.call import Call, Kind
        from ferrodist.deadline import Deadline
        class Lost(Prepared):
            def run(self, running):
                raise OSError("lost")
            def finish(self):
                pass
        backend._start(Lost(Call(Kind.BARRIER), Deadline(5)))
        """
    )
    assert code == 0
    assert len(errors.splitlines()) == 1
    assert "lost" in errors


def test_a_call_in_flight_does_not_hold_up_the_end_for_long():
    code, output, errors = run_program(
        """
        group = SimulatedBackend.create_group(2)  # of which rank 1 never calls
        group[0].allreduce(1, async_op=True, timeout=None)
        """
    )
    assert (code, output, errors) == (0, "end\n", "")


def test_a_forked_child_is_told_whose_backend_it_is_and_ends_nothing():
    code, output, errors = run_program(
        """
        import os
        child = os.fork()
        if child == 0:
            try:
                ferrodist.init()
            except ferrodist.BackendClosed:
                sys.exit(17)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), backend.is_closed)
        """
    )
    assert (code, output.splitlines()[-2:], errors) == (0, ["17 False", "end"], "")


FACTS = (ferrodist.rank, ferrodist.world_size, ferrodist.local_rank)


def test_before_init_nobody_knows_its_rank() -> None:
    assert not ferrodist.is_initialized()
    for fact in FACTS:
        with pytest.raises(NotInitialized, match=r"call ferrodist\.init\(\) first"):
            fact()


def test_a_rank_is_known_from_init_to_close() -> None:
    backend = ferrodist.init()
    facts = (backend.rank, backend.world_size, backend.local_rank)
    assert ferrodist.is_initialized()
    assert tuple(fact() for fact in FACTS) == facts
    backend.close()
    assert not ferrodist.is_initialized()
    for fact in FACTS:
        with pytest.raises(NotInitialized, match=rf"closed; backend\.{fact.__name__} stays valid"):
            fact()
    assert (backend.rank, backend.world_size, backend.local_rank) == facts


def test_a_forked_child_is_not_initialized() -> None:
    ferrodist.init()
    child = os.fork()
    if child == 0:
        os._exit(10 * ferrodist.is_initialized() + ferrodist.world_size())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert ferrodist.is_initialized()


def test_pickle_for_all_object_calls_is_asked_for_once() -> None:
    backend = ferrodist.init(pickle=True)
    assert ferrodist.broadcast_object(Counter("aab")) == Counter("aab")
    assert ferrodist.all_gather_object(Counter("a"), backend.split([0])) == [Counter("a")]
    with pytest.raises(TypeError, match="pickle=True"):
        ferrodist.broadcast_object(Counter(), pickle=False)
    assert ferrodist.init(pickle=True) is ferrodist.init() is backend
    with pytest.raises(InvalidArgument, match="with pickle=True"):
        ferrodist.init(pickle=False)
