"""What a process runs: by this, jobs without a name of their own are told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ferrodist.rendezvous.launchers import read_plain, script_of_unnamed_job
from ferrodist.rendezvous.script import MAX_SCRIPT, is_same_script, running_script

PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SHOW = "from ferrodist.rendezvous.script import running_script\nprint(running_script())\n"


def shown(*command: str, folder: Path, text: str | None = None) -> str:
    run = [sys.executable, *command]
    done = subprocess.run(run, cwd=folder, input=text, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(f"import os\nos.makedirs('away', exist_ok=True)\nos.chdir('away')\n{SHOW}")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["program.py"],
        ["link.py"],
        ["-m", "program"],
        ["-m", "pdb", "-c", "continue", "-c", "quit", "program.py"],
        ["spawns.py"],
    ],
    ids=["script", "link", "module", "debugger", "multiprocessing"],
)
def test_a_script_has_one_path_however_it_is_started_and_wherever_it_goes(script, command):
    folder = script.parent
    (folder / "link.py").symlink_to(script)
    (folder / "spawns.py").write_text(
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn')\n"
        "    import program_of_child\n"
        "    child = multiprocessing.Process(target=program_of_child.show)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    body = SHOW.replace("print", "\n    print").replace("from", "def show():\n    from")
    (folder / "program_of_child.py").write_text(body)
    expected = folder / ("spawns.py" if command == ["spawns.py"] else "program.py")
    found = [line for line in [shown(*command, folder=folder)] if not line.startswith(">")]
    assert found == [str(expected)]


@pytest.mark.slow
def test_a_script_under_a_profiler_that_has_gone_elsewhere_has_its_name(script):
    command = ["-m", "cProfile", "-o", "/dev/null", "program.py"]
    assert shown(*command, folder=script.parent) == "program.py"
    assert is_same_script("program.py", str(script), on_one_host=True)


@pytest.mark.slow
def test_what_is_no_script_says_so(tmp_path):
    assert shown("-c", SHOW, folder=tmp_path) == "python -c"
    assert shown(folder=tmp_path, text=SHOW) == "standard input"
    assert shown("-", folder=tmp_path, text=SHOW) == "standard input"


def test_paths_count_on_one_host_and_names_between_hosts():
    ours, theirs = "/home/a/train.py", "/home/b/train.py"
    assert not is_same_script(ours, theirs, on_one_host=True)
    assert is_same_script(ours, theirs, on_one_host=False)
    assert not is_same_script(ours, "/home/a/eval.py", on_one_host=False)
    assert not is_same_script(ours, "python -c", on_one_host=True)


def test_of_a_long_path_the_end_is_kept(tmp_path, monkeypatch):
    path = tmp_path.joinpath(*["é" * 100] * 3, "train.py")
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(sys, "argv", [str(path)])
    assert running_script().endswith("é/train.py")
    assert len(running_script().encode()) <= MAX_SCRIPT


def test_a_job_that_its_user_names_has_no_script_to_compare():
    unnamed, named = read_plain(PLAIN), read_plain(PLAIN | {"FERRODIST_JOB": "mine"})
    assert (unnamed.name, unnamed.script) == ("plain-29500", running_script())
    assert (named.name, named.script) == ("plain-29500-mine", "")
    inherited = PLAIN | {"FERRODIST_JOB": "of ferrodist run", "FERRODIST_RANK": "0"}
    assert read_plain(inherited).name == "plain-29500"
    assert script_of_unnamed_job(PLAIN) == running_script()
    assert script_of_unnamed_job(PLAIN | {"FERRODIST_JOB": "mine"}) == "mine"
    assert script_of_unnamed_job(PLAIN | {"TORCHELASTIC_RUN_ID": "3"}) == ""
    assert script_of_unnamed_job({"RANK": "0", "WORLD_SIZE": "2"}) == ""
