# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host: its cores, memory, limits of files and processes, kernel and clocks."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import select
import signal
import socket
import time
import timeit
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ferrodist import _native
from ferrodist.launch.doctor.report import (
    CheckContext,
    Diagnostic,
    fail,
    note,
    ok,
    try_number,
    try_read,
    warn,
)
from ferrodist.launch.machine import container_cpus, count_of_ranks, readable_nbytes
from ferrodist.rendezvous.errors import files_needed

GetLimit = Callable[[int], tuple[int, int]]
KernelCall = Callable[[], object]
Clock = Callable[[], float]


_THREADS = "OMP_NUM_THREADS"
_RANK_NBYTES = 100 << 20  # a Python process with NumPy, and its slots, before it has any data
_DOCKER_SHM_NBYTES = 64 << 20  # what a container gets unless somebody asks for more
_SHMEM_PAGES = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_NO_LIMIT = 1 << 60  # version 1 of cgroups writes a number near the largest there is

_TASKS_PER_RANK = 8  # the process, its heartbeat, its calls in flight, a few of NumPy's
_SO_PEERPIDFD = 77  # not in Python's socket module yet

_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"
_READ_BY_CALLS = {"hpet", "acpi_pm", "jiffies", "pit", "refined-jiffies", "xen"}
_SYNCHRONISED = ("run/systemd/timesync/synchronized", "run/chrony/chronyd.pid", "run/chronyd.pid")
_SLOW_NS = 1000.0
_NUM_LOOKS, _NUM_TRIES = 200, 10
_APART = 0.05  # seconds by which two clocks may move apart while this check runs
_LONG_AGO = 1_735_689_600  # 2025: no machine that runs this has an earlier date


def check_cores(
    context: CheckContext, cpus: Collection[int] | None = None, container: int | None = None
) -> Iterator[Diagnostic]:
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    container = container_cpus() if container is None else container
    usable = max(1, min(len(cpus), container))
    yield ok(_describe(context, cpus, container))
    yield from _ranks(context, usable, len(_physical(context, cpus)))
    yield from _threads(context, usable)


def _describe(context: CheckContext, cpus: Collection[int], container: int) -> str:
    words = f"{_count(len(cpus))} for this process"
    # A list such as "0-3,8"; 0 if it cannot be read.
    text = context.try_read("sys/devices/system/cpu/online") or ""
    parts = [part.partition("-") for part in text.split(",") if part]
    online = sum(int(last or first) - int(first) + 1 for first, _, last in parts)
    if online > len(cpus):
        words += f", of {online} there are (its affinity mask leaves out the others)"
    if container < len(cpus):
        words += f"; the container grants the time of {container}"
    num_physical = len(_physical(context, cpus))
    if num_physical < len(cpus):
        words += f"; they are {num_physical} physical, each with several threads"
    return words


def _count(num_cores: int) -> str:
    return "1 core" if num_cores == 1 else f"{num_cores} cores"


def _physical(context: CheckContext, cpus: Collection[int]) -> set[str]:
    """Tell physical cores apart; a core whose siblings are not known counts for itself."""
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {context.try_read(topology.format(cpu)) or str(cpu) for cpu in cpus}


def _ranks(context: CheckContext, usable: int, num_physical: int) -> Iterator[Diagnostic]:
    num_ranks = context.num_ranks
    if num_ranks > usable:
        yield warn(
            f"{count_of_ranks(num_ranks)} on {_count(usable)}: they take turns",
            "results are the same, but every collective waits for ranks that have no core, which "
            f"takes milliseconds, not microseconds: start at most {usable}",
        )
    elif num_ranks > num_physical:
        yield note(
            f"{count_of_ranks(num_ranks)} on {num_physical} physical cores: some share one",
            f"for numerical work {num_physical} may be as fast",
        )


