# SPDX-License-Identifier: MIT OR Apache-2.0
"""The errors of ranks that do not meet: who is missing or too many, who said so, and what to do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ferrodist.deadline import Deadline
from ferrodist.errors import RendezvousError
from ferrodist.rendezvous.ends import how_ended
from ferrodist.rendezvous.job import Job

_SHOWN = 16  # ranks named in a text


def missing_ranks(
    job: Job, pids: Mapping[int, int], seconds: float, refusals: Sequence[str]
) -> RendezvousError:
    """Make rank 0's error: these processes came in time, by rank, and the others did not."""
    source, size = job.source, job.world_size
    missing = [rank for rank in range(size) if rank not in pids]
    here = _listed([f"rank {rank} (pid {pid})" for rank, pid in pids.items()])
    head = (
        f"{_listed([f'rank {rank}' for rank in missing])} of {size} did not join job "
        f"{job.name!r} within {seconds:.1f} s; here: {here}; {source.world_size}={size} is from "
        f"{source.name}"
    )
    is_alone = len(pids) == 1 and not refusals and job.ends is None
    advice = _if_alone(job) if is_alone else _if_some_are_missing(job)
    text = "\n".join([head, *refusals, advice])
    return RendezvousError(text, missing=missing, rank=missing[0])


def _if_alone(job: Job) -> str:
    return (
        "only this process was started, or the others do not call ferrodist.init(), as every rank "
        f"has to: {job.source.start_of(job.world_size)}. {_if_inherited(job, 'this process')}"
    )


def _if_some_are_missing(job: Job) -> str:
    return (
        "look at the output of the missing ones: they were not started, ended or hang before "
        f"ferrodist.init(), or have another {job.source.job}"
    )


def missing_host(job: Job, address: str, deadline: Deadline) -> RendezvousError:
    """Make a guest's error: nobody has listened for it."""
    return RendezvousError(
        f"rank 0 of job {job.name!r} did not come within {deadline}: nobody listens at {address}; "
        f"{this_process(job)}\n"
        f"look at the output of rank 0: it ended or hangs before ferrodist.init(), or has another "
        f"{job.source.job} or {job.source.world_size}=1. If it was not started, "
        f"{job.source.start_of(job.world_size)}. {_if_inherited(job, 'this process')}",
        rank=0,
        missing=[0],
        this_rank=job.rank,
    )


def second_process(job: Job, rank: int, first_pid: int, pid: int) -> RendezvousError:
    """Make the error of a process that comes for a rank which is there already."""
    return RendezvousError(
        f"rank {rank} of job {job.name!r} is there twice: pid {first_pid} has joined, pid {pid} "
        f"came second and was refused; {_what_to_change(job, rank, f'pid {pid}')}",
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


def wrong_world_size(job: Job, rank: int, size: int, pid: int) -> RendezvousError:
    """Make the error of a guest that believes in another world size than this host."""
    source = job.source
    return RendezvousError(
        f"rank {rank} (pid {pid}) was started for a world of {size}, rank 0 (pid {os.getpid()}) "
        f"for a world of {job.world_size}: {source.world_size}, from {source.name}, must be the "
        f"same on every rank of job {job.name!r}, and another job needs another {source.job}",
        rank=rank,
        got=size,
        expected=job.world_size,
    )


def left(job: Job, rank: int, pid: int) -> RendezvousError:
    """Make the error of a guest that has joined and left again."""
    how = (job.ends and job.ends.how(rank)) or "ended or gave up"
    return RendezvousError(
        f"rank {rank} (pid {pid}) {how} before all ranks of job {job.name!r} had joined; look at "
        "its own output",
        rank=rank,
    )


def host_left(job: Job, pid: int) -> RendezvousError:
    """Make a guest's error: rank 0 was there and is no longer."""
    return RendezvousError(
        f"rank 0 (pid {pid}) of job {job.name!r} is gone: it ended before all ranks had joined, or "
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
