# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist bench``: latency and bandwidth of your backends, on your machine.

The command starts the ranks of one backend after the other; each rank runs this file as a module.
Nothing is compared with other libraries here: benchmarks/compare does that.
"""

from __future__ import annotations

import datetime
import gc
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import ferrodist
from ferrodist.backends.registry import backend_names
from ferrodist.launch.chart import Point, line_chart
from ferrodist.launch.machine import describe_machine, measure_load, usable_cores

Array = np.ndarray[Any, Any]
TimedCall = Callable[[], object]
Result = dict[str, Any]

KB, MB = 1 << 10, 1 << 20
CALLS = (
    "allreduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "scan", "send_recv", "barrier",
)  # fmt: skip
_DEFAULT_CALLS = ("allreduce", "broadcast", "all_gather", "reduce_scatter", "send_recv", "barrier")
_DEFAULT_SIZES = "8,1KB,64KB,1MB,16MB"
_UNITS = {"": 1, "k": KB, "m": MB, "g": KB * MB}
_LEAST_SIZE = 8
_SECONDS = 0.25  # for all repeats of one call and size
_FEWEST, _MOST = 5, 20_000  # repeats
_COMPARISON = "to compare with MPI and Gloo: make bench, in a checkout (benchmarks/compare)"


def parse_sizes(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    """Read sizes in bytes, such as "8,64KB,1MB"."""
    return [_parse_size(word.strip()) for word in text.split(",")] if text else []


def _parse_size(word: str) -> int:
    match = re.fullmatch(r"(\d+) ?([kmg]?)b?", word.lower())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < _LEAST_SIZE:
        raise click.BadParameter(f"{word!r} must be a size of 8 bytes or more, such as 64KB")
    return size


_ENGINES = ("mpi", "gloo", "nccl")  # measured if they are named: not every machine has them
_ENGINE_OF_ARRAYS = {"nccl": "gloo"}  # NCCL itself runs calls on tensors of a GPU only
_OWN = "shared memory"  # of ferrodist: it carries what an engine is not needed for, on one host


def size_name(nbytes: int) -> str:
    for unit, name in ((KB * MB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def parse_names(
    known: Callable[[], Iterable[str]], left_out: Sequence[str] = ()
) -> Callable[[click.Context, click.Parameter, str | None], list[str]]:
    """Return a parser of lists of known names; no list means all of them but those left out."""

    def parse(context: click.Context, option: click.Parameter, text: str | None) -> list[str]:
        names = [word.strip() for word in text.split(",")] if text is not None else []
        if text is None:
            names = [name for name in known() if name not in left_out]
        for name in names:
            if name not in known():
                raise click.BadParameter(f"{name!r} is none of {', '.join(known())}")
        return list(dict.fromkeys(names))

    return parse


def write_text(path: Path, text: str) -> None:
    """Write a file, or end with one line that says why not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), error.strerror or str(error)) from error


def _in_a_folder(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}")
    return path


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.option(
    "-n", "--ranks", metavar="N", type=click.IntRange(min=2),
    default=lambda: max(2, usable_cores()), show_default="one per core",
    help="Number of ranks, at least 2.",
)  # fmt: skip
@click.option(
    "--backend", "backends", metavar="NAME,...",
    callback=parse_names(lambda: [name for name in backend_names() if name != "shm"], _ENGINES),
    help="Which backends, engines (gloo, mpi, nccl) too.  [default: all but engines]",
)  # fmt: skip
@click.option(
    "--calls", metavar="NAME,...", callback=parse_names(lambda: CALLS),
    default=",".join(_DEFAULT_CALLS),
    help=f"Which calls, of {', '.join(CALLS)}.  [default: {', '.join(_DEFAULT_CALLS)}]",
)  # fmt: skip
@click.option(
    "--sizes", metavar="SIZE,...", callback=parse_sizes, default=_DEFAULT_SIZES, show_default=True,
    help="Sizes in bytes; for all_gather, gather and scatter, per rank.",
)  # fmt: skip
@click.option(
    "--json", "json_file", type=_FILE, callback=_in_a_folder, help="Also write JSON to FILE.",
)  # fmt: skip
@click.option(
    "--chart", type=_FILE, callback=_in_a_folder,
    help="Draw medians as SVG: the first call on all backends, or all calls of one backend.",
)  # fmt: skip
def bench(
    ranks: int,
    backends: list[str],
    calls: list[str],
    sizes: list[int],
    json_file: Path | None,
    chart: Path | None,
) -> None:
    """Measure latency and bandwidth on this machine.

    Times are those of the slowest rank, for float32 arrays with out=. send_recv is half a round
    trip between ranks 0 and 1. The rate is size / median; 1 KB/s is 1000 bytes per second, a size
    of 1KB is 1024 bytes. Gloo and NCCL run large collectives only: the column "by" says where
    ferrodist's shared memory carried the data instead. To compare with MPI and Gloo, run "make
    bench" in a checkout of ferrodist.
    """
    console = Console(highlight=False)
    load = measure_load()
    if load.warning:
        click.secho(f"warning: {load.warning}", fg="yellow", err=True)
    results: list[Result] = []
    failures: dict[str, str] = {}
    for backend in backends:
        try:
            measured = _measure(backend, ranks, calls, sizes)
        except ferrodist.DistributedError as error:
            failures[backend] = str(error)
            console.print(f"{backend} does not run here: {error}", markup=False, soft_wrap=True)
        else:
            results += measured
            console.print(_table(backend, ranks, measured), "")
    if json_file is not None:
        document = {
            "date": datetime.date.today().isoformat(),
            "machine": describe_machine(),
            "ferrodist": ferrodist.__version__,
            "ranks": ranks,
            "load": load._asdict(),
            "results": results,
            "failures": failures,
        }
        write_text(json_file, json.dumps(document, indent=1) + "\n")
    if not results:
        raise click.ClickException("no backend could be measured")
    if chart is not None:
        write_text(chart, _draw(results, ranks))
    console.print(_COMPARISON, markup=False, soft_wrap=True, style="dim")