def _threads(context: CheckContext, usable: int) -> Iterator[Diagnostic]:
    text = context.environ.get(_THREADS, "")
    share = max(1, usable // context.num_ranks)
    if not text:
        yield ok(f"{_THREADS} is not set: 'ferrodist run' makes it {share} for each rank")
        return
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        yield warn(f"{_THREADS}={text!r} is no number above zero", f"unset {_THREADS}")
        return
    wanted = int(text) * context.num_ranks
    if wanted > usable and int(text) > 1:
        yield warn(
            f"{_THREADS}={text}: {wanted} threads of {count_of_ranks(context.num_ranks)} on "
            f"{_count(usable)}",
            f"threads that take turns are slower than fewer: unset it, or make it {share}",
        )
    elif int(text) < share:
        yield note(
            f"{_THREADS}={text}: each rank uses {text} of the {share} cores it could have",
            f"unset it, and 'ferrodist run' makes it {share}",
        )
    else:
        yield ok(f"{_THREADS}={text}")


def check_memory(context: CheckContext) -> Iterator[Diagnostic]:
    yield from _amount(context)
    if context.try_read("proc/sys/vm/overcommit_memory") == "2":
        yield note(
            "the kernel promises no more memory than there is (vm.overcommit_memory=2)",
            "programs that reserve a lot, such as CUDA's, may fail; usual is 'sysctl "
            "vm.overcommit_memory=0'",
        )
    yield from _arena(context)
    yield from _loader_memory(context)
    choice = re.search(r"\[(\w+)\]", context.try_read(_SHMEM_PAGES) or "")
    if choice is not None and choice[1] in ("never", "deny"):
        yield note(
            f"shared memory has no huge pages (shmem_enabled is {choice[1]!r}), as usual",
            f"'echo always > /{_SHMEM_PAGES}' may speed up very large arrays",
        )


def _amount(context: CheckContext) -> Iterator[Diagnostic]:
    text = context.try_read("proc/meminfo") or ""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    facts = {name: int(number) * 1024 for name, number in found}
    total, available = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    if not total:
        yield note("how much there is cannot be seen: no /proc/meminfo")
        return
    what = f"{readable_nbytes(total)}, of which {readable_nbytes(available)} are available"
    limit = memory_limit(context)
    if limit is not None:
        available = min(available, limit.left)
        what += (
            f"; the container may use {readable_nbytes(limit.most)} and has "
            f"{readable_nbytes(limit.left)} left"
        )
    what += f"; {_swap(facts)}"
    if available >= context.num_ranks * _RANK_NBYTES:
        yield ok(what)
    else:
        yield warn(
            f"{what}: little for {count_of_ranks(context.num_ranks)}",
            f"a rank takes some {readable_nbytes(_RANK_NBYTES)} before it has any data: end other "
            "programs, start fewer ranks, or raise the limit of the container",
        )


def _swap(facts: dict[str, int]) -> str:
    total = facts.get("SwapTotal", 0)
    used = total - facts.get("SwapFree", 0)
    if not total:
        return "no swap"
    return f"{readable_nbytes(used)} of {readable_nbytes(total)} swap in use"


def _arena(context: CheckContext) -> Iterator[Diagnostic]:
    try:
        arena = _native.Arena(0, max(2, context.num_ranks))
        arena.empty(1 << 20)[:] = 1
    except (OSError, MemoryError, RuntimeError) as error:
        yield fail(
            f"shared memory cannot be made: {error}",
            "look at 'ulimit -v', at the container's memory limit, and whether its seccomp profile "
            "allows memfd_create",
        )
        return
    yield ok(f"a rank can show up to {readable_nbytes(arena.nbytes)} to the others")


def _loader_memory(context: CheckContext) -> Iterator[Diagnostic]:
    try:
        facts = os.statvfs(context.root / "dev/shm")
    except OSError:
        yield note(
            "there is no /dev/shm", "ferrodist does not need it; workers of torch's DataLoader do"
        )
        return
    nbytes = facts.f_blocks * facts.f_frsize
    if nbytes <= _DOCKER_SHM_NBYTES:
        yield note(
            f"/dev/shm has {readable_nbytes(nbytes)}",
            "ferrodist does not use it, but workers of torch's DataLoader die of SIGBUS when it is "
            "full: start the container with --shm-size=1g or --ipc=host",
        )


def check_limits(
    context: CheckContext, get_limit: GetLimit = resource.getrlimit, uid: int | None = None
) -> Iterator[Diagnostic]:
    yield _open_files(context, *map(_or_infinite, get_limit(resource.RLIMIT_NOFILE)))
    most, _ = map(_or_infinite, get_limit(resource.RLIMIT_NPROC))
    yield from _processes(context, most, os.getuid() if uid is None else uid)


def _or_infinite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _shown(limit: float) -> str:
    return "any number" if limit == float("inf") else f"{limit:.0f}"


def _open_files(context: CheckContext, soft: float, hard: float) -> Diagnostic:
    need = files_needed(context.num_ranks)
    ranks = count_of_ranks(context.num_ranks)
    needed = f"{ranks} and their launcher need about {need} each"
    what = f"a process may open {_shown(soft)} files; {needed}"
    if need <= soft:
        return ok(what)
    if need <= hard:
        return fail(what, f"'ulimit -n {need}' in the shell that starts the ranks")
    return fail(
        f"{what}; the hard limit is {_shown(hard)}",
        "let the administrator raise 'nofile' in /etc/security/limits.conf, or start the container "
        f"with --ulimit nofile={need}",
    )


def _processes(context: CheckContext, most: float, uid: int) -> Iterator[Diagnostic]:
    need = _TASKS_PER_RANK * context.num_ranks
    left = float("inf") if uid == 0 else most - _num_tasks(context, uid)  # root has no limit
    whose = "this user (ulimit -u)"
    group = _tightest(_limits(context, "pids", ("pids.max", "pids.current")))
    if group is not None and group.left < left:
        left, whose = group.left, f"the container ({group.folder / 'pids.max'})"
    ranks = count_of_ranks(context.num_ranks)
    if left == float("inf"):
        yield ok("the number of processes and threads has no limit")
    elif left >= need:
        yield ok(f"{left:.0f} more processes and threads may be started")
    else:
        yield fail(
            f"{whose} may start {max(0, left):.0f} more processes and threads, {ranks} need about "
            f"{need}",
            "end other programs, start fewer ranks, or raise that limit",
        )


def _num_tasks(context: CheckContext, uid: int) -> int:
    count = 0
    for folder in (context.root / "proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid == uid:
                count += len(os.listdir(folder / "task"))
        except OSError:
            continue  # it has ended meanwhile
    return count


def _memfd() -> None:
    file = os.memfd_create("ferrodist-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 4096)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(file)


def _pidfd() -> None:
    file = os.pidfd_open(os.getpid())
    try:
        select.select([file], [], [], 0)
        signal.pidfd_send_signal(file, 0)
    finally:
        os.close(file)


def _peer_pidfd() -> None:
    one, other = socket.socketpair()
    with one, other:
        os.close(one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))


def _unix_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.bind("")  # the kernel finds an abstract name
        probe.listen(1)


_NEEDED: Mapping[str, KernelCall] = {"memfd_create": _memfd, "abstract Unix sockets": _unix_socket}
_WANTED: Mapping[str, KernelCall] = {"pidfd_open": _pidfd, "SO_PEERPIDFD": _peer_pidfd}


def check_kernel(
    context: CheckContext,
    needed: Mapping[str, KernelCall] = _NEEDED,
    wanted: Mapping[str, KernelCall] = _WANTED,
) -> Iterator[Diagnostic]:
    missing = {name: error for name, probe in needed.items() if (error := _failure(probe))}
    lacking = {name: error for name, probe in wanted.items() if (error := _failure(probe))}
    there = [name for name in (*needed, *wanted) if name not in missing and name not in lacking]
    if there:
        yield ok(f"Linux {platform.release()} has {', '.join(there)}")
    status = context.try_read("proc/self/status") or ""
    filtered = re.search(r"^Seccomp:\s+2$", status, re.MULTILINE) is not None
    for name, error in missing.items():
        yield fail(
            f"{name} does not work: {error}",
            _advice(filtered, "ranks of one host cannot share memory without it"),
        )
    for name, error in lacking.items():
        yield note(
            f"{name} does not work: {error}",
            _advice(filtered, "a killed rank is then noticed by its closed socket"),
        )
    scope = context.try_read("proc/sys/kernel/yama/ptrace_scope")
    if scope in ("2", "3"):
        yield note(
            f"other processes may not be traced (kernel.yama.ptrace_scope={scope})",
            "ferrodist does not do that; py-spy and gdb, to see where a rank hangs, need it lower",
        )


def _failure(probe: KernelCall) -> str:
    try:
        probe()
    except (OSError, AttributeError) as error:  # AttributeError: Python was built without it
        return str(error)
    return ""


def _advice(has_filter: bool, consequence: str) -> str:
    if has_filter:
        return f"{consequence}: this process has a seccomp filter; let the container's allow it"
    return f"{consequence}: it came with Linux 3.17 (memfd), 5.3 (pidfd) and 6.5 (SO_PEERPIDFD)"


def check_clock(
    context: CheckContext, real: Clock = time.time, steady: Clock = time.monotonic
) -> Iterator[Diagnostic]:
    before = _difference(real, steady)
    costs = timeit.repeat(steady, number=_NUM_LOOKS, repeat=_NUM_TRIES)
    yield _source(context, min(costs) / _NUM_LOOKS * 1e9)
    yield _date(context, real())
    apart = _difference(real, steady) - before
    if abs(apart) > _APART:
        yield warn(
            f"the clock was set by {apart:+.3f} s while it was looked at",
            "times in logs jump; see to NTP: timedatectl, chronyc tracking. Deadlines are not "
            "concerned: they use a clock that nobody sets",
        )


def _difference(real: Clock, steady: Clock) -> float:
    """Return by how much two clocks differ, by the pair of looks that was held up least."""
    looks = [(steady(), real(), steady()) for _ in range(_NUM_TRIES)]
    begin, middle, _ = min(looks, key=lambda look: look[2] - look[0])
    return middle - begin


def _source(context: CheckContext, cost: float) -> Diagnostic:
    name = context.try_read(_SOURCE) or "unknown"
    what = f"clock source {name}, {cost:.0f} ns per look"
    if name in _READ_BY_CALLS or cost > _SLOW_NS:
        return note(
            what,
            "slow: every timing costs a system call, which small collectives feel; 'tsc', or the "
            f"virtual machine's own clock, is faster (see available_clocksource beside /{_SOURCE})",
        )
    return ok(what)


def _date(context: CheckContext, now: float) -> Diagnostic:
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
    if now < _LONG_AGO:
        return warn(
            f"the date is {date} UTC", "certificates of TLS will not be valid: set the clock"
        )
    is_known = any((context.root / name).exists() for name in _SYNCHRONISED)
    state = "kept by NTP" if is_known else "whether NTP keeps it cannot be seen"
    return ok(f"{date} UTC; {state}; ferrodist needs it for logs only")


class Limit(NamedTuple):
    """A limit, how much of it is used, and which folder sets it."""

    most: int
    used: int
    folder: Path

    @property
    def left(self) -> int:
        return max(0, self.most - self.used)


def memory_limit(context: CheckContext) -> Limit | None:
    """Return the tightest limit of memory; what the kernel can take back does not count as used."""
    version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
    found = _limits(context, "memory", ("memory.max", "memory.current"), version_1)
    return _tightest(
        one._replace(used=one.used - min(one.used, _inactive_files(one.folder))) for one in found
    )


def _tightest(limits: Iterable[Limit]) -> Limit | None:
    return min(limits, key=lambda limit: limit.left, default=None)


def _limits(context: CheckContext, controller: str, *files: tuple[str, str]) -> Iterator[Limit]:
    for folder in _folders(context, controller):
        for names in files:
            most, used = (try_number(folder / name) for name in names)
            if most is not None and used is not None and most < _NO_LIMIT:
                yield Limit(most, used, folder)
                break


def _inactive_files(folder: Path) -> int:
    """Return how much of the used memory is files that nobody has looked at for a while."""
    numbers = dict(
        line.split() for line in (try_read(folder / "memory.stat") or "").splitlines() if line
    )
    return int(numbers.get("total_inactive_file") or numbers.get("inactive_file") or 0)


def _folders(context: CheckContext, controller: str) -> Iterator[Path]:
    """Name the groups this process is in, the innermost first: each of them sets limits."""
    top = context.root / "sys/fs/cgroup"
    for line in (context.try_read("proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            yield from _up_from(top / controllers, path)
            yield from _up_from(top / controller, path) if "," in controllers else ()
        elif number == "0":
            yield from _up_from(top, path)
            yield from _up_from(top / "unified", path)


def _up_from(mount: Path, path: str) -> Iterator[Path]:
    """Name a group and those around it; in some containers only the mount itself can be seen."""
    folder = mount / path.lstrip("/")
    while folder != mount:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield mount
