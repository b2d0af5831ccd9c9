"""torch's own tests of a backend, on ferrodist and beside it on Gloo: ``make torch-suite``.

``torch.testing._internal.distributed.distributed_test`` is in every wheel of torch. It would start
new processes for each test; here the ranks of a world last, and each test runs in them in a group
of its own. Tests that torch has for Gloo alone run on ferrodist, too: the file is read as if for
Gloo, and then told the other name.

The outcome of every test is compared with ``suite.json``; ``--record`` writes that file anew.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).with_name("suite.json")
WORLDS = (3, 4, 8)
BACKENDS = ("gloo", "ferrodist")

_SECONDS = 90.0  # for a test, before the world is ended and started again
_MODEL_BY_NAME = "test_accumulate_gradients_no_sync"
_GROUP_SECONDS = 30  # the timeout of a group, where torch has no other for the test


_REFUSED_BY_TORCH = "torch refuses monitored_barrier for every name but gloo"
ONLY_GLOO = {
    "test_monitored_barrier_gloo": _REFUSED_BY_TORCH,
    "test_monitored_barrier_gloo_subgroup": _REFUSED_BY_TORCH,
    "test_monitored_barrier_wait_all_ranks": _REFUSED_BY_TORCH,
    "test_monitored_barrier_failure_order": _REFUSED_BY_TORCH,
}
"""Tests that Gloo may pass and no other backend can, and why."""


class Outcome(NamedTuple):
    """What became of a test: passed, failed or skipped, and why; ``gloo`` counts groups of Gloo."""

    status: str
    why: str = ""
    gloo: int = 0
    seconds: float = 0.0


# -- one rank -------------------------------------------------------------------------------------


def _load(backend: str, world_size: int) -> Any:
    """Import torch's tests for a world: what they skip is decided while they are imported."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), TEMP_DIR=tempfile.mkdtemp())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for folder in ("barrier", "test_dir", "init_dir"):
        os.mkdir(os.path.join(os.environ["TEMP_DIR"], folder))
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed import distributed_test

    distributed_test.BACKEND = backend
    gc.collect()
    gc.freeze()  # so that ranks, which collect after every test, look at what the tests made
    return distributed_test


def _test_case(module: Any) -> type[Any]:
    return type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def _run_rank(rank: int, module: Any, pipe: Connection) -> None:
    """Run tests as one rank, as the pipe says, until it ends."""
    import torch

    torch.set_num_threads(1)
    num_gloo = _count_gloo_groups()
    for file in (1, 2):  # tests, and torch's profiler, write there
        os.dup2(
            os.open(os.environ.get("SUITE_OUTPUT", os.devnull), os.O_WRONLY | os.O_APPEND), file
        )
    case = _test_case(module)
    while True:
        try:
            name, meeting, port = pipe.recv()
        except EOFError:
            os._exit(0)
        os.environ["MASTER_PORT"] = str(port)  # for tests that join a second time, by env://
        num_gloo.clear()
        started = time.monotonic()
        status, why = _run_test(case, module, name, rank, meeting)
        pipe.send(Outcome(status, why, len(num_gloo), time.monotonic() - started))
        pipe.recv()  # all are over: who leaves earlier would be missed by those still at it
        _clean_up()


def _run_test(case: Any, module: Any, name: str, rank: int, meeting: str) -> tuple[str, str]:
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    test, backend = case(name), module.BACKEND
    test.rank, test.file_name = rank, meeting
    module.Barrier.barrier_id = 0
    try:
        dist.init_process_group(
            module.BACKEND,
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=int(test.world_size),
            timeout=timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, _GROUP_SECONDS)),
        )
        set_rng_seed()
        if name.startswith(_MODEL_BY_NAME):
            module.BACKEND = "gloo"  # for which model it makes, not for what it runs on
        getattr(test, name)()
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped)
    except SystemExit as ended:
        if ended.code in reasons:
            return "skipped", reasons[ended.code]
        return "failed", f"exit {ended.code}"
    except BaseException as error:  # noqa: BLE001 -- it is reported
        lines = "".join(traceback.format_exception(error)).strip().splitlines()
        return "failed", f"rank {rank}: {type(error).__name__}: {error}\n" + "\n".join(lines[-40:])
    finally:
        module.BACKEND = backend
    return "passed", ""