def _measure(backend: str, ranks: int, calls: list[str], sizes: list[int]) -> list[Result]:
    if backend == "simulated":  # ranks are threads, not processes of a job
        from ferrodist.testing import run_ranks

        return run_ranks(ranks, lambda rank: list(measure_calls(rank, backend, calls, sizes)))[0]
    arguments = json.dumps([backend, calls, sizes])
    module = ["-m", "ferrodist.launch.bench", arguments]
    launcher = [sys.executable, "-m", "ferrodist", "run", "-n", str(ranks)]
    if backend == "mpi":  # whose ranks find each other by its own launcher
        launcher = ["mpiexec", "-n", str(ranks), sys.executable]
    if shutil.which(launcher[0]) is None:
        raise ferrodist.BackendUnavailable(f"there is no {launcher[0]} on PATH")
    command = [*launcher, *module]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        lines = [line for line in lines if not line.endswith(": the same traceback")]
        # What the launcher adds may come before a rank's own words, or after them.
        lines = [line for line in lines if not line.startswith("ferrodist run:")] or lines
        reason = lines[-1] if lines else f"its ranks ended with code {done.returncode}"
        raise ferrodist.RendezvousError(reason)
    results: list[Result] = json.loads(done.stdout.splitlines()[-1])
    return results


def measure_calls(
    backend: ferrodist.Backend, name: str, calls: Sequence[str], sizes: Sequence[int]
) -> Iterator[Result]:
    """Measure all calls on a backend, by size; every rank must do the same, and gets the same."""
    for call in calls:
        for nbytes in sorted(sizes) if call != "barrier" else [0]:
            num_before = _count_engine_calls(backend)
            times = _time_call(backend, call, nbytes)
            by_engine = num_before is None or _count_engine_calls(backend) != num_before
            times.sort()
            at = min(len(times) - 1, int(0.9 * len(times)))
            middle, p90 = _slowest(backend, [statistics.median(times), times[at]])
            yield {
                "backend": name,
                "call": call,
                "nbytes": nbytes,
                "median_us": middle * 1e6,
                "p90_us": p90 * 1e6,
                "bytes_per_second": nbytes / middle,
                "samples": len(times),
                "carried_by": _ENGINE_OF_ARRAYS.get(name, name) if by_engine else _OWN,
            }


def _count_engine_calls(backend: ferrodist.Backend) -> int | None:
    """Return how many collectives an engine beside ferrodist's own transport has run, if any."""
    return getattr(backend, "num_engine_calls", None)


def _time_call(backend: ferrodist.Backend, call: str, nbytes: int) -> list[float]:
    given, got = lengths(call, nbytes, backend.world_size)
    # Pages that were never written are all the same one, and always in the cache.
    make = make_calls(backend, np.ones(given, np.float32), np.ones(got, np.float32))
    function = make[call] if call != "send_recv" or backend.rank < 2 else lambda: None
    (warm,) = _slowest(backend, [statistics.median(_time(function, 3))])
    gc.disable()
    times = _time(function, int(min(max(_SECONDS / max(warm, 1e-9), _FEWEST), _MOST)))
    gc.enable()
    return [seconds / 2 for seconds in times] if call == "send_recv" else times


