# SPDX-License-Identifier: MIT OR Apache-2.0
"""The errors of ranks that do not meet: who is missing or too many, who said so, and what to do.

``EarlyExits`` raises one of them as soon as a rank has ended that nobody needs to wait for.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ferrodist.config import variable
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, RendezvousError
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.watch import describe_exit, try_stopped_process

if TYPE_CHECKING:
    from ferrodist.rendezvous.mesh import PeerAddress

logger = logging.getLogger("ferrodist")

_MAX_RANKS_SHOWN = 16
_MAX_PEERS_SHOWN = 8
_LOOK_SECONDS = 0.1  # between two looks at the status board
_LINE_SECONDS = 60.0  # between two log lines


class EarlyExits:
    """Looks for ranks that ended before they joined, on the status board if there is one.

    Every minute it logs which of them live and have not joined.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._start = time.monotonic()
        self._next_look = 0.0
        self._next_line = self._start + _LINE_SECONDS

    def check(self, ranks: Iterable[int], missing: Sequence[int] = ()) -> None:
        """Raise RendezvousError if one of the ranks has ended, unless the last look was now.

        ``missing`` are those that have not joined, for the log.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        self.check_now(ranks)
        if missing and now >= self._next_line and self._job.status_board is not None:
            self._next_line = now + _LINE_SECONDS
            shown = [self._describe_missing(rank) for rank in missing[:_MAX_RANKS_SHOWN]]
            names = _listed([*shown, *missing[_MAX_RANKS_SHOWN:]])  # each takes a look at /proc
            text = "rank %d: still waiting for %s to call ferrodist.init() after %.0f s"
            logger.warning(text, self._job.rank, names, now - self._start)

    def _describe_missing(self, rank: int) -> str:
        pid = try_stopped_process(self._job.name, rank)
        state = "running" if pid is None else f"stopped: 'kill -CONT {pid}' continues it"
        return f"rank {rank} ({state})"

    def check_now(self, ranks: Iterable[int]) -> None:
        board = self._job.status_board
        if board is None:
            return
        ended = {rank: how for rank in ranks if (how := board.describe(rank)) is not None}
        if ended:
            raise ended_early(self._job, ended)


# -- ranks that do not come to rank 0 -------------------------------------------------------------


def missing_ranks(
    job: Job, present: Mapping[int, str], deadline: Deadline, refusals: Sequence[str]
) -> RendezvousError:
    launcher, size = job.launcher, job.world_size
    missing = [rank for rank in range(size) if rank not in present]
    here = _listed([f"rank {rank} ({who})" for rank, who in present.items()])
    head = (
        f"{_listed([f'rank {rank}' for rank in missing])} of {size} did not join job "
        f"{job.name!r} within {deadline}; here: {here}; {launcher.world_size}={size} is from "
        f"{launcher.name}"
    )
    is_alone = len(present) == 1 and not refusals and job.status_board is None
    if is_alone:
        text = f"{head}\n{_if_alone(job)}"
    else:  # in one line, for the launcher to see that several ranks show the same
        text = "; ".join([head, *refusals, _if_some_are_missing(job)])
    return RendezvousError(text, missing=missing, rank=missing[0])


def without_secret(job: Job, count: int) -> str:
    if job.uses_munge:
        return f"refused: {count} connections that MUNGE did not show to be of this user and job"
    return (
        f"refused: {count} connections without the job's secret; if they were ranks, compare the "
        f"file of {variable('secret_file')} on all hosts (sha256sum)"
    )


def _if_alone(job: Job) -> str:
    return (
        "only this process was started, or the others do not call ferrodist.init(), as every rank "
        f"has to: {job.launcher.how_to_start(job.world_size)}{_if_elsewhere(job)}"
        f"{_if_between_hosts(job)}. "
        f"{_if_inherited(job, 'this process')}"
    )


def _if_some_are_missing(job: Job) -> str:
    return (
        "look at the output of the missing ones: they were not started, ended or hang before "
        f"ferrodist.init(), or have another {job.launcher.job}{_if_between_hosts(job)}"
        f"{_if_elsewhere(job)}"
    )


def _if_elsewhere(job: Job) -> str:
    """Say what is missing if ranks are on other hosts, where nobody could tell."""
    is_open = job.endpoint is not None and not is_loopback(job.endpoint.host)
    if job.has_secret or not job.meets_here or not (is_open or job.several_hosts):
        return ""
    where = "on other hosts" if is_open else "of another user, or behind a tunnel"
    return f"; if they are {where}, all ranks need {variable('secret_file')}"


def _if_between_hosts(job: Job) -> str:
    if job.meets_here or job.endpoint is None:
        return ""
    return (
        f"; or the command differs between hosts (endpoint, number of hosts, ranks per host); or a "
        f"firewall keeps ranks from {job.endpoint}, which 'ferrodist doctor' can tell"
    )


def missing_server(job: Job, address: str, deadline: Deadline) -> RendezvousError:
    launcher, elsewhere = job.launcher, f"{_if_between_hosts(job)}{_if_elsewhere(job)}"
    return RendezvousError(
        f"rank 0 of job {job.name!r} did not come within {deadline}: nobody listens at {address}; "
        f"{this_process(job)}\n"
        f"look at the output of rank 0: it ended or hangs before ferrodist.init(), or has another "
        f"{launcher.job} or {launcher.world_size}=1{elsewhere}. If it was not "
        f"started, {launcher.how_to_start(job.world_size)}. {_if_inherited(job, 'this process')}",
        rank=0,
        missing=[0],
        this_rank=job.rank,
    )


def no_answer(job: Job, who: str, deadline: Deadline) -> RendezvousError:
    return RendezvousError(
        f"rank 0 of job {job.name!r} ({who}) did not answer within {deadline}; {this_process(job)}",
        rank=0,
        this_rank=job.rank,
    )


def server_left(job: Job, who: str) -> RendezvousError:
    return RendezvousError(
        f"rank 0 ({who}) of job {job.name!r} is gone: it ended before all ranks had joined, or "
        f"they all had, without this one; {_why_first(job, 'its')}; {this_process(job)}",
        rank=0,
        this_rank=job.rank,
    )


def client_left(job: Job, rank: int, who: str) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} ({who}) {_how_it_left(job, rank)} before all ranks of job {job.name!r} had "
        "joined; look at its own output",
        rank=rank,
    )


def _how_it_left(job: Job, rank: int) -> str:
    board = job.status_board
    return (board and board.describe(rank)) or "ended or gave up"


def ended_early(job: Job, ended: Mapping[int, str]) -> RendezvousError:
    how_each = [_how_early(job, rank, how) for rank, how in ended.items()]
    whose = "its" if len(ended) == 1 else "their"
    ranks = list(ended)
    return RendezvousError(
        f"{_listed(how_each)}; {_why_first(job, whose)}", rank=ranks[0], missing=ranks
    )


def note_own_failure(job: Job, error: BaseException) -> None:
    """Put what this rank alone is at fault for on the board, for ranks that it cannot reach."""
    if isinstance(error, OSError) and not isinstance(error, DistributedError):
        error = could_not_join(job, error)
    if job.status_board is not None and getattr(error, "rank", None) == job.rank:
        text = f"{type(error).__name__}: {error}"
        job.status_board.set_final_error(job.rank, text, is_consequence=False)


def _why_first(job: Job, whose: str) -> str:
    """Say what the first rank that failed has noted, or whose output to look at."""
    board = job.status_board
    noted = [(rank, board.final_error(rank)) for rank in range(job.world_size)] if board else []
    own = [(e.when, rank, e.text) for rank, e in noted if e is not None and not e.is_consequence]
    if not own:
        return f"look at {whose} own output"
    _, rank, text = min(own)
    return f"rank {rank} raised {text}"


def _how_early(job: Job, rank: int, how: str) -> str:
    if how == describe_exit(0):
        return (
            f"rank {rank} ended (exit code 0) without calling ferrodist.init(), which all "
            f"{job.world_size} ranks of job {job.name!r} have to do, or caught its error"
        )
    return f"rank {rank} {how} before it joined job {job.name!r}"


def not_ready_in_time(
    job: Job, slow: Sequence[int], who: Mapping[int, str], deadline: Deadline
) -> RendezvousError:
    if not slow:
        return RendezvousError(f"the ranks of job {job.name!r} did not get ready in time")
    shown = ", ".join(f"rank {rank} ({who[rank]})" for rank in slow[:_MAX_RANKS_SHOWN])
    return RendezvousError(
        f"{shown} joined job {job.name!r} and then did not get ready within {deadline}",
        rank=slow[0],
        missing=list(slow),
    )


# -- ranks that do not fit the job ----------------------------------------------------------------


def second_process(job: Job, rank: int, first: str, second: str) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} of job {job.name!r} exists twice: {first} has joined, {second} "
        f"came second and was refused; {_what_to_change(job, rank, second)}",
        rank=rank,
    )


def second_server(job: Job, address: str, first_pid: int | None) -> RendezvousError:
    first = "another process" if first_pid is None else f"pid {first_pid}"
    return RendezvousError(
        f"rank 0 of job {job.name!r} exists twice: {first} listens at {address}, perhaps for "
        f"another job of this name, and this is pid {os.getpid()}; "
        f"{_what_to_change(job, 0, 'this process')}",
        rank=0,
        this_rank=0,
    )


def server_of_another_user(job: Job, address: str, pid: int, uid: int) -> RendezvousError:
    return RendezvousError(
        f"rank 0 of job {job.name!r} cannot listen at {address}: pid {pid} of user {uid} does, and "
        f"this is pid {os.getpid()} of user {os.geteuid()}. Give the job another "
        f"{job.launcher.job}, or have that process ended",
        rank=0,
        this_rank=0,
    )


def wrong_world_size(job: Job, rank: int, size: int, who: str, server: str) -> RendezvousError:
    launcher = job.launcher
    return RendezvousError(
        f"rank {rank} ({who}) was started for a world of {size}, rank 0 ({server}) "
        f"for a world of {job.world_size}: {launcher.world_size}, from {launcher.name}, must be "
        f"the same on every rank of job {job.name!r}, and another job needs another {launcher.job}",
        rank=rank,
        got=size,
        expected=job.world_size,
    )


def different_scripts(job: Job, rank: int, script: str, who: str, server: str) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} ({who}) runs {script}, rank 0 ({server}) of job {job.name!r} runs "
        f"{job.script}: {how_to_tell_apart(job)}",
        rank=rank,
        got=script,
        expected=job.script,
    )


def how_to_tell_apart(job: Job) -> str:
    return (
        "these are two jobs with one MASTER_PORT, or one job of several scripts. Give every job "
        f"its own MASTER_PORT; or set {variable('job')}, on all ranks of a job, to a name that no "
        f"other job has; or use 'ferrodist run -n {job.world_size} script.py'"
    )


def different_backends(job: Job, rank: int, who: str) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} ({who}) and rank 0 of job {job.name!r} do not make the same backend: one "
        "shares memory and one does not; give all ranks the same name in init() and "
        f"{variable('backend')}",
        rank=rank,
    )


def several_hosts(job: Job) -> RendezvousError:
    return RendezvousError(
        f"the {job.world_size} ranks of job {job.name!r} are on several hosts "
        f"({job.launcher.name}: {job.hosts}), and shared memory is limited to one host: use the "
        "backend 'hybrid', which shares memory within each host, or 'tcp', or start all ranks on "
        "one host",
        this_rank=job.rank,
        world_size=job.world_size,
    )


def files_needed(num_ranks: int) -> int:
    """Return about how many files a process of the job opens, be it a rank or ``ferrodist run``.

    A rank opens its program's, and up to three for every peer: its memory and its watch on one
    host, a connection between hosts. The launcher opens up to five for every rank, for its output.
    """
    return max(64 + 3 * num_ranks, 24 + 5 * num_ranks)


def lacks_files(error: BaseException) -> bool:
    """Tell whether the system refused to open one more file."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def too_few_files(what: str, who: str, num_ranks: int) -> str:
    """Say that ``what`` failed for lack of files, and how many ``who`` needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need, others = files_needed(num_ranks), ""
    if need <= limit:  # the program has opened many itself
        need, others = need + limit, f", with the {limit} that are open"
    return (
        f"{what}: a process may open {limit} files here, and {who} needs about {need}{others}; "
        f"'ulimit -n {need}' in the shell that starts the ranks"
    )


def no_file_limit_left(what: str, num_ranks: int, **facts: int) -> RendezvousError:
    return RendezvousError(too_few_files(what, f"each of {num_ranks} ranks", num_ranks), **facts)


def could_not_join(job: Job, error: OSError) -> RendezvousError:
    what = f"rank {job.rank} could not join job {job.name!r}"
    facts = {"rank": job.rank, "this_rank": job.rank}
    if lacks_files(error):
        return no_file_limit_left(what, job.world_size, **facts)
    return RendezvousError(f"{what}: {error}", **facts)


def this_process(job: Job) -> str:
    launcher = job.launcher
    return (
        f"this is rank {job.rank} of {job.world_size}, pid {os.getpid()} ({launcher.name}: "
        f"{launcher.rank}={job.rank}, {launcher.world_size}={job.world_size})"
    )


def _what_to_change(job: Job, rank: int, second: str) -> str:
    launcher = job.launcher
    return (
        f"both have {launcher.rank}={rank}, from {launcher.name}. Give every process its own "
        f"{launcher.rank}, and every job its own {launcher.job}. {_if_inherited(job, second)}"
    )


def _if_inherited(job: Job, process: str) -> str:
    return (
        f"If a rank has started {process}, {job.launcher.rank} is that rank's: start it with "
        "'ferrodist run -n 1 script.py' to make it a world of its own"
    )


# -- ranks that know of each other and cannot connect ---------------------------------------------


def unreachable(job: Job, peer: PeerAddress, why: str) -> RendezvousError:
    return RendezvousError(
        f"{peer} of job {job.name!r} could not be reached from rank {job.rank} at {peer.endpoint}: "
        f"{why}; {_what_to_do()}",
        rank=peer.rank,
        this_rank=job.rank,
        address=str(peer.endpoint),
    )


def not_connected(
    job: Job, own: PeerAddress, peers: Sequence[PeerAddress], deadline: Deadline
) -> RendezvousError:
    return RendezvousError(
        f"{_listed(peers, _MAX_PEERS_SHOWN)} of job {job.name!r} did not connect to {own} at "
        f"{own.endpoint} within {deadline}: look at the output of those; {_what_to_do()}",
        rank=peers[0].rank,
        this_rank=job.rank,
        missing=[peer.rank for peer in peers],
        address=str(own.endpoint),
    )


def not_ready(job: Job, peers: Sequence[PeerAddress], deadline: Deadline) -> RendezvousError:
    return RendezvousError(
        f"{_listed(peers, _MAX_PEERS_SHOWN)} of job {job.name!r} did not say within {deadline} "
        f"that all ranks are connected: look at the output of those; {_what_to_do()}",
        rank=peers[0].rank,
        this_rank=job.rank,
        missing=[peer.rank for peer in peers],
    )


def peer_left(job: Job, peer: PeerAddress) -> RendezvousError:
    return RendezvousError(
        f"{peer} {_how_it_left(job, peer.rank)} before all ranks of job {job.name!r} were "
        "connected; look at its own output",
        rank=peer.rank,
        this_rank=job.rank,
    )


def no_file_limit_left_for(job: Job, peer: PeerAddress) -> RendezvousError:
    what = f"rank {job.rank} cannot connect to {peer}"
    return no_file_limit_left(what, job.world_size, rank=job.rank, this_rank=job.rank)


def wrong_answer(job: Job, peer: PeerAddress, error: DistributedError) -> DistributedError:
    """Make the error for an address where somebody else answers, or in another protocol."""
    return type(error)(
        f"rank {job.rank} looked for {peer} at {peer.endpoint}: {error}",
        rank=peer.rank,
        this_rank=job.rank,
        got=error.got,
        expected=error.expected,
    )


def _what_to_do() -> str:
    return (
        "let the hosts connect to each other at all ports, or set "
        f"{variable('ports')} to those that a firewall lets through; set "
        f"{variable('socket_ifname')} if this is the wrong network; 'ferrodist doctor' tries both"
    )


def _listed(items: Sequence[object], max_shown: int = _MAX_RANKS_SHOWN) -> str:
    more = len(items) - max_shown
    shown = ", ".join(map(str, items[:max_shown]))
    return f"{shown} and {more} more" if more > 0 else shown
