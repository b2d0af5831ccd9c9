# SPDX-License-Identifier: MIT OR Apache-2.0
"""Jobs whose ranks share a store of torch's, and a store that rank 0 serves for them."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ferrodist.config import Config, environment
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, ProtocolError, RendezvousError
from ferrodist.rendezvous.errors import how_to_tell_apart
from ferrodist.rendezvous.exchange import StoreExchange, TorchStore, first_line
from ferrodist.rendezvous.job import (
    Job,
    Launcher,
    how_to_make_secret,
    known_secret,
    secret_from_file,
)
from ferrodist.rendezvous.launchers import script_of_unnamed_job
from ferrodist.rendezvous.mesh import host_id
from ferrodist.rendezvous.script import is_same_script

_LONGEST = 3650 * 86400.0  # seconds


def job_at_store(
    store: Any, rank: int, world_size: int, launcher: Launcher, config: Config, deadline: Deadline
) -> tuple[Job, bool]:
    """Describe the job of those who share a store of torch's; every rank calls it.

    Also tells whether they pretend to be on several hosts. The ranks tell each other at the store
    which host they are on. Those of one host then meet at a Unix socket, where the kernel says
    whose process each is; those of several recognise each other by the secret file. No secret goes
    through the store.
    """
    # A program may join again by the same store: every rank counts its own tries.
    nth = store.add(f"ferrodist/{rank}", 1)
    name = f"torch-{secrets.token_hex(16)}"
    job = Job(name, rank, world_size, known_secret(name), launcher=launcher, has_secret=False)
    if config.secret_file:
        job = replace(job, secret=secret_from_file(config.secret_file), has_secret=True)
    if world_size == 1:
        return job, False
    at = TorchStore(store, f"ferrodist/{nth}/hosts/")
    job = replace(job, script=script_of_unnamed_job(environment()))
    facts = _tell_facts(StoreExchange(job, at, deadline, call=launcher.name), job, config)
    if (refusal := _find_other_script(job, facts)) is not None:
        at = TorchStore(store, f"ferrodist/{nth}/refused/")
        with suppress(RendezvousError):  # a rank that serves the store stays until all have read
            StoreExchange(job, at, Deadline(1.0), call=launcher.name).gather(b"")
        raise refusal
    job = _with_facts(job, facts)
    at = TorchStore(store, f"ferrodist/{nth}/mesh/")
    exchange = StoreExchange(job, at, deadline, _host_of(store), launcher.name)
    return replace(job, exchange=exchange), len({fact["shown"] for fact in facts}) > 1


def _tell_facts(exchange: StoreExchange, job: Job, config: Config) -> list[dict[str, Any]]:
    """Tell all ranks where this one is, and hear the same of all, in rank order."""
    here = host_id()
    own = {
        "host": here,
        "shown": config.host_id or here,
        "name": job.name,
        "has_secret": job.has_secret,
        "script": job.script,
    }
    found = exchange.gather(json.dumps(own, ensure_ascii=False).encode())
    try:
        facts = [json.loads(record) for record in found]
        if not all(fact.keys() == own.keys() for fact in facts):
            raise ValueError("other facts than ours")
    except (ValueError, AttributeError) as error:
        raise ProtocolError(
            f"what another rank wrote to the store of torch cannot be decoded ({error}); do all "
            "ranks have the same version of ferrodist?"
        ) from error
    return facts


def _find_other_script(job: Job, facts: list[dict[str, Any]]) -> RendezvousError | None:
    """Find ranks of another job that have found the same store; the same error on all ranks."""
    first = facts[0]
    for rank, fact in enumerate(facts):
        is_near = fact["host"] == first["host"]
        if not is_same_script(first["script"], fact["script"], on_one_host=is_near):
            return RendezvousError(
                f"rank {rank} runs {fact['script']}, rank 0 runs {first['script']}: "
                f"{how_to_tell_apart(job)}",
                rank=rank,
                this_rank=job.rank,
                got=fact["script"],
                expected=first["script"],
            )
    return None


def _with_facts(job: Job, facts: list[dict[str, Any]]) -> Job:
    """Name the job as rank 0 does, and say whether it is on several hosts."""
    name, hosts = facts[0]["name"], len({fact["host"] for fact in facts})
    secret = job.secret if job.has_secret else known_secret(name)
    job = replace(job, name=name, secret=secret, hosts=f"{hosts} hosts" if hosts > 1 else "")
    without = [rank for rank, fact in enumerate(facts) if not fact["has_secret"]]
    if hosts > 1 and without:
        raise AuthenticationError(
            f"the ranks are on {hosts} hosts, and ranks {without} have no secret: without one they "
            f"could not tell each other from strangers on the network; {how_to_make_secret()}",
            this_rank=job.rank,
            missing=without,
        )
    return job


def _host_of(store: Any) -> str:
    """Return the host of a store, if it has one: it shows which network leads to the others."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def torch_timeout(deadline: Deadline) -> timedelta:
    """Return what is left in a form that torch takes: from a second to some years."""
    return timedelta(seconds=min(max(1.0, deadline.timeout()), _LONGEST))


def open_store(
    find_address: Callable[[], str],
    is_server: bool,
    share: Callable[[str], str],
    deadline: Deadline,
) -> Any:
    """Open a store of torch's that one rank serves, at its address only; all ranks call it.

    ``share`` gives all of them what the server passes. By itself torch listens at all addresses.
    """
    from torch.distributed import TCPStore

    timeout, store, told = torch_timeout(deadline), None, ""
    if is_server:
        try:
            address = find_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.create_server((address, 0), family=family, backlog=1024) as listener:
                port = listener.getsockname()[1]
                options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
                store = TCPStore(address, port, is_master=True, timeout=timeout, **options)
            told = f"{address} {port}"
        except (OSError, RuntimeError) as error:  # told to all: they wait for it
            told = f"! {first_line(error)}"
    host, _, port_or_error = share(told).partition(" ")
    if host == "!":
        raise RendezvousError(f"no store of torch's could be served: {port_or_error}")
    return store or TCPStore(host, int(port_or_error), is_master=False, timeout=timeout)
