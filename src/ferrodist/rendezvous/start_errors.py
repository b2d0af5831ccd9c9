# SPDX-License-Identifier: MIT OR Apache-2.0
"""The errors of ranks that do not meet: who is missing or too many, who said so, and what to do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ferrodist.config import variable
from ferrodist.deadline import Deadline
from ferrodist.errors import RendezvousError
from ferrodist.rendezvous.ends import how_ended
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.job import Job

_SHOWN = 16  # ranks named in a text


def missing_ranks(
    job: Job, present: Mapping[int, str], seconds: float, refusals: Sequence[str]
) -> RendezvousError:
    """Make rank 0's error: these processes came in time, by rank, and the others did not."""
    source, size = job.source, job.world_size
    missing = [rank for rank in range(size) if rank not in present]
    here = _listed([f"rank {rank} ({who})" for rank, who in present.items()])
    head = (
        f"{_listed([f'rank {rank}' for rank in missing])} of {size} did not join job "
        f"{job.name!r} within {seconds:.1f} s; here: {here}; {source.world_size}={size} is from "
        f"{source.name}"
    )
    is_alone = len(present) == 1 and not refusals and job.ends is None
    advice = _if_alone(job) if is_alone else _if_some_are_missing(job)
    text = "\n".join([head, *refusals, advice])
    return RendezvousError(text, missing=missing, rank=missing[0])


def without_secret(count: int) -> str:
    """Say that visitors came who had another secret: they may be the ranks that are missing."""
    return (
        f"refused: {count} connections without the job's secret; if they were ranks, compare the "
        f"file of {variable('secret_file')} on all hosts (sha256sum)"
    )


def _if_alone(job: Job) -> str:
    return (
        "only this process was started, or the others do not call ferrodist.init(), as every rank "
        f"has to: {job.source.start_of(job.world_size)}{_if_elsewhere(job)}"
        f"{_if_between_hosts(job)}. "
        f"{_if_inherited(job, 'this process')}"
    )


def _if_some_are_missing(job: Job) -> str:
    return (
        "look at the output of the missing ones: they were not started, ended or hang before "
        f"ferrodist.init(), or have another {job.source.job}{_if_between_hosts(job)}"
        f"{_if_elsewhere(job)}"
    )


def _if_elsewhere(job: Job) -> str:
    """Say what is missing if ranks are on other hosts, where nobody could tell."""
    is_open = job.endpoint is not None and not is_loopback(job.endpoint.host)
    if job.several_hosts or job.has_secret or not is_open:
        return ""
    return f"; if they are on other hosts, all ranks need {variable('secret_file')}"


def missing_host(job: Job, address: str, deadline: Deadline) -> RendezvousError:
    """Make a guest's error: nobody has listened for it."""
    return RendezvousError(
        f"rank 0 of job {job.name!r} did not come within {deadline}: nobody listens at {address}; "
        f"{this_process(job)}\n"
        f"look at the output of rank 0: it ended or hangs before ferrodist.init(), or has another "
        f"{job.source.job} or {job.source.world_size}=1{_if_between_hosts(job)}. If it was not "
        f"started, {job.source.start_of(job.world_size)}. {_if_inherited(job, 'this process')}",
        rank=0,
        missing=[0],
        this_rank=job.rank,
    )


def _if_between_hosts(job: Job) -> str:
    if not job.several_hosts or job.endpoint is None:
        return ""
    return (
        f"; or the command differs between hosts (endpoint, number of hosts, ranks per host); or a "
        f"firewall keeps ranks from {job.endpoint}, which 'ferrodist doctor' can tell"
    )


def second_process(job: Job, rank: int, first: str, second: str) -> RendezvousError:
    """Make the error of a process that comes for a rank which is there already."""
    return RendezvousError(
        f"rank {rank} of job {job.name!r} is there twice: {first} has joined, {second} "
        f"came second and was refused; {_what_to_change(job, rank, second)}",
        rank=rank,
    )


def second_host(job: Job, address: str, first_pid: int | None) -> RendezvousError:
    """Make the error of a rank 0 at whose address another one listens."""
    first = "another process" if first_pid is None else f"pid {first_pid}"
    return RendezvousError(
        f"rank 0 of job {job.name!r} is there twice: {first} listens at {address}, perhaps for "
        f"another job of this name, and this is pid {os.getpid()}; "
        f"{_what_to_change(job, 0, 'this process')}",
        rank=0,
        this_rank=0,
    )


