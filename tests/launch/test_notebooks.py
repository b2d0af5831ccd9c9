"""``ferrodist.run`` from a notebook and from a prompt: what is typed there runs, and is shown."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
LIMIT = 60.0  # seconds for a cell or an answer
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Kernel(KernelManager):
    """A kernel of this Python, whatever kernels are installed, that talks through files."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="this Python", language="python")


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    # Not tmp_path: the name of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        manager = Kernel(transport="ipc", ip=f"{folder}/s", connection_file=f"{folder}/kernel.json")
        yield manager
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


class Cells:
    """A running kernel, seen from a notebook: cells go in, and what they show comes out."""

    def __init__(self, kernel: Kernel) -> None:
        kernel.start_kernel(env=os.environ | {"IPYTHONDIR": f"{kernel.ip}-ipython"})
        self.client = kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT)

    def run(self, text: str, on_output: Callable[[str], None] = lambda shown: None) -> str:
        """Run a cell and return all that it shows; call back with that whenever there is more."""
        shown = ""

        def take(message: dict[str, Any]) -> None:
            nonlocal shown
            content = message["content"]
            if message["msg_type"] == "stream":
                shown += content["text"]
            elif message["msg_type"] == "execute_result":
                shown += content["data"]["text/plain"] + "\n"
            elif message["msg_type"] == "error":
                shown += COLOURS.sub("", "\n".join(content["traceback"]))
            on_output(shown)

        self.client.execute_interactive(text, output_hook=take, timeout=LIMIT)
        return shown


@pytest.fixture
def cells(kernel: Kernel) -> Iterator[Cells]:
    opened = Cells(kernel)
    yield opened
    opened.client.stop_channels()


