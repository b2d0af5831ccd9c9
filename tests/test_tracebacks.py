"""What users see of a traceback: their own frames, and at most one of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ferrodist
from ferrodist import tracebacks
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.timeout(120)

PACKAGE = str(Path(ferrodist.__file__).parent)


def files_in(text: str) -> list[str]:
    """List the files of the frames of a traceback."""
    lines = (line.strip(" |") for line in text.splitlines())
    return [line.split('"')[1] for line in lines if line.startswith('File "')]


def ours_in(text: str) -> list[str]:
    return [file for file in files_in(text) if file.startswith(PACKAGE)]


def shown(error: BaseException) -> str:
    tracebacks.cut(error)
    return "".join(traceback.format_exception(error))


def error_of(fn: Callable[[], object]) -> BaseException:
    try:
        fn()
    except BaseException as error:  # noqa: BLE001 -- it is looked at
        return error
    raise AssertionError("no error")


def stderr_of(code: str, tmp_path: Path, **environment: str) -> str:
    """Run a program that fails, and return what it shows."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.stderr


# -- programs -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "ferrodist.allreduce(np.ones(2), op='nope')",
        "ferrodist.allreduce({'a': np.array(['text'])})",
        "ferrodist.broadcast_object(object(), root=0)",
        "backend.allreduce(np.array(['text']))",
        "ferrodist.broadcast(1, root=7)",
        "ferrodist.init('nope')",
    ],
)
def test_a_program_that_fails_shows_one_frame_of_ours(call, tmp_path):
    code = f"""
        import numpy as np
        import ferrodist
        backend = ferrodist.init()
        {call}
        """
    text = stderr_of(code, tmp_path)
    assert len(ours_in(text)) == 1
    assert files_in(text)[0].endswith("script.py")
    assert len(ours_in(stderr_of(code, tmp_path, FERRODIST_FULL_TRACEBACK="1"))) > 1


def test_an_error_of_init_itself_shows_one_frame_of_ours(tmp_path):
    code = "import ferrodist; ferrodist.init()"
    text = stderr_of(code, tmp_path, RANK="0", WORLD_SIZE="2")
    assert "MASTER_ADDR" in text
    assert len(ours_in(text)) == 1


def test_an_error_in_a_thread_shows_one_frame_of_ours(tmp_path):
    code = """
        import threading
        import ferrodist
        ferrodist.init()
        def body():
            ferrodist.allreduce(object())
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        """
    text = stderr_of(code, tmp_path)
    assert "Exception in thread" in text
    assert len(ours_in(text)) == 1


@pytest.mark.slow
def test_an_error_on_a_rank_of_run_shows_one_frame_of_ours_there_and_here():
    def body(backend):
        ferrodist.allreduce(object())

    error = error_of(lambda: ferrodist.run(body, 2))
    assert len(ours_in(str(error.__cause__))) == 1
    assert len(ours_in("".join(traceback.format_tb(error.__traceback__)))) == 1


# -- which frames ---------------------------------------------------------------------------------


def test_frames_of_users_inside_of_ours_stay():
    def fail(backend):
        raise ValueError("mine")

    (error,) = error_of(lambda: run_ranks(1, fail)).exceptions
    assert files_in(shown(error)) == [__file__]


def test_a_mistake_of_ours_shows_all_frames(monkeypatch):
    monkeypatch.setattr("ferrodist.collectives.plan.as_input", "not a function")
    (backend,) = ferrodist.SimulatedBackend.create_group(1)
    error = error_of(lambda: ferrodist.allreduce({"a": np.ones(1)}, backend))
    assert len(ours_in(shown(error))) > 1
    backend.close()


def test_causes_are_cut_too():
    (backend,) = ferrodist.SimulatedBackend.create_group(1)

    def wrapped():
        try:
            ferrodist.allreduce(object(), backend)
        except ferrodist.UnsupportedArray as error:
            raise RuntimeError("in my loop") from error

    assert len(ours_in(shown(error_of(wrapped)))) == 1
    backend.close()


# -- several ranks --------------------------------------------------------------------------------


def differ(backend):
    ferrodist.allreduce(np.ones(2 + backend.rank), backend)


def test_a_table_that_four_ranks_raise_is_shown_once():
    group = error_of(lambda: run_ranks(4, differ))
    text = shown(group)
    assert text.count("allreduce(float64[3], sum)") == 1
    assert text.count("sizes differ between ranks") == 5  # once for each rank, and in the headline
    for rank in range(4):
        assert f"on rank {rank}\n" in text
    assert len(ours_in(text)) <= 2  # run_ranks, and the call of the first


def test_errors_that_differ_keep_their_own_texts():
    def body(backend):
        raise ferrodist.InvalidArgument(f"rank {backend.rank} says\nthis")

    group = error_of(lambda: run_ranks(3, body))
    assert sorted(map(str, group.exceptions)) == [f"rank {rank} says\nthis" for rank in range(3)]


def pytest_output(tmp_path: Path, body: str, **environment: str) -> str:
    path = tmp_path / "test_of_a_user.py"
    path.write_text(textwrap.dedent(body))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(path)]
    environment = {**os.environ, **environment}
    environment.pop("PYTEST_ADDOPTS", None)  # the options of this run, such as --durations
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    return done.stdout


@pytest.mark.slow
def test_the_output_of_a_user_is_without_the_options_of_this_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--durations=40 -vv")
    assert "slowest" not in pytest_output(tmp_path, "def test_that_fails(): assert False")


@pytest.mark.slow
def test_a_test_that_fails_in_two_worlds_says_so_in_less_than_sixty_lines(tmp_path):
    body = """
        import numpy as np, pytest, ferrodist

        @pytest.mark.world(2, 4)
        def test_sum(world):
            def body(backend):
                return ferrodist.allreduce(np.ones(2 + backend.rank), backend)
            world.run(body)
        """
    text = pytest_output(tmp_path, body)
    assert len(text.splitlines()) < 60
    assert text.count("allreduce(float64[3], sum)") == 2
    assert not ours_in(text)


@pytest.mark.slow
def test_pytest_hides_our_frames_unless_all_are_asked_for(tmp_path):
    body = """
        import ferrodist

        def test_call():
            (backend,) = ferrodist.SimulatedBackend.create_group(1)
            ferrodist.allreduce(object(), backend)
        """
    text = pytest_output(tmp_path, body)
    assert "ferrodist/collectives" not in text
    assert "test_of_a_user.py:6: UnsupportedArray" in text
    assert "ferrodist/collectives" in pytest_output(tmp_path, body, FERRODIST_FULL_TRACEBACK="1")


@pytest.mark.slow
def test_pytest_shows_the_error_of_a_rank_without_the_source_of_run(tmp_path):
    body = """
        import ferrodist

        def fail(backend):
            raise ValueError(f"from rank {backend.rank}")

        def test_that_fails():
            ferrodist.run(fail, ranks=1)
    """
    text = pytest_output(tmp_path, body)
    assert "ValueError: from rank 0" in text
    assert "ferrodist.run(fail, ranks=1)" in text
    assert "def run(" not in text
    assert "def run(" in pytest_output(tmp_path, body, FERRODIST_FULL_TRACEBACK="1")
