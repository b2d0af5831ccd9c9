"""init() joins the job a launcher has named, and the end of the program is told to the others."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import ferrodist
from ferrodist import BackendClosed, InvalidArgument, NotInitialized, RendezvousError
from ferrodist.backends import default, registry
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.config import Config, Launch, child_environment, foreign_launch
from ferrodist.rendezvous import Job

pytestmark = pytest.mark.timeout(60)


class StandIn(SimulatedBackend):
    """Joins any job without a word, as a world of one."""

    jobs: ClassVar[list[Job]] = []

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Any:
        cls.jobs.append(job)
        (backend,) = cls.create_group(1, config=config)
        return backend


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test begin as a process that has not called init, started by nobody."""
    for name in [*foreign_launch(), *Launch(0, 1, "x", 0).to_environment()]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(default, "_process", default._Process())
    monkeypatch.setattr(default, "_see_to_the_end", lambda backend: None)
    for name in ("shared_memory", "shm"):
        monkeypatch.setitem(registry._BUILT_IN, name, f"{__name__}:StandIn")
    StandIn.jobs.clear()
    yield
    if default._process.backend is not None:
        default._process.backend.close()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Make this process rank 2 of 5."""
    job = Job("a job", 2, 5, secrets.token_bytes(32))
    read, write = os.pipe()
    os.write(write, job.secret)
    os.close(write)
    for name, value in Launch(2, 5, job.name, read).to_environment().items():
        monkeypatch.setenv(name, value)
    return job


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
    assert StandIn.jobs == [launched]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(int(os.environ["FERRODIST_SECRET_FD"]))


def test_a_process_that_a_rank_has_started_is_no_rank(launched):
    os.close(int(os.environ["FERRODIST_SECRET_FD"]))
    with pytest.raises(RendezvousError, match=r"FERRODIST_SECRET_FD=.* was started by a rank"):
        ferrodist.init()


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_file_without_a_secret_is_refused_and_never_waited_for(launched, content, monkeypatch):
    os.close(int(os.environ["FERRODIST_SECRET_FD"]))
    read, write = os.pipe()
    os.write(write, content)
    monkeypatch.setenv("FERRODIST_SECRET_FD", str(read))
    with pytest.raises(RendezvousError, match="not a file with the secret"):
        ferrodist.init()
    os.close(write)


def test_a_secret_is_not_taken_out_of_any_other_kind_of_file(launched, monkeypatch, tmp_path):
    os.close(int(os.environ["FERRODIST_SECRET_FD"]))
    path = tmp_path / "file"
    path.write_bytes(bytes(32))
    with path.open() as file:
        monkeypatch.setenv("FERRODIST_SECRET_FD", str(file.fileno()))
        with pytest.raises(RendezvousError, match="not a file with the secret"):
            ferrodist.init()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK"),
        ({"PMI_RANK": "1"}, "PMI_RANK"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_PROCID, SLURM_STEP_NUM_TASKS"),
    ],
)
def test_another_launcher_is_never_taken_for_a_world_of_one(variables, named, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match=f"^{named} set .*ferrodist run -n N script.py"):
        ferrodist.init()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": "0"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "many"},
    ],
)
def test_a_batch_script_is_no_launcher(variables):
    assert foreign_launch(variables) == []


def test_variables_of_a_launch_make_it_again():
    launch = Launch(3, 4, "name", 17)
    assert Launch.from_environment(launch.to_environment()) == launch
    assert Launch.from_environment({}) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "JOB", "SECRET_FD"])
def test_a_launch_that_is_half_set_names_what_is_missing(name):
    variables = Launch(3, 4, "name", 17).to_environment()
    del variables[f"FERRODIST_{name}"]
    with pytest.raises(InvalidArgument, match=f"^FERRODIST_{name} not set, but FERRODIST_"):
        Launch.from_environment(variables)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "-1"),
        ("RANK", "4"),
        ("RANK", "²"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", ""),
        ("JOB", ""),
        ("SECRET_FD", "-3"),
    ],
)
def test_a_launch_that_cannot_be_names_the_variables(name, value):
    variables = Launch(3, 4, "name", 17).to_environment() | {f"FERRODIST_{name}": value}
    with pytest.raises(InvalidArgument, match=f"FERRODIST_{name}='{value}'"):
        Launch.from_environment(variables)


def test_a_childs_environment_keeps_what_the_user_has_chosen(monkeypatch):
    launch = Launch(1, 2, "name", 17)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SOMETHING", "else")
    variables = child_environment(launch, 4)
    assert variables["OMP_NUM_THREADS"] == "4"
    assert variables["SOMETHING"] == "else"
    assert Launch.from_environment(variables) == launch
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert child_environment(launch, 4)["OMP_NUM_THREADS"] == "7"


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


# -- the end of the program -----------------------------------------------------------------------

PROGRAM = """
import sys, threading
import ferrodist
from ferrodist.backends import registry
from ferrodist.backends.simulated import SimulatedBackend

class StandIn(SimulatedBackend):
    @classmethod
    def join(cls, job, *, config=None):
        return cls.create_group(1, config=config)[0]

    def end(self):
        print("end", flush=True)
        super().end()

    def fail(self, error):
        print("fail", repr(error), flush=True)
        super().fail(error)

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
        def body(talk):
            raise OSError("lost")
        from ferrodist.call import Call, Kind
        from ferrodist.deadline import Deadline
        backend.start(Call(Kind.BARRIER), body, Deadline(5), lambda result: result)
        """
    )
    assert code == 0
    assert len(errors.splitlines()) == 1
    assert "lost" in errors


def test_a_call_in_flight_does_not_hold_up_the_end_for_long():
    code, output, errors = run_program(
        """
        def end():
            threading.Event().wait()
        backend.end = end
        """
    )
    assert (code, output, errors) == (0, "", "")


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
