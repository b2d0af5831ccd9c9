"""Jobs on real separate hosts: network namespaces, joined by a switch whose cables can be pulled.

Every rank runs the same script, in which ``say`` sends facts to the test.
"""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from commands import RUN
from hosts import Host, Hosts, needs_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100), needs_hosts]

LIMIT = 60.0  # seconds after which a rank that says nothing fails the test
PORT = 29500  # nobody else is in these networks
QUICK = {"FERRODIST_HEARTBEAT": "0.2", "FERRODIST_HEARTBEAT_TIMEOUT": "1.5"}
HEAD = """
    import json, os, sys, time
    import numpy as np
    import ferrodist
    rank = int(os.environ["RANK"])

    def say(**facts):  # in one piece
        facts |= {"rank": rank, "pid": os.getpid(), "when": time.monotonic()}
        os.write(1, (json.dumps(facts) + "\\n").encode())

    def tell_end(call, *args, **options):
        start = time.monotonic()
        try:
            call(*args, **options)
        except Exception as error:  # all of it is printed, and the tests look at it
            facts = {name: getattr(error, name, None) for name in ("missing", "how")}
            facts |= {"failed_rank": getattr(error, "rank", None)}
            facts |= {"seconds": time.monotonic() - start}
            say(error=type(error).__name__, text=str(error), **facts)
        else:
            say(error=None)

    def wait_for(path):
        while not os.path.exists(path):
            time.sleep(0.01)

    def call_for_ever(backend):
        x = np.ones(1000)
        while True:
            ferrodist.allreduce(x, backend)
            ferrodist.broadcast(x, backend, 3)
            ferrodist.barrier(backend)
"""


class Said:
    """What the processes of a test write: facts by rank, and everything else."""

    def __init__(self) -> None:
        self._facts: queue.Queue[dict[str, Any]] = queue.Queue()
        self.lines: list[str] = []

    def listen(self, process: subprocess.Popen[str]) -> None:
        """Read the output of a process until it ends."""
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, output: Any) -> None:
        for line in output:
            start = line.find('{"')
            if start < 0:
                self.lines.append(line)
            else:
                self._facts.put(json.loads(line[start:]))

    @property
    def number_waiting(self) -> int:
        """How many facts can be heard at once."""
        return self._facts.qsize()

    def hear(self, number: int, seconds: float = LIMIT) -> list[dict[str, Any]]:
        """Wait for so many facts, and return them by the numbers of ranks."""
        found: list[dict[str, Any]] = []
        end = time.monotonic() + seconds
        while len(found) < number:
            try:
                found.append(self._facts.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"only {found} was said\n{''.join(self.lines)}") from None
        return sorted(found, key=lambda facts: int(facts["rank"]))


