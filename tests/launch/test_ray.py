"""ferrodist.run on a Ray cluster: two nodes that Ray pretends, on this host.

Ray has an environment of its own, so what a test runs is a script, which prints what it found.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ferrodist
from commands import are_gone
from ferrodist import BackendUnavailable, InvalidArgument
from ferrodist.launch import ray_actors, ray_cluster
from ferrodist.launch.doctor import engines, probes

PYTHON = Path(__file__).parents[2] / ".venv/peers/ray/bin/python"
LIMIT = 100.0
pytestmark = pytest.mark.timeout(150)

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
HEAD = """
import json, os, signal, sys, time
import numpy as np
import ray
import ferrodist

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

def attempt(fn, *args, **options):
    try:
        return ferrodist.run(fn, *args, cluster="ray", **options)
    except Exception as error:  # all of it is printed, and the tests look at it
        facts = {name: getattr(error, name, None) for name in ("rank", "missing", "how")}
        notes, cause = getattr(error, "__notes__", []), str(error.__cause__)
        return dict(facts, kind=type(error).__name__, text=str(error), notes=notes, cause=cause)

def groups_left():
    return [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]

def tell(**found):
    print("found " + json.dumps(found), flush=True)
"""


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which no outer launcher is taken for Ray's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FERRODIST_")}
    return kept | more


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there; 'make test' makes it, where there is a Ray")
    command = [str(PYTHON), "-c", CLUSTER]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as cluster:
        yield cluster.stdout.readline().strip()
        cluster.stdin.close()
        cluster.wait(60)


@pytest.fixture
def command(address: str, tmp_path: Path) -> Callable[[str], list[str]]:
    """Give what makes a command of the code of a script; it calls ``tell`` with what it found."""

    def make(code: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(code))
        return [str(PYTHON), str(path), address]

    return make


@pytest.fixture
def found_by(command: Callable[[str], list[str]]) -> Callable[..., tuple[dict[str, Any], str]]:
    """Give what runs a script and returns what it tells, and the rest of its output."""

    def run(code: str, **more: str) -> tuple[dict[str, Any], str]:
        done = subprocess.run(
            command(code),
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = {}
        for line in done.stdout.splitlines():
            if line.startswith("found "):
                found |= json.loads(line.removeprefix("found "))
        return found, done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_a_job_on_two_nodes_and_one_that_loses_a_rank(found_by):
    found, output = found_by("""
        def work(backend, factor):
            print("this is rank", backend.rank)
            print("an error of rank", backend.rank, file=sys.stderr)
            os.system(f"echo a child of rank {backend.rank}")
            total = ferrodist.allreduce(np.full(3, factor * 10**backend.rank))  # names no backend
            node = ray.get_runtime_context().get_node_id()
            return [total.tolist(), type(backend).__name__, backend.local_rank, node, os.getpid()]

        def lose(backend):
            ferrodist.barrier()
            if backend.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                ferrodist.allreduce(1.0)
            except ferrodist.RankLost as error:
                print("noticed that", error.rank, "is lost")
                raise

        whole = attempt(work, 4, args=(7,), placement="spread")
        lost = attempt(lose, 4)
        tell(whole=whole, lost=lost, groups=groups_left())
        """)
    totals, kinds, local_ranks, nodes, pids = zip(*found["whole"], strict=True)
    assert totals == ([7777] * 3,) * 4
    assert kinds == ("HybridBackend",) * 4
    assert local_ranks == (0, 1, 0, 1)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    lines = output.splitlines()
    assert {"this is rank 0", "an error of rank 0", "a child of rank 0"} <= {*lines}
    for rank in (1, 2, 3):
        for words in ("this is", "an error of", "a child of"):
            assert f"rank {rank}: {words} rank {rank}" in lines
    lost = found["lost"]
    assert (lost["kind"], lost["rank"]) == ("RankLost", 2)
    assert "died at once, as by SIGKILL" in lost["text"]
    assert "(pid " in lost["text"]
    assert sum(line.endswith("noticed that 2 is lost") for line in lines) in (2, 3)  # 1 and 3 alike
    assert found["groups"] == []
    assert are_gone(list(pids), 5)


@pytest.mark.slow
@pytest.mark.long
def test_ranks_end_as_on_one_host(found_by):
    found, _ = found_by("""
        def broken(backend):
            if backend.rank == 1:
                raise ValueError("bad file")
            return ferrodist.allreduce(1.0)

        def leave(backend):
            ferrodist.barrier()
            if backend.rank == 1:
                sys.exit(3)
            return ferrodist.allreduce(1.0)

        import threading
        tell(
            broken=attempt(broken, 3),
            left=attempt(leave, 3),
            late=attempt(lambda backend: time.sleep(100 * (backend.rank % 2)), 4, timeout=25),
            unpicklable=attempt(lambda backend: threading.Lock(), 1),
            nothing=attempt(lambda backend: None, 2),
            default=attempt(lambda backend: backend.world_size, resources={"CPU": 2}),
            groups=groups_left(),
        )
        """)
    broken = found["broken"]
    assert (broken["kind"], broken["text"], broken["notes"]) == (
        "ValueError",
        "bad file",
        ["on rank 1"],
    )
    assert 'raise ValueError("bad file")' in broken["cause"]
    assert (found["left"]["kind"], found["left"]["rank"]) == ("RankLost", 1)
    assert "ended with exit code 3 without a result" in found["left"]["text"]
    assert found["late"]["kind"] == "CollectiveTimeout"
    assert found["late"]["missing"] == [1, 3]
    assert "run: rank 0 returned a lock that cannot be pickled" in found["unpicklable"]["text"]
    assert found["nothing"] == [None, None]
    assert found["default"] == [2, 2]
    assert found["groups"] == []


@pytest.mark.slow
@pytest.mark.long
def test_too_few_resources_say_what_is_free(found_by):
    found, output = found_by(
        """
        nothing = lambda backend: None
        tell(
            many=attempt(nothing, 9),
            kind=attempt(nothing, 2, resources={"GPU": 1, "CPU": 0.5}, timeout=1),
            apart=attempt(nothing, 3, placement="strict_spread"),
            groups=groups_left(),
        )
        """,
        FERRODIST_JOIN_TIMEOUT="3",
        FERRODIST_LOG_WAIT_AFTER="1",
    )
    assert {found[name]["kind"] for name in ("many", "kind", "apart")} == {"RendezvousError"}
    many = found["many"]["text"]
    assert "no room within 3 s for 9 ranks with 1 CPU each (pack)" in many
    assert "the cluster has room for 4 when nothing else runs; free now: 4 CPU, " in many
    assert "_group_" not in many
    assert "FERRODIST_JOIN_TIMEOUT" in many
    assert "within 1 s for 2 ranks with 0.5 CPU, 1 GPU each" in found["kind"]["text"]
    assert "has room for 2 when" in found["apart"]["text"]
    assert "run waits for Ray to place 9 ranks" in output
    assert found["groups"] == []


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_ends_the_ranks_and_leaves_nothing(command):
    code = """
        def work(backend):
            print("pid", os.getpid(), flush=True)
            ferrodist.barrier()
            time.sleep(1000)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            ferrodist.run(work, 3, cluster="ray")
        except KeyboardInterrupt:
            tell(groups=groups_left())
            sys.stdin.read()
        """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(code), stdin=pipe, stdout=pipe, text=True, env=environment()
    ) as driver:
        pids = [int(driver.stdout.readline().rpartition(" ")[2]) for _ in range(3)]
        driver.send_signal(signal.SIGINT)
        assert driver.stdout.readline() == 'found {"groups": []}\n'
        assert are_gone(pids, 10)
        driver.stdin.close()


@pytest.mark.slow
@pytest.mark.long
def test_ranks_die_with_the_process_that_called_run(command):
    code = """
        def work(backend):
            print("pid", os.getpid(), flush=True)
            time.sleep(1000)

        ferrodist.run(work, 3, cluster="ray")
        """
    with subprocess.Popen(
        command(code), stdout=subprocess.PIPE, text=True, env=environment()
    ) as driver:
        pids = [int(driver.stdout.readline().rpartition(" ")[2]) for _ in range(3)]
        driver.kill()
        assert are_gone(pids, 30)


@pytest.mark.slow
@pytest.mark.long
def test_much_output_arrives_whole_and_in_order(found_by):
    found, output = found_by("""
        def work(backend):
            for number in range(20_000):
                print(f"{backend.rank}-{number}")

        tell(done=attempt(work, 2))
        """)
    assert found["done"] == [None, None]
    lines = output.splitlines()
    assert [one for one in lines if one.startswith("0-")] == [f"0-{n}" for n in range(20_000)]
    assert [one for one in lines if one.startswith("rank 1: ")] == [
        f"rank 1: 1-{n}" for n in range(20_000)
    ]


@pytest.mark.slow
@pytest.mark.long
def test_the_doctor_sees_the_cluster(address):
    probe = [str(PYTHON), "-P", probes.__file__, "ray"]
    outcome = engines.run_probe(probe, environment(RAY_ADDRESS=address), 30.0)
    assert outcome.error == ""
    assert "a cluster of 2 nodes, free: 4 CPU, " in engines._details("ray", outcome.facts)


# -- without a cluster -----------------------------------------------------------------------------


class PretendedRay:
    """A Ray that nobody has connected to."""

    def is_initialized(self) -> bool:
        return False


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'ferrodist\[ray\]'"):
        ferrodist.run(print, 2, cluster="ray")


def test_a_ray_that_is_not_initialized_says_what_to_call(monkeypatch):
    monkeypatch.setattr(ray_cluster, "import_ray", PretendedRay)
    with pytest.raises(ferrodist.NotInitialized, match=r"call ray\.init\(address='auto'\)"):
        ferrodist.run(print, 2, cluster="ray")


def test_arguments_of_a_cluster_are_checked(monkeypatch):
    monkeypatch.setattr(PretendedRay, "is_initialized", lambda self: True)
    monkeypatch.setattr(ray_cluster, "import_ray", PretendedRay)
    for resources in ({}, {"CPU": 0}, {"CPU": True}, {1: 1}, {"CPU": "2"}, 4):
        with pytest.raises(InvalidArgument, match="expected what each rank needs"):
            ferrodist.run(print, 2, cluster="ray", resources=resources)
    with pytest.raises(InvalidArgument, match="expected one of pack, spread"):
        ferrodist.run(print, 2, cluster="ray", placement="scatter")
    with pytest.raises(InvalidArgument, match="expected 'ray', or None"):
        ferrodist.run(print, 2, cluster="dask")
    with pytest.raises(InvalidArgument, match="cluster='ray'"):
        ferrodist.run(print, 2, resources={"CPU": 1})


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("pid: 7\nWorker exits with an exit code 3.", r"\(pid 7 on n1\) ended with exit code 3"),
        ("The actor is unavailable: RPC error", r"\(on n1\) is out of reach: its node died"),
        ("creation task, (pid=7)\nKeyError: 'x'", r"\(pid 7 on n1\) died; Ray says: KeyError: 'x'"),
    ],
)
def test_an_actor_that_died_is_a_lost_rank(text, how):
    with pytest.raises(ferrodist.RankLost, match=f"rank 3 {how}"):
        raise ray_cluster._lost(3, "n1", RuntimeError(text))


PRINTS = """
import ctypes, os
from ferrodist.launch import ray_actors

sent = []
with ray_actors._sent_on(1, lambda file, data, while_waiting: sent.append(data)):
    print("first", flush=True)
    much = b"0123456789abcde\\n" * (1 << 18)
    for _ in range(2):  # a PyDLL keeps the GIL
        assert ctypes.PyDLL(None).write(1, much, len(much)) == len(much)
    os.system("echo of a child")
    print("last")
whole = b"".join(sent)
assert whole == b"first\\n" + 2 * much + b"of a child\\nlast\\n", len(whole)
print("all of it", len(whole))
"""


def test_native_code_prints_as_much_as_it_likes_while_it_holds_the_interpreter():
    command = [sys.executable, "-c", PRINTS]
    output = subprocess.check_output(command, text=True, timeout=60, env=environment())
    assert output == f"all of it {6 + 2 * (4 << 20) + 16}\n"


@pytest.fixture
def output_file() -> Iterator[int]:
    """Give a file that stands for stdout."""
    file = os.open(os.devnull, os.O_WRONLY)
    yield file
    os.close(file)


def held_nbytes(file: int) -> int:
    """How much room a file takes, however long it is."""
    return os.fstat(file).st_blocks * 512


def can_make_holes() -> bool:
    with tempfile.TemporaryFile() as file:
        start, length = ctypes.c_int64(0), ctypes.c_int64(1 << 20)
        punch_hole, keep_size = 2, 1
        fallocate = ctypes.CDLL(None).fallocate
        return bool(fallocate(file.fileno(), punch_hole | keep_size, start, length) == 0)


needs_holes = pytest.mark.skipif(
    not can_make_holes(), reason="the file system of TMPDIR cannot make holes in a file"
)


@needs_holes
def test_output_that_was_sent_takes_no_room(output_file):
    held: list[int] = []
    sent: list[bytes] = []
    is_written, is_sent = threading.Event(), threading.Event()
    lines = b"".join(b"%d\n" % number for number in range(1 << 20))

    def write(file: int, data: bytes, while_waiting: Callable[[], None]) -> None:
        assert is_written.wait(30)
        sent.append(data)
        num_waiting = len(lines) - sum(map(len, sent))
        held.append(held_nbytes(file) - num_waiting)
        if not num_waiting:
            is_sent.set()

    with ray_actors._sent_on(output_file, write):
        assert os.write(output_file, lines) == len(lines)
        is_written.set()
        assert is_sent.wait(30)
    assert b"".join(sent) == lines
    assert len(held) >= 20
    assert max(held) <= 1 << 16  # the file system's own


@needs_holes
def test_output_that_nobody_takes_is_bounded_and_what_was_dropped_is_said(output_file, monkeypatch):
    """The oldest goes, so that the end, which says how it ended, is there."""
    monkeypatch.setattr(ray_actors, "_MOST_SPOOLED", 1 << 20)
    sent: list[bytes] = []
    is_held, may_go_on = threading.Event(), threading.Event()

    def write(file: int, data: bytes, while_waiting: Callable[[], None]) -> None:
        is_held.set()
        while not may_go_on.wait(0.001):
            while_waiting()
        while_waiting()
        sent.append(data)

    with ray_actors._sent_on(output_file, write):
        try:
            os.write(output_file, b"first, and")  # not a whole line
            assert is_held.wait(30)
            for turn in range(10):
                lines = b"".join(b"%d %d\n" % (turn, number) for number in range(1 << 16))
                os.write(output_file, lines)
                end = time.monotonic() + 30
                while held_nbytes(output_file) > (1 << 20) + (1 << 16):
                    assert time.monotonic() < end
            os.write(output_file, b"last\n")
            length = os.fstat(output_file).st_size
        finally:
            may_go_on.set()
    first, note, *rest = b"".join(sent).splitlines(keepends=True)
    assert first == b"first, and\n"
    found = re.fullmatch(rb"\[ferrodist: (\d+) bytes were dropped here: printed .*\]\n", note)
    assert int(found[1]) + len(b"first, and") + sum(map(len, rest)) == length
    assert re.fullmatch(rb"\d+ \d+\n", rest[0])
    assert rest[-2:] == [b"9 %d\n" % ((1 << 16) - 1), b"last\n"]


def test_a_board_holds_back_ranks_that_print_faster_than_anybody_reads(monkeypatch):
    import asyncio

    async def scenario() -> list[int]:
        board = ray_actors.Board()
        await board.write((0, 1, b"x" * ray_actors._MOST_NBYTES))
        late = asyncio.create_task(board.write((1, 1, b"y")))
        await asyncio.sleep(0)
        counts = [len(await board.read())]
        await late
        await board.close()
        return [*counts, len(await board.read()), len(await board.read())]

    assert asyncio.run(scenario()) == [1, 1, 0]