def has_ended(pid: int) -> bool:
    """Wait for the end of a process."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        ready, _, _ = select.select([pidfd], [], [], LIMIT)
        os.close(pidfd)
        return bool(ready)
    return True


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


# -- the notebook of the examples ----------------------------------------------------------------


@pytest.fixture(scope="module")
def shown_by_cell() -> dict[str, str]:
    """Run the notebook and return what each of its cells shows."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        manager = Kernel(transport="ipc", ip=f"{folder}/s", connection_file=f"{folder}/kernel.json")
        client = NotebookClient(notebook, km=manager, timeout=LIMIT, startup_timeout=LIMIT)
        client.execute(cleanup_kc=True)
    return {
        cell.id: "".join(
            output.text if output.output_type == "stream" else f"{output.data['text/plain']}\n"
            for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def test_the_notebook_is_stored_without_outputs() -> None:
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if "outputs" in cell]
    assert not any(cell.outputs or cell.execution_count for cell in code)


def test_a_cell_shows_the_output_of_all_ranks_and_their_results(shown_by_cell) -> None:
    *lines, result = shown_by_cell["hello"].splitlines()
    others = [f"rank {rank}: hello from a cell: {rank} of 4" for rank in (1, 2, 3)]
    assert sorted(lines) == ["hello from a cell: 0 of 4", *others]
    assert result == str([rank**2 for rank in range(4)])


def test_the_notebook_trains(shown_by_cell) -> None:
    first, *_, last = shown_by_cell["train"].splitlines()
    assert re.fullmatch(r"step   0: loss 1\d\.\d{6}", first)
    assert last == "step 150: loss 0.000000"
    assert shown_by_cell["trained"] == "weights [ 2. -3.]\nall ranks have the same: True\n"


def test_the_notebook_shows_the_traceback_of_the_rank_that_failed(shown_by_cell) -> None:
    shown = shown_by_cell["broken"]
    assert "caught: points-1.npy is not there ['on rank 1']\n" in shown
    trace = shown.partition("Traceback (most recent call last):\n")[2]
    assert re.match(r'  File ".*", line 3, in broken\n', trace)
    assert trace.rstrip().endswith("FileNotFoundError: points-1.npy is not there")
    assert {"lost rank 1", "rank 2: lost rank 1"} < set(shown.splitlines())


def test_the_kernel_itself_is_a_world_of_one(shown_by_cell) -> None:
    assert shown_by_cell["one"] == "hello from a cell: 0 of 1\n0\n"


# -- other cells ---------------------------------------------------------------------------------

RANKS_THAT_WAIT = """
import os, threading, ferrodist

def wait(backend):
    print("pid", os.getpid(), flush=True)
    threading.Event().wait(600)

ferrodist.run(wait, ranks=3)
"""


def when_all_wait(act: Callable[[], None], pids: set[int]) -> Callable[[str], None]:
    """Return what collects the pids of three ranks and acts when all are there."""

    def look(shown: str) -> None:
        found = set(map(int, re.findall(r"pid (\d+)\n", shown)))
        if len(found) == 3 and not pids:
            pids.update(found)
            act()

    return look


def test_interrupting_a_cell_ends_its_ranks_and_not_the_kernel(kernel, cells) -> None:
    pids: set[int] = set()
    shown = cells.run(RANKS_THAT_WAIT, when_all_wait(kernel.interrupt_kernel, pids))
    assert shown.rstrip().endswith("KeyboardInterrupt:")
    assert all(map(has_ended, pids))
    assert children_of(kernel.provisioner.pid) == []
    again = cells.run("ferrodist.run(lambda backend: ferrodist.allreduce(backend.rank), ranks=3)")
    assert again == "[3, 3, 3]\n"


def test_killing_the_kernel_ends_the_ranks_of_a_cell(kernel, cells) -> None:
    pids: set[int] = set()

    def kill() -> None:
        kernel.shutdown_kernel(now=True)
        raise InterruptedError  # there is nobody left to answer

    with pytest.raises(InterruptedError):
        cells.run(RANKS_THAT_WAIT, when_all_wait(kill, pids))
    assert all(map(has_ended, pids))


def test_a_cell_that_fails_shows_the_rank_its_error_and_its_traceback(cells) -> None:
    shown = cells.run(
        "import ferrodist\n\n"
        "def fail(backend):\n"
        "    raise LookupError(f'nothing for {backend.rank}')\n\n"
        "ferrodist.run(lambda backend: fail(backend) if backend.rank == 2 else None, ranks=3)"
    )
    trace, _, rest = shown.partition("direct cause of the following exception")
    assert re.search(r'  File ".*", line 4, in fail\n +raise LookupError\(', trace)
    assert rest.endswith("LookupError: nothing for 2\non rank 2")


def test_output_to_stderr_and_of_programs_that_ranks_start_is_shown_too(cells) -> None:
    shown = cells.run(
        "import os, sys, ferrodist\n\n"
        "def speak(backend):\n"
        "    print('to stderr', backend.rank, file=sys.stderr)\n"
        "    os.system(f'echo from a shell {backend.rank}')\n\n"
        "ferrodist.run(speak, ranks=2)"
    )
    assert sorted(shown.splitlines()) == [
        "[None, None]",
        "from a shell 0",
        "rank 1: from a shell 1",
        "rank 1: to stderr 1",
        "to stderr 0",
    ]


def test_an_error_in_a_cell_does_not_end_the_world_of_one(cells) -> None:
    cells.run("import ferrodist; ferrodist.init()")
    assert "ZeroDivisionError" in cells.run("1 / 0")
    assert cells.run("ferrodist.allreduce(7)") == "7\n"


# -- prompts -------------------------------------------------------------------------------------

TYPED = """\
import ferrodist
factor = 3
def work(backend):
    print("working on", backend.rank)
    return ferrodist.allreduce(backend.rank * factor)

"""
WORKING = ["rank 1: working on 1", "rank 2: working on 2", "working on 0"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def run_python(*options: str, typed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options],
        input=typed,
        capture_output=True,
        env=ENVIRONMENT,
        text=True,
        timeout=LIMIT,
    )


def test_functions_typed_at_a_prompt_run_on_ranks() -> None:
    done = run_python("-i", typed=TYPED + "ferrodist.run(work, ranks=3)\n")
    *lines, result = done.stdout.splitlines()
    assert (sorted(lines), result) == (WORKING, "[9, 9, 9]"), done.stderr


def test_a_program_read_from_stdin_runs_ranks() -> None:
    done = run_python("-", typed=TYPED + "print(ferrodist.run(work, ranks=3))\n")
    *lines, result = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert (sorted(lines), result) == (WORKING, "[9, 9, 9]")


def test_functions_of_a_script_run_on_ranks_from_the_prompt_after_it(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TYPED + "print('the script is done', flush=True)\n")
    done = run_python("-i", str(script), typed="ferrodist.run(work, ranks=3)\n")
    first, *lines, result = done.stdout.splitlines()
    assert first == "the script is done"  # once: ranks do not run it again
    assert (sorted(lines), result) == (WORKING, "[9, 9, 9]"), done.stderr


def test_after_a_script_that_failed_the_world_of_one_is_there_at_the_prompt(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import ferrodist\nferrodist.init()\nraise ValueError('in the script')\n")
    done = run_python("-i", str(script), typed="ferrodist.allreduce(7)\n")
    assert done.stdout == "7\n", done.stderr


BEGINS_A_LINE = """
import sys, time, ferrodist

def speak(backend):
    if backend.rank == 0:
        sys.stdout.write("begun by rank 0")
        sys.stdout.flush()
    ferrodist.barrier()
    if backend.rank == 1:
        print("a whole line", flush=True)
        time.sleep(0.5)  # longer than lines are held
    ferrodist.barrier()

ferrodist.run(speak, ranks=2)
"""


def test_a_line_is_not_torn_that_rank_0_has_only_begun() -> None:
    done = run_python("-", typed=BEGINS_A_LINE)
    assert done.stdout.splitlines() == ["begun by rank 0", "rank 1: a whole line"]


class Prompt:
    """The prompt of a Python that has a terminal."""

    def __init__(self, *options: str) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, *options], ENVIRONMENT | {"TERM": "dumb"})
        self.hear(">>> ")

    def type(self, text: str) -> str:
        """Type lines, and return what is shown up to the next prompt, without what was typed."""
        shown = ""
        for line in text.splitlines():
            os.write(self._terminal, f"{line}\n".encode())
            shown = self.hear(">>> ", "... ").partition("\n")[2]
        return shown

    def hear(self, *ends: str) -> str:
        shown, deadline = "", time.monotonic() + LIMIT
        while not shown.endswith(ends):
            ready, _, _ = select.select([self._terminal], [], [], deadline - time.monotonic())
            assert ready, f"no answer after {shown!r}"
            shown += os.read(self._terminal, 65536).decode().replace("\r\n", "\n")
        return shown.removesuffix(">>> ").removesuffix("... ")

    def interrupt(self) -> str:
        """Press Ctrl-C."""
        os.write(self._terminal, b"\x03")
        return self.hear(">>> ")

    def close(self) -> None:
        os.close(self._terminal)  # which is the end of the session
        os.waitpid(self.pid, 0)