class Network:
    """Two hosts, a folder that both see, and what their ranks say."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder, self.said = hosts, folder, Said()
        self.secret = folder / "secret"
        self._new_secret(self.secret)

    def _new_secret(self, path: Path) -> str:
        path.touch(0o600)
        path.write_bytes(os.urandom(32))
        return str(path)

    def another_secret(self) -> str:
        return self._new_secret(self.folder / "another secret")

    def write(self, code: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(code))
        return str(path)

    def popen(self, host: Host, command: Sequence[str], **settings: str) -> subprocess.Popen[str]:
        names = {name for name in os.environ if name.startswith(("FERRODIST_", "SLURM_"))}
        environment = {name: value for name, value in os.environ.items() if name not in names}
        environment |= {"OMP_NUM_THREADS": "1", "FERRODIST_SECRET_FILE": str(self.secret)}
        environment |= settings
        process: subprocess.Popen[str] = host.popen(
            command,
            env={name: value for name, value in environment.items() if value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said.listen(process)
        return process

    def run(
        self,
        code: str,
        *,
        family: str = "address",
        port: int = PORT,
        only_on: dict[int, dict[str, str]] | None = None,
        **settings: str,
    ) -> list[subprocess.Popen[str]]:
        """Start a job of two ranks on each host; ``only_on`` are settings of single hosts."""
        address = getattr(self.hosts[0], family)
        endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        script = self.write(code, f"script{port}.py")
        options = ["--nnodes", "2", "--rdzv-endpoint", endpoint, "-n", "2", "--grace", "1"]
        return [
            self.popen(
                host,
                [*RUN, "--node-rank", str(number), *options, script],
                **settings | (only_on or {}).get(number, {}),
            )
            for number, host in enumerate(self.hosts)
        ]

    def by_hand(
        self, code: str, places: Sequence[int], **settings: str
    ) -> list[subprocess.Popen[str]]:
        """Start a rank on each of these hosts, told by variables where rank 0 is."""
        script = self.write(code)
        return [
            self.popen(
                self.hosts[place],
                [sys.executable, script],
                RANK=str(rank),
                WORLD_SIZE=str(len(places)),
                MASTER_ADDR=self.hosts[places[0]].address,
                MASTER_PORT=str(PORT),
                **settings,
            )
            for rank, place in enumerate(places)
        ]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Hosts(2) as hosts:
        yield Network(hosts, tmp_path)


def end_well(processes: Sequence[subprocess.Popen[str]]) -> None:
    assert [process.wait(LIMIT) for process in processes] == [0] * len(processes)


# -- jobs ------------------------------------------------------------------------------------------

WHO = """
    backend = ferrodist.init()
    total = ferrodist.allreduce(np.full(100_000, rank + 1), backend)
    say(
        kind=type(backend).__name__,
        local=[backend.local_rank, backend.local_world_size],
        hosts=getattr(getattr(backend, "host_map", None), "hosts", None),
        total=sorted(set(total.tolist())),
        objects=ferrodist.all_gather_object(os.uname().nodename, backend),
    )
"""


@pytest.mark.parametrize("family", ["address", "address6"])
def test_init_makes_a_hybrid_backend_under_the_run_command(network, family):
    processes = network.run(WHO, family=family)
    for number, facts in enumerate(network.said.hear(4)):
        assert facts["kind"] == "HybridBackend"
        assert facts["local"] == [number % 2, 2]
        assert facts["hosts"] == [[0, 1], [2, 3]]
        assert facts["total"] == [10]
        assert facts["objects"] == ["host0", "host0", "host1", "host1"]
    end_well(processes)


def test_init_makes_a_hybrid_backend_where_variables_are_set_by_hand(network):
    processes = network.by_hand(WHO, [0, 1, 0])
    for number, facts in enumerate(network.said.hear(3)):
        assert facts["kind"] == "HybridBackend"
        assert facts["local"] == [[0, 2], [0, 1], [1, 2]][number]
        assert facts["hosts"] == [[0, 2], [1]]
        assert facts["total"] == [6]
        assert facts["objects"] == ["host0", "host1", "host0"]
    end_well(processes)


def test_ranks_that_turn_out_to_be_on_one_host_share_memory_alone(network):
    """Their launcher could not know: they meet at an address, and find no other host there."""
    processes = network.by_hand(WHO, [1, 1, 1])
    for number, facts in enumerate(network.said.hear(3)):
        assert facts["kind"] == "SharedMemoryBackend"
        assert facts["local"] == [number, 3]
        assert facts["total"] == [6]
    end_well(processes)


def test_the_contract_is_kept_on_two_hosts(network):
    """Every third case, without one that imports all libraries: those run on pretended hosts."""
    processes = network.run("""
        from ferrodist.testing import contract_cases, run_contract
        backend = ferrodist.init()
        cases = contract_cases(4, seed=7, in_order=False, libraries=["numpy"])
        cases = [case for case in cases[::3] if case.detail != "libraries"]
        report = run_contract(backend, cases)
        say(is_clean=report.is_clean, text=str(report), number=report.num_cases)
    """)
    for facts in network.said.hear(4, 90):
        assert facts["is_clean"], facts["text"]
        assert facts["number"] > 500
    end_well(processes)


def test_two_jobs_at_once_on_the_same_hosts_do_not_meet(network):
    code = """
        backend = ferrodist.init()
        totals = {int(ferrodist.allreduce(rank + WEIGHT, backend)) for _ in range(200)}
        say(weight=WEIGHT, totals=sorted(totals))
    """
    processes = []
    for weight in (0, 1000):
        processes += network.run(code.replace("WEIGHT", str(weight)), port=PORT + weight)
    found = [(facts["weight"], facts["totals"]) for facts in network.said.hear(8)]
    assert sorted(found) == [(0, [6])] * 4 + [(1000, [4006])] * 4
    end_well(processes)


# -- torch.distributed -----------------------------------------------------------------------------

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
long = pytest.mark.long  # four ranks, and two launchers, import torch
TORCH = """
    import torch, torch.distributed as dist
    from datetime import timedelta
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(5, 3)

    def data(rank):
        return torch.sin(torch.arange(20.0) + 100 * rank).reshape(4, 5)

    def train(model, x):
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    def train_for_ever(model, x):
        while True:
            train(model, x)

    def join():
        dist.init_process_group("ferrodist", timeout=timedelta(seconds=40))