def _time(function: TimedCall, repeats: int) -> list[float]:
    clock = time.perf_counter
    times = []
    for _ in range(repeats):
        start = clock()
        function()
        times.append(clock() - start)
    return times


def _slowest(backend: ferrodist.Backend, seconds: list[float]) -> list[float]:
    slowest: Array = ferrodist.allreduce(np.array(seconds), backend, ferrodist.ReduceOp.MAX)
    return [float(one) for one in slowest]


def lengths(call: str, nbytes: int, world: int) -> tuple[int, int]:
    """Return the float32 elements of input and output, for at least one per rank."""
    count = max(nbytes // 4 // world, 1) * world
    if call in ("all_gather", "gather"):
        return count, count * world
    if call == "scatter":
        return count * world, count
    return count, count // world if call == "reduce_scatter" else count


def make_calls(backend: ferrodist.Backend, x: Array, out: Array) -> dict[str, TimedCall]:
    """Return the calls on these arrays by name; each leaves its result in ``out``."""
    is_root, peer = backend.rank == 0, 1 - backend.rank
    at_root, from_root = (out, x) if is_root else (None, None)
    same = x if is_root else out  # a broadcast in place

    def ping_pong() -> None:
        if is_root:
            ferrodist.send(x, peer, backend)
        ferrodist.recv(peer, backend, out=out)
        if not is_root:
            ferrodist.send(x, peer, backend)

    return {
        "allreduce": lambda: ferrodist.allreduce(x, backend, out=out),
        "broadcast": lambda: ferrodist.broadcast(same, backend, out=same),
        "reduce": lambda: ferrodist.reduce(x, backend, out=at_root),
        "all_gather": lambda: ferrodist.all_gather(x, backend, out=out),
        "gather": lambda: ferrodist.gather(x, backend, out=at_root),
        "scatter": lambda: ferrodist.scatter(from_root, backend, out=out),
        "reduce_scatter": lambda: ferrodist.reduce_scatter(x, backend, out=out),
        "all_to_all": lambda: ferrodist.all_to_all(x, backend, out=out),
        "scan": lambda: ferrodist.scan(x, backend, out=out),
        "send_recv": ping_pong,
        "barrier": lambda: ferrodist.barrier(backend),
    }


def _table(backend: str, ranks: int, results: list[Result]) -> Table:
    title = f"[bold]{backend}[/], {ranks} ranks"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column("call", style="cyan", no_wrap=True)
    for column in ("size", "median µs", "p90 µs", "rate"):
        table.add_column(column, justify="right", no_wrap=True)
    shows_carrier = any(one["carried_by"] != backend for one in results)
    if shows_carrier:
        table.add_column("by", no_wrap=True)
    last = ""
    for one in results:
        times = [f"{one[name]:,.1f}".replace(",", " ") for name in ("median_us", "p90_us")]
        has_size = one["nbytes"] > 0
        size = size_name(one["nbytes"]) if has_size else ""
        rate = _rate(one["bytes_per_second"]) if has_size else ""
        carrier = [one["carried_by"]] if shows_carrier else []
        table.add_row("" if one["call"] == last else one["call"], size, *times, rate, *carrier)
        last = one["call"]
    return table


def _rate(bytes_per_second: float) -> str:
    """Write a rate in decimal units, as networks and memory are sold."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "KB/s")):
        if bytes_per_second >= unit:
            return f"{bytes_per_second / unit:.3g} {name}"
    return f"{bytes_per_second:.3g} B/s"


def _draw(results: list[Result], ranks: int) -> str:
    """Draw medians by size: of the first call by backend, or by call if there is one backend."""
    sized = [one for one in results if one["nbytes"]]
    first = sized[0]["call"] if sized else "barrier"
    has_one_backend = len({one["backend"] for one in results}) == 1
    lines: dict[str, list[Point]] = {}
    for one in sized:
        if has_one_backend or one["call"] == first:
            name = one["call"] if has_one_backend else one["backend"]
            if one["carried_by"] != one["backend"]:
                name += f" by {one['carried_by']}"
            lines.setdefault(name, []).append((float(one["nbytes"]), one["median_us"]))
    what = results[0]["backend"] if has_one_backend else first
    return line_chart(
        lines,
        title=f"{what} on {ranks} ranks: less is better",
        x_label="bytes",
        y_label="median µs, slowest rank",
        log_x=True,
        log_y=True,
    )


def _run_rank(arguments: str) -> None:
    name, calls, sizes = json.loads(arguments)
    backend = ferrodist.init(name)
    results = list(measure_calls(backend, name, calls, sizes))
    if backend.rank == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    _run_rank(sys.argv[1])
