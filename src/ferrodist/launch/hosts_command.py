# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist run --hosts``: from the options to a plan for several hosts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import click

from ferrodist.errors import InvalidArgument
from ferrodist.launch.environment import random_port
from ferrodist.launch.host_options import HostOptions
from ferrodist.launch.hosts import Host, parse_hosts, read_hostfile, sizes_of
from ferrodist.launch.nodes import parse_endpoint, parse_name
from ferrodist.launch.output.console import Console
from ferrodist.launch.remote import Remote, ssh_words, variables_for
from ferrodist.rendezvous.launch import Endpoint

_LOOKS_SECRET = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL")


def find_remote(
    options: HostOptions,
    sizes: tuple[int, ...] | None,
    passed_on: Sequence[str],
    script: Sequence[str],
) -> Remote:
    """Return what to run on which hosts; ``sizes`` is what -n says, None if nothing.

    Raises:
        click.UsageError: for options that are not enough or contradict each other.
    """
    _refuse_contradictions(options)
    if sizes is not None and len(sizes) > 1:
        raise click.UsageError("with --hosts say A:2,B:4 for hosts that differ, not -n 2,4")
    try:
        hosts = _hosts(options)
        return Remote(
            hosts=hosts,
            ssh=ssh_words(options.ssh),
            sizes=sizes_of(hosts, None if sizes is None else sizes[0]),
            endpoint=_endpoint(options, hosts),
            job=parse_name(options.rdzv_id) or f"run-{os.getpid()}-{secrets.token_hex(8)}",
            variables=variables_for(options.export),
            options=passed_on,
            script=script,
        )
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def introduce(remote: Remote, console: Console) -> None:
    """Say once, to people, what they may not expect."""
    if console.stderr.terminal is not None:
        where = f"rank 0 on {remote.hosts[0].name}"
        if len(remote.hosts) > 1:
            where += f", where it listens at {remote.endpoint}"
        hosts = f"{len(remote.hosts)} host(s)"
        console.say(f"ferrodist run: {sum(remote.sizes)} ranks on {hosts}, {where}")
    secret = [name for name in remote.variables if any(word in name for word in _LOOKS_SECRET)]
    if secret:
        console.say(
            f"ferrodist run: {', '.join(secret)} is in command lines on all hosts, where their "
            "users can read it; for a secret, name a file that the ranks read"
        )


def _refuse_contradictions(options: HostOptions) -> None:
    if options.hosts is not None and options.hostfile is not None:
        raise click.UsageError("--hosts and --hostfile exclude each other")
    given = {
        "--nnodes": options.nnodes is not None,
        "--node-rank": options.node_rank is not None,
        "--standalone": options.standalone,
    }
    name = "--hosts" if options.hosts is not None else "--hostfile"
    for other, is_given in given.items():
        if is_given:
            raise click.UsageError(f"{name} and {other} exclude each other: the hosts are listed")


def _hosts(options: HostOptions) -> list[Host]:
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    return parse_hosts(options.hosts or "")


def _endpoint(options: HostOptions, hosts: Sequence[Host]) -> Endpoint:
    """Return where rank 0 is to listen: at the first host, as the others know it."""
    if options.rdzv_endpoint is not None:
        return parse_endpoint(options.rdzv_endpoint)
    first = hosts[0]
    if first.is_loopback and not all(host.is_loopback for host in hosts):
        raise InvalidArgument(
            f"rank 0 would listen at {first.address}, where the other hosts cannot reach it: give "
            "the name by which they know this host, or --rdzv-endpoint HOST:PORT"
        )
    return Endpoint(first.address, random_port())