@pytest.fixture
def prompt() -> Iterator[Prompt]:
    opened = Prompt("-q")
    yield opened
    opened.close()


def test_a_prompt_on_a_terminal_shows_what_ranks_print(prompt) -> None:
    prompt.type(TYPED)
    *lines, result = prompt.type("ferrodist.run(work, ranks=3)").splitlines()
    assert (sorted(lines), result) == (WORKING, "[9, 9, 9]")


def test_an_error_at_the_prompt_does_not_end_the_world_of_one(prompt) -> None:
    prompt.type("import ferrodist")
    assert prompt.type("ferrodist.init()") == "<SharedMemoryBackend rank 0 of 1>\n"
    assert "ZeroDivisionError" in prompt.type("1 / 0")
    assert prompt.type("ferrodist.allreduce(7)") == "7\n"


def test_ctrl_c_at_the_prompt_ends_the_ranks_and_not_the_prompt(prompt) -> None:
    prompt.type("import os, threading, ferrodist")
    prompt.type(
        "def wait(backend):\n"
        "    print('pid', os.getpid())\n"
        "    ferrodist.barrier()\n"
        "    print('>>> ' if backend.rank == 0 else '', end='', flush=True)\n"
        "    threading.Event().wait(600)\n\n"
    )
    shown = prompt.type("ferrodist.run(wait, ranks=3)")  # rank 0 shows a prompt: all are there
    assert "KeyboardInterrupt" in prompt.interrupt()
    assert all(map(has_ended, map(int, re.findall(r"pid (\d+)", shown))))
    assert children_of(prompt.pid) == []
    assert prompt.type("ferrodist.run(lambda backend: backend.rank, ranks=2)") == "[0, 1]\n"