def host_of_another_user(job: Job, address: str, pid: int, uid: int) -> RendezvousError:
    """Make the error of a rank 0 at whose address a process of another user listens."""
    return RendezvousError(
        f"rank 0 of job {job.name!r} cannot listen at {address}: pid {pid} of user {uid} does, and "
        f"this is pid {os.getpid()} of user {os.geteuid()}. Give the job another {job.source.job}, "
        "or have that process ended",
        rank=0,
        this_rank=0,
    )


def wrong_world_size(job: Job, rank: int, size: int, who: str, host: str) -> RendezvousError:
    """Make the error of a guest that believes in another world size than this host."""
    source = job.source
    return RendezvousError(
        f"rank {rank} ({who}) was started for a world of {size}, rank 0 ({host}) "
        f"for a world of {job.world_size}: {source.world_size}, from {source.name}, must be the "
        f"same on every rank of job {job.name!r}, and another job needs another {source.job}",
        rank=rank,
        got=size,
        expected=job.world_size,
    )


def different_purposes(job: Job, rank: int, who: str) -> RendezvousError:
    """Make the error of a guest that has come for another backend than this host's."""
    return RendezvousError(
        f"rank {rank} ({who}) and rank 0 of job {job.name!r} do not make the same backend: one "
        "shares memory and one does not; give all ranks the same name in init() and "
        f"{variable('backend')}",
        rank=rank,
    )


def several_hosts(job: Job) -> RendezvousError:
    """Make the error of ranks that want to share memory and are not on one host."""
    return RendezvousError(
        f"the {job.world_size} ranks of job {job.name!r} are on several hosts "
        f"({job.source.name}: {job.hosts}), and shared memory is of one host: use the backend "
        "'hybrid', which shares memory within each host, or 'tcp', or start all ranks on one host",
        this_rank=job.rank,
        world_size=job.world_size,
    )


def left(job: Job, rank: int, who: str) -> RendezvousError:
    """Make the error of a guest that has joined and left again."""
    how = (job.ends and job.ends.how(rank)) or "ended or gave up"
    return RendezvousError(
        f"rank {rank} ({who}) {how} before all ranks of job {job.name!r} had joined; look at "
        "its own output",
        rank=rank,
    )


def host_left(job: Job, who: str) -> RendezvousError:
    """Make a guest's error: rank 0 was there and is no longer."""
    return RendezvousError(
        f"rank 0 ({who}) of job {job.name!r} is gone: it ended before all ranks had joined, or "
        f"they all had, without this one; look at its own output; {this_process(job)}",
        rank=0,
        this_rank=job.rank,
    )


def ended_early(job: Job, ended: Mapping[int, str]) -> RendezvousError:
    """Make the error of ranks that have ended, each in its way, before they joined."""
    how_each = [_how_early(job, rank, how) for rank, how in ended.items()]
    whose = "its" if len(ended) == 1 else "their"
    ranks = list(ended)
    return RendezvousError(
        f"{_listed(how_each)}; look at {whose} own output", rank=ranks[0], missing=ranks
    )


def _how_early(job: Job, rank: int, how: str) -> str:
    if how == how_ended(0):
        return (
            f"rank {rank} ended (exit code 0) without calling ferrodist.init(), which all "
            f"{job.world_size} ranks of job {job.name!r} have to do, or caught its error"
        )
    return f"rank {rank} {how} before it joined job {job.name!r}"


def this_process(job: Job) -> str:
    """Say which rank this is, and by whose word."""
    source = job.source
    return (
        f"this is rank {job.rank} of {job.world_size}, pid {os.getpid()} ({source.name}: "
        f"{source.rank}={job.rank}, {source.world_size}={job.world_size})"
    )


def _what_to_change(job: Job, rank: int, second: str) -> str:
    source = job.source
    return (
        f"both have {source.rank}={rank}, from {source.name}. Give every process its own "
        f"{source.rank}, and every job its own {source.job}. {_if_inherited(job, second)}"
    )


def _if_inherited(job: Job, process: str) -> str:
    return (
        f"If a rank has started {process}, {job.source.rank} is that rank's: start it with "
        "'ferrodist run -n 1 script.py' to make it a world of its own"
    )


def _listed(words: list[str]) -> str:
    more = len(words) - _SHOWN
    shown = ", ".join(words[:_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown
