# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options of ``ferrodist run`` for several hosts, and the NodeSpec that follows from them.

On several hosts the same command runs on each. It knows nothing of the others but how many they
are; that they agree is checked when the ranks meet.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from ferrodist.config import Config, environment
from ferrodist.errors import AuthenticationError
from ferrodist.launch.machine import usable_cores
from ferrodist.launch.processes import KILL_SECONDS, NodeSpec
from ferrodist.launch.ssh import read_secret
from ferrodist.rendezvous.job import (
    Endpoint,
    how_to_make_secret,
    number,
    secret_from_file,
    try_endpoint,
)

F = TypeVar("F", bound=Callable[..., Any])

_NODE_RANK = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
_NUM_NODES = ("SLURM_NNODES",)
_MOST_CHARACTERS = 100  # of a name


class HostOptions(NamedTuple):
    """The values of these options; None, or empty, if not given."""

    nnodes: str | None
    node_rank: int | None
    rdzv_endpoint: str | None
    rdzv_id: str | None
    rdzv_backend: str | None
    hosts: str | None
    hostfile: Path | None
    ssh: str | None
    export: tuple[str, ...]
    held_by_ssh: bool
    only_attempt: int | None
    standalone: bool

    @property
    def is_for_others(self) -> bool:
        return self.hosts is not None or self.hostfile is not None


_OPTIONS = [
    click.option(
        "--nnodes", metavar="N", help="Number of hosts; run the same command on each.",
    ),
    click.option(
        "--node-rank", type=click.IntRange(min=0), metavar="K",
        help="Index of this host, from 0.",
    ),
    click.option(
        "--rdzv-endpoint", metavar="HOST:PORT",
        help="Address of the first host, reachable from all others, where rank 0 listens. PORT+1 "
        "is used for torch.",
    ),
    click.option("--rdzv-id", metavar="NAME", help="A name for the job, the same on all hosts."),
    click.option("--rdzv-backend", hidden=True, help="What torchrun needs on several hosts."),
    click.option(
        "--hosts", metavar="A,B",
        help="Start ranks on these hosts by ssh, -n per host; A:2,B:4 sets the number for each.",
    ),
    click.option(
        "--hostfile", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
        help="Read the hosts from a file with lines 'host slots=N'.",
    ),
    click.option("--ssh", metavar="COMMAND", help="The ssh command, with its options."),
    click.option(
        "--export", multiple=True, metavar="NAME",
        help="Pass this variable to ranks on other hosts. All users of those hosts can read it.",
    ),
    click.option("--held-by-ssh", is_flag=True, hidden=True, help="Used by --hosts."),
    click.option("--only-attempt", type=click.IntRange(min=0), hidden=True, help="The same."),
    click.option("--standalone", is_flag=True, hidden=True, help="What torchrun needs on one."),
]  # fmt: skip


def host_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def find_node(options: HostOptions, sizes: tuple[int, ...] | None) -> NodeSpec:
    """Return which ranks of a job this launcher starts; ``sizes`` None is a rank per core."""
    if options.ssh is not None or options.export:
        raise click.UsageError("--ssh and --export are for --hosts and --hostfile")
    num_nodes = _num_nodes(options)
    if options.standalone and (num_nodes > 1 or options.rdzv_endpoint):
        raise click.UsageError("--standalone is for one host: omit it, or omit --rdzv-endpoint")
    node_rank = _node_rank(options, num_nodes)
    secret = read_secret() if options.held_by_ssh else b""
    if num_nodes == 1:
        return NodeSpec(_sizes_of_nodes(sizes or (usable_cores(),), 1))
    if sizes is None:
        raise click.UsageError(
            "hosts may differ in their cores, and all have to know how many ranks there are: say "
            "-n N, the same on all hosts"
        )
    endpoint = parse_endpoint(options.rdzv_endpoint)
    return NodeSpec(
        _sizes_of_nodes(sizes, num_nodes),
        node_rank,
        endpoint,
        parse_name(options.rdzv_id) or f"run-{endpoint}",
        secret or _secret_of_hosts(num_nodes),
    )


def parse_endpoint(text: str | None) -> Endpoint:
    if text is None:
        raise click.UsageError(
            "on several hosts --rdzv-endpoint HOST:PORT says where rank 0 listens: the name of "
            "the first host and a free port there, the same on all hosts"
        )
    endpoint = try_endpoint(text)
    if endpoint is None or endpoint.port == 65535:
        raise click.UsageError(
            f"--rdzv-endpoint {text!r}: expected HOST:PORT with a port up to 65534, such as "
            "node-0:29400 or [fe80::1]:29400; the port after it is for torch"
        )
    return endpoint


def parse_name(text: str | None) -> str:
    if text is not None and not (0 < len(text) <= _MOST_CHARACTERS and text.isprintable()):
        raise click.UsageError(
            f"--rdzv-id: expected a name of 1 to {_MOST_CHARACTERS} printable characters"
        )
    return text or ""


def check_restarts(*, grace: float, keeps_survivors: bool) -> None:
    """Refuse restarts after which launchers would not meet again.

    Each host starts again on its own when its ranks have failed, and its ranks wait for those of
    the others. So all have to be there within the time that ranks wait for each other.
    """
    if keeps_survivors:
        raise click.UsageError(
            "--keep-survivors and --max-restarts exclude each other on several hosts: a host whose "
            "ranks go on would be missing where the others start again"
        )
    join_timeout = Config.from_environment().join_timeout
    if grace + KILL_SECONDS >= join_timeout:
        raise click.UsageError(
            f"--grace {grace:g} with --max-restarts on several hosts: ranks that are started again "
            f"wait {join_timeout:g} s for the others, which may still be in their grace by then. "
            "Take a shorter one, or a longer FERRODIST_JOIN_TIMEOUT"
        )


def _num_nodes(options: HostOptions) -> int:
    """Return how many hosts there are; variables count only if there may be several."""
    if options.nnodes is not None:
        return _parse_num_nodes(options.nnodes)
    if options.rdzv_endpoint is None:
        return 1
    found = _number_from(_NUM_NODES)
    if not found:
        raise click.UsageError(
            "--rdzv-endpoint is for several hosts: say how many, by --nnodes N; under SLURM "
            "SLURM_NNODES says so"
        )
    return found


def _parse_num_nodes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text, re.ASCII)
    if found is None or int(found[1]) < 1:
        raise click.UsageError(f"--nnodes {text!r}: expected a number above zero")
    if found[2] is not None and int(found[2]) != int(found[1]):
        raise click.UsageError(
            f"--nnodes {text}: a job cannot grow or shrink while it runs; give one number"
        )
    return int(found[1])


def _node_rank(options: HostOptions, num_nodes: int) -> int:
    rank = options.node_rank
    if rank is None:
        rank = 0 if num_nodes == 1 else _number_from(_NODE_RANK)
    if rank is None:
        raise click.UsageError(
            f"which of the {num_nodes} hosts is this one? Say --node-rank K, from 0 to "
            f"{num_nodes - 1}; or set one of {', '.join(_NODE_RANK)}"
        )
    if rank >= num_nodes:
        raise click.UsageError(
            f"node rank {rank} of {num_nodes} hosts: expected 0 to {num_nodes - 1}"
        )
    return rank


def _number_from(names: tuple[str, ...]) -> int | None:
    for name in names:
        if text := environment().get(name):
            if number(text) < 0:
                raise click.UsageError(f"{name}={text!r}: expected a number")
            return number(text)
    return None


def _sizes_of_nodes(sizes: tuple[int, ...], num_nodes: int) -> tuple[int, ...]:
    if len(sizes) == 1:
        return sizes * num_nodes
    if len(sizes) != num_nodes:
        raise click.UsageError(
            f"-n {','.join(map(str, sizes))} is for {len(sizes)} hosts, but there are {num_nodes}"
        )
    return sizes


def _secret_of_hosts(num_nodes: int) -> bytes:
    path = Config.from_environment().secret_file
    if not path:
        raise AuthenticationError(
            f"a job on {num_nodes} hosts needs a secret that all of them have, or its ranks could "
            "not tell each other from strangers on the network. 'ferrodist run --hosts' sends one "
            f"to all hosts; for the same command on each, {how_to_make_secret()}"
        )
    return secret_from_file(path)