"""


def torchrun(network: Network, code: str, **settings: str) -> list[subprocess.Popen[str]]:
    """Start two ranks on each host by torch's own launcher."""
    script = network.write(textwrap.dedent(TORCH) + textwrap.dedent(code))
    program = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    address = [f"--master-addr={network.hosts[0].address}", f"--master-port={PORT}"]
    return [
        network.popen(host, [*program, *address, f"--node-rank={number}", script], **settings)
        for number, host in enumerate(network.hosts)
    ]


@long
@needs_torch
@pytest.mark.timeout(240)
def test_torch_distributed_trains_across_hosts_under_torchrun(network):
    processes = torchrun(
        network,
        """
        import ferrodist.torch
        join()
        backend = ferrodist.torch.backend_of()
        alone = train(model(), torch.cat([data(r) for r in range(4)]))
        by_ddp = train(DistributedDataParallel(model()), data(rank))
        by_fsdp = [one.full_tensor() for one in train(fully_shard(model()), data(rank))]
        across = dist.new_group([1, 2])
        pair = torch.tensor([float(rank)])
        if rank in (1, 2):
            dist.all_reduce(pair, group=across)
        say(
            kind=type(backend).__name__,
            hosts=backend.host_map.hosts,
            ddp=all(torch.allclose(a, b, atol=1e-6) for a, b in zip(by_ddp, alone)),
            fsdp=all(torch.allclose(a, b, atol=1e-6) for a, b in zip(by_fsdp, alone)),
            pair=pair.item(),
        )
        dist.destroy_process_group()
        """,
    )
    for number, facts in enumerate(network.said.hear(4, 90)):
        assert facts["kind"] == "HybridBackend"
        assert facts["hosts"] == [[0, 1], [2, 3]]
        assert facts["ddp"], facts
        assert facts["fsdp"], facts
        assert facts["pair"] == [0.0, 3.0, 3.0, 3.0][number]
    end_well(processes)


@long
@needs_torch
@pytest.mark.timeout(240)
def test_a_rank_killed_under_ddp_is_named_on_all_hosts_within_two_seconds(network):
    """Started by variables alone: torchrun would end the other rank of that host, too."""
    code = """
        join()
        ddp = DistributedDataParallel(model())
        train(ddp, data(rank))
        say(at="trains")
        tell_end(train_for_ever, ddp, data(rank))
    """
    network.by_hand(textwrap.dedent(TORCH) + textwrap.dedent(code), [0, 0, 1, 1], **QUICK)
    pids = [facts["pid"] for facts in network.said.hear(4, 90)]
    begin = time.monotonic()
    os.kill(pids[3], signal.SIGKILL)
    found = network.said.hear(3)
    assert [facts["rank"] for facts in found] == [0, 1, 2]
    for facts in found:
        assert "rank 3 " in facts["text"], facts
        assert "torch.distributed." in facts["text"]
        assert facts["when"] - begin < 2


@long
@needs_torch
@pytest.mark.timeout(240)
def test_torch_distributed_needs_the_secret_on_all_hosts(network):
    torchrun(network, "tell_end(join)", FERRODIST_SECRET_FILE="")
    for facts in network.said.hear(4, 90):
        assert facts["error"] == "AuthenticationError", facts
        assert facts["missing"] == [0, 1, 2, 3]
        assert "FERRODIST_SECRET_FILE" in facts["text"]


# -- sockets ---------------------------------------------------------------------------------------


def listeners_of(pid: int) -> list[tuple[str, int]]:
    """List address and port of what listens on the host of a process."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                address, port = local.split(":")
                words = bytes.fromhex(address)  # each four bytes of it are a number of this machine
                turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append((str(ipaddress.ip_address(turned)), int(port, 16)))
    return found


@long
@needs_torch
@pytest.mark.timeout(240)
def test_gloo_runs_across_hosts_and_listens_at_their_addresses_alone(network):
    """Made by init, split across hosts, and of a group of the program."""
    code = f"""
        import torch, torch.distributed as dist
        backend = ferrodist.init("gloo")
        x = torch.ones(50_000)
        total = backend.allreduce(x * (rank + 1))[-1].item()
        pair = backend.split([3, 0]).allreduce(x * rank)[-1].item() if rank in (0, 3) else None
        dist.init_process_group("gloo", init_method="file://{network.folder}/store", rank=rank,
                                world_size=4)
        given = ferrodist.TorchDistributedBackend.from_process_group(dist.group.WORLD)
        again = given.allreduce(x * (rank + 1))[-1].item()
        say(total=total, pair=pair, again=again, kind=type(given).__name__)
        wait_for("nothing") if rank == 3 else tell_end(backend.recv, 3)
    """
    addresses = [host.address for host in network.hosts]
    network.by_hand(code, [0, 0, 1, 1], GLOO_SOCKET_IFNAME="eth0")
    pids = {}
    for facts in network.said.hear(4, 150):
        assert facts["kind"] == "GlooBackend"
        assert facts["total"] == facts["again"] == 10
        assert facts["pair"] == [3, None, None, 3][facts["rank"]]
        pids[facts["rank"]] = facts["pid"]
    for number, rank in enumerate([0, 2]):
        assert {address for address, _ in listeners_of(pids[rank])} <= {addresses[number]}
    os.kill(pids[3], signal.SIGKILL)
    for facts in network.said.hear(3):
        assert (facts["error"], facts["failed_rank"]) == ("RankLost", 3), facts


@pytest.mark.parametrize("family", ["address", "address6"])
def test_ranks_listen_at_the_address_of_their_host_alone_and_not_for_long(network, family):
    """Rank 3 comes late, so that the others are seen as they wait for it."""
    late = network.folder / "come"
    processes = network.run(
        f"""
        say(at="start")
        if rank == 3:
            wait_for({str(late)!r})
        backend = ferrodist.init()
        say(at="joined")
        wait_for({str(late) + " again"!r})
        ferrodist.barrier(backend)
        """,
        family=family,
    )
    pids = {facts["rank"]: facts["pid"] for facts in network.said.hear(4)}
    own = [getattr(host, family) for host in network.hosts]
    end = time.monotonic() + LIMIT
    while (own[0], PORT) not in listeners_of(pids[0]):
        assert time.monotonic() < end, "rank 0 never listens"
    seen = [(0, one) for one in listeners_of(pids[0])] + [(1, one) for one in listeners_of(pids[2])]
    late.touch()
    while (joined := network.said.number_waiting) < 4:  # watched all the while
        assert time.monotonic() < end, f"only {joined} ranks joined"
        seen += [(0, one) for one in listeners_of(pids[0])]
        seen += [(1, one) for one in listeners_of(pids[2])]
    network.said.hear(4)
    assert {host for host, _ in seen} == {0, 1}  # on each host something was seen to listen
    for host, (address, _) in seen:
        assert address == own[host], (host, address)
    assert listeners_of(pids[0]) == listeners_of(pids[2]) == []
    (network.folder / "come again").touch()
    end_well(processes)


# -- losses ----------------------------------------------------------------------------------------

FOR_EVER = """
    backend = ferrodist.init()
    ferrodist.barrier(backend)
    say(at="ready")
    tell_end(call_for_ever, backend)
"""


@pytest.mark.parametrize("pulled", [0, 1])
def test_a_pulled_cable_is_a_loss_at_the_silence_limit_on_both_sides(network, pulled):
    network.run(FOR_EVER, **QUICK)
    network.said.hear(4)
    begin = time.monotonic()
    network.hosts[pulled].link_down()
    for number, facts in enumerate(network.said.hear(4)):
        assert facts["error"] == "RankLost", facts
        there = [2, 3] if number < 2 else [0, 1]
        assert facts["failed_rank"] in there, facts
        assert 0.5 < facts["when"] - begin < 2.5, facts
        assert "no heartbeat" in facts["text"] or "connection" in facts["text"]


def test_a_killed_rank_is_named_on_all_hosts_within_two_seconds(network):
    network.run(FOR_EVER, **QUICK)
    pids = [facts["pid"] for facts in network.said.hear(4)]
    begin = time.monotonic()
    os.kill(pids[3], signal.SIGKILL)
    for facts in network.said.hear(3):
        assert (facts["error"], facts["failed_rank"]) == ("RankLost", 3), facts
        assert facts["when"] - begin < 2


def test_the_ranks_of_a_killed_launcher_are_named_on_the_other_host(network):
    processes = network.run(FOR_EVER, **QUICK)
    network.said.hear(4)
    begin = time.monotonic()
    processes[1].kill()
    first, second = network.said.hear(2)
    for facts in (first, second):
        assert facts["rank"] in (0, 1)
        assert facts["error"] == "RankLost"
        assert facts["failed_rank"] in (2, 3)
        assert facts["when"] - begin < 2
    assert processes[0].wait(LIMIT) == 0  # its ranks have taken it well


def test_leaving_right_after_the_last_call_harms_nobody(network):
    processes = network.run("""
        backend = ferrodist.init()
        say(total=[int(ferrodist.allreduce(rank, backend)) for _ in range(20)][-1])
    """)
    assert [facts["total"] for facts in network.said.hear(4)] == [6] * 4
    end_well(processes)


# -- jobs that cannot begin ------------------------------------------------------------------------

JOIN = "tell_end(ferrodist.init)"


def test_a_rank_that_cannot_be_reached_is_named_on_all_ranks(network):
    """Rank 1 listens at its loopback, where those of the other host do not find it."""
    alone = """
        if rank == 1:
            os.environ["FERRODIST_SOCKET_IFNAME"] = "=lo"
        tell_end(ferrodist.init)
    """
    processes = network.run(alone, FERRODIST_JOIN_TIMEOUT="6")
    for facts in network.said.hear(4):
        assert (facts["error"], facts["failed_rank"]) == ("RendezvousError", 1), facts
        assert facts["seconds"] < 9
        for words in ("rank 1", "could not be reached", "127.0.0.1", "FERRODIST_SOCKET_IFNAME"):
            assert words in facts["text"]
    end_well(processes)


def test_an_interface_that_does_not_fit_the_endpoint_is_named_at_once_on_rank_0(network):
    only_on = {0: {"FERRODIST_SOCKET_IFNAME": "=lo"}}
    network.run(JOIN, only_on=only_on, FERRODIST_JOIN_TIMEOUT="5")
    found = network.said.hear(4)
    assert "FERRODIST_SOCKET_IFNAME='=lo' does not match that interface" in found[0]["text"]
    assert found[0]["failed_rank"] == 0
    assert found[0]["seconds"] < 4
    for facts in found:  # whose failed rank may be one of their own host that gave up just before
        assert facts["error"] == "RendezvousError", facts
        assert facts["seconds"] < 8


def test_hosts_that_never_come_are_named_within_the_join_timeout(network):
    network.hosts[1].link_down()
    network.run(JOIN, FERRODIST_JOIN_TIMEOUT="4")
    found = network.said.hear(4)
    for facts in found:
        assert facts["error"] == "RendezvousError", facts
        assert facts["seconds"] < 7
    for facts in found[:2]:
        assert facts["missing"] == [2, 3], facts
        assert "rank 2, rank 3 of 4 did not join" in facts["text"]
    for facts in found[2:]:
        assert network.hosts[0].address in facts["text"], facts


def test_without_a_secret_all_ranks_are_refused_with_the_commands_that_make_one(network):
    processes = network.by_hand(JOIN, [0, 1], FERRODIST_SECRET_FILE="", FERRODIST_JOIN_TIMEOUT="5")
    first, second = network.said.hear(2)
    assert second["error"] == "AuthenticationError"
    assert second["seconds"] < 4
    assert "head -c 32 /dev/urandom > " in second["text"]
    assert "export FERRODIST_SECRET_FILE=" in second["text"]
    assert first["error"] == "RendezvousError"  # it cannot know that there are others elsewhere
    assert "rank 1" in first["text"]
    assert [process.wait(LIMIT) for process in processes] == [0, 0]


def test_a_wrong_secret_is_refused_at_once_where_it_is(network):
    only_on = {1: {"FERRODIST_SECRET_FILE": network.another_secret()}}
    network.run(JOIN, only_on=only_on, FERRODIST_JOIN_TIMEOUT="6")
    found = {facts["rank"]: facts for facts in network.said.hear(4)}
    for rank in (2, 3):
        assert found[rank]["error"] == "AuthenticationError", found[rank]
        assert found[rank]["seconds"] < 4
    for rank in (0, 1):
        assert (found[rank]["error"], found[rank]["missing"]) == ("RendezvousError", [2, 3])
        assert "refused: 2 connections without the job's secret" in found[rank]["text"]


# -- what is on the wire ---------------------------------------------------------------------------

NEEDLE = b"this is what an array holds, "
SNIFF = f"""
    import select, socket, sys
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    wire.bind(("eth0", 0))
    print("ready", flush=True)
    found = packets = 0
    while True:
        ready, _, _ = select.select([wire, sys.stdin], [], [])
        if wire in ready:
            packets += 1
            found += {NEEDLE!r} in wire.recv(1 << 17)
        elif sys.stdin in ready:
            break
    print(packets, found, flush=True)