def _clean_up() -> None:
    """Undo what a test leaves behind for the next one in the same process."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    dist.set_debug_level(dist.DebugLevel.OFF)


def _count_gloo_groups() -> list[int]:
    """Let every group of Gloo that is made be counted."""
    from torch.distributed import distributed_c10d

    made: list[int] = []
    original = distributed_c10d.ProcessGroupGloo

    class Counted(original):  # type: ignore[misc, valid-type] # a class of torch's, without types
        def __init__(self, *args: Any, **named: Any) -> None:
            made.append(1)
            super().__init__(*args, **named)

    distributed_c10d.ProcessGroupGloo = Counted
    return made


# -- a world --------------------------------------------------------------------------------------


class World:
    """Ranks that last from test to test; after a test that fails they are new ones."""

    def __init__(self, module: Any, size: int) -> None:
        self._module = module
        self._size = size
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, name: str) -> Outcome:
        """Run a test on all ranks; the first rank that failed says why."""
        if not self._ranks:
            self._start()
        temporary = Path(os.environ["TEMP_DIR"])
        for file in (temporary / "barrier").iterdir():
            file.unlink()
        meeting, port = tempfile.mktemp(dir=temporary), _free_port()
        for _, pipe in self._ranks:
            pipe.send((name, meeting, port))
        outcomes = self._collect()
        failed = [one for one in outcomes if one.status == "failed"]
        if failed:
            self.close()
        for _, pipe in self._ranks:
            pipe.send("over")
        skipped = [one for one in outcomes if one.status == "skipped"]
        worst = (failed or skipped or outcomes)[0]
        return worst._replace(gloo=max(one.gloo for one in outcomes))

    def _collect(self) -> list[Outcome]:
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        outcomes, end = [], time.monotonic() + _SECONDS
        while pipes:
            ready = wait(list(pipes), max(0.0, end - time.monotonic()))
            if not ready:
                late = sorted(pipes.values())
                return [Outcome("failed", f"ranks {late} hang"), *outcomes]
            for pipe in ready:
                rank = pipes.pop(pipe)  # type: ignore[call-overload] # wait() also takes sockets
                try:
                    outcomes.append(pipe.recv())  # type: ignore[union-attr] # the same
                except (EOFError, OSError):
                    process = self._ranks[rank][0]
                    process.join(5)
                    code = process.exitcode
                    outcomes.insert(0, Outcome("failed", f"rank {rank} ended with {code}"))
                    end = min(end, time.monotonic() + 10)
        return outcomes

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(self._size):
            here, there = context.Pipe()
            process = context.Process(
                target=_run_rank, args=(rank, self._module, there), daemon=True
            )
            process.start()
            there.close()
            self._ranks.append((process, here))

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def names_of(module: Any) -> list[str]:
    """List the tests for tensors in CPU memory."""
    names = dir(module.DistributedTest._DistTestBase)
    return [name for name in names if name.startswith("test_") and "cuda" not in name]


def run_world(backend: str, size: int, wanted: Iterable[str] = ()) -> Iterator[tuple[str, Outcome]]:
    """Run tests, all of them if none are named, and yield what became of each."""
    module = _load(backend, size)
    world = World(module, size)
    try:
        for name in wanted or names_of(module):
            outcome = world.run(name)
            if backend != "gloo" and outcome.gloo and not _asks_for_gloo(module, name):
                why = f"{outcome.gloo} groups of Gloo were made, which the test does not ask for"
                outcome = outcome._replace(status="failed", why=why)
            yield name, outcome
    finally:
        world.close()


def _asks_for_gloo(module: Any, name: str) -> bool:
    """Tell whether a test names Gloo itself, or a helper does that it calls."""
    base = module.DistributedTest._DistTestBase
    source = inspect.getsource(inspect.unwrap(getattr(base, name)))
    helpers = [helper for helper in dir(base) if helper.startswith("_") and helper in source]
    sources = [source, *(inspect.getsource(getattr(base, one)) for one in helpers if one[1] != "_")]
    return any("gloo" in text.lower() for text in sources)


# -- the chore ------------------------------------------------------------------------------------


def _run_in_new_process(backend: str, size: int, names: list[str]) -> dict[str, Outcome]:
    """Run a world in a process of its own, which imports torch's tests for it."""
    command = [sys.executable, __file__, "--one", backend, str(size), *names]
    found = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                facts = json.loads(line)
                found[facts["name"]] = Outcome(*facts["outcome"])
    if process.returncode:
        raise SystemExit(f"{backend} in a world of {size} ended with {process.returncode}")
    return found


def _report(size: int, outcomes: dict[str, dict[str, Outcome]]) -> None:
    for backend, found in outcomes.items():
        counts = Counter(outcome.status for outcome in found.values())
        seconds = sum(outcome.seconds for outcome in found.values())
        words = ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped"))
        print(f"world of {size}, {backend:<9}  {words}  in {seconds:.0f} s")
        for name, outcome in found.items():
            if outcome.status == "failed":
                why = ONLY_GLOO.get(name) if backend != "gloo" else None
                print(f"    failed  {name}: {(why or outcome.why).splitlines()[0][:150]}")
    ours = outcomes.get("ferrodist", {})
    skips = Counter(one.why.splitlines()[0] for one in ours.values() if one.status == "skipped")
    for why, count in skips.most_common():
        print(f"    skipped {count:>3}  {why[:120]}")


def _differences(size: int, outcomes: dict[str, dict[str, Outcome]]) -> list[str]:
    """List what is worse than Gloo, or other than recorded."""
    recorded = json.loads(RECORD.read_text()).get(str(size), {}) if RECORD.exists() else {}
    wrong = []
    for name, ours in outcomes.get("ferrodist", {}).items():
        gloo = outcomes.get("gloo", {}).get(name)
        is_worse = gloo is not None and gloo.status == "passed" and ours.status != "passed"
        if is_worse and name not in ONLY_GLOO:
            wrong.append(f"world of {size}: Gloo passes {name}, ferrodist {ours.status}")
        before = recorded.get(name, {}).get("ferrodist")
        if before is not None and before != ours.status:
            wrong.append(f"world of {size}: {name} {ours.status}, recorded is {before}")
    return wrong


def main() -> None:
    """Run the worlds that are asked for, all of them if none are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--record", action="store_true", help="write what is found to the list")
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "WORLD"), help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="tests; all of them if none are named")
    options = parser.parse_args()
    if options.one:
        for name, outcome in run_world(options.one[0], int(options.one[1]), options.names):
            print(json.dumps({"name": name, "outcome": outcome}), flush=True)
        return
    wrong: list[str] = []
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for size in map(int, options.worlds.split(",")):
        outcomes = {
            backend: _run_in_new_process(backend, size, options.names)
            for backend in options.backends.split(",")
        }
        _report(size, outcomes)
        if options.verbose:
            for found in outcomes.values():
                for name, one in found.items():
                    if one.status == "failed":
                        print(f"\n---- {name}\n{one.why}")
        wrong += _differences(size, outcomes)
        rows = record.setdefault(str(size), {})
        for backend, found in outcomes.items():
            for name, one in found.items():
                rows.setdefault(name, {})[backend] = one.status
    if options.record:
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    elif wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