"""
SHOW = f"""
    backend = ferrodist.init()
    text = np.frombuffer({NEEDLE!r} * 10_000, np.uint8)
    total = ferrodist.allreduce(text, backend, "max")
    part = ferrodist.broadcast(text, backend, 3)
    say(right=bool((total == text).all() and (part == text).all()))
"""


def packets_with_the_needle(network: Network, work: Callable[[], None]) -> tuple[int, int]:
    """Return how many packets host 1 sent and received meanwhile, and how many show the array."""
    command = [sys.executable, "-S", "-c", textwrap.dedent(SNIFF)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    sniffer = network.hosts[1].popen(command, text=True, **pipes)
    assert sniffer.stdout.readline() == "ready\n"
    work()
    packets, found = sniffer.communicate("\n", timeout=LIMIT)[0].split()
    return int(packets), int(found)


@pytest.mark.parametrize("is_tls", [False, True])
def test_with_tls_nobody_on_the_way_reads_what_arrays_hold(network, is_tls):
    if is_tls and (
        find_spec("ferrodist.rendezvous.tls") is None or find_spec("cryptography") is None
    ):
        pytest.skip("TLS needs ferrodist.rendezvous.tls and the package cryptography")

    def work() -> None:
        processes = network.run(SHOW, FERRODIST_TLS=str(int(is_tls)))
        assert [facts["right"] for facts in network.said.hear(4)] == [True] * 4
        end_well(processes)

    packets, found = packets_with_the_needle(network, work)
    assert packets > 20
    assert (found == 0) is is_tls
