# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist run``: a script on n processes, of one host or several. The command line alone."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from ferrodist.launch.cores import share_cores, threads_per_rank
from ferrodist.launch.host_options import HostOptions, host_options
from ferrodist.launch.hosts_command import find_remote, introduce
from ferrodist.launch.hosts_supervisor import HostsPlan, supervise_hosts
from ferrodist.launch.leash import Leash
from ferrodist.launch.log_options import LogOptions, log_options
from ferrodist.launch.nodes import check_restarts, find_part
from ferrodist.launch.output.console import Console, console_of_files
from ferrodist.launch.output.logs import Choice, LogFiles
from ferrodist.launch.processes import standard_files_taken
from ferrodist.launch.supervisor import Plan, supervise
from ferrodist.rendezvous.launch import number


def _parse_sizes(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Read numbers of ranks, one for all hosts or one for each; None is a rank per core."""
    if value is None or value == "auto":
        return None
    sizes = tuple(map(number, value.split(",")))
    if min(sizes) < 1:
        raise click.BadParameter(f"{value!r} is neither a number above zero nor 'auto'")
    return sizes


def _refuse_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("expected seconds")
    return value


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "--nproc-per-node", "sizes", callback=_parse_sizes, metavar="N",
    help="How many processes to start on each host; auto, the default on one, is one per core.",
)  # fmt: skip
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program of its own.")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), metavar="N", default=0, show_default=True,
    help="How often to start all ranks again after one has failed.",
)  # fmt: skip
@click.option(
    "--grace", type=click.FloatRange(min=0, max=1e9), callback=_refuse_nan, metavar="SECONDS",
    default=5.0, show_default=True,
    help="How long the others may go on after a rank has failed; then SIGTERM and SIGKILL.",
)  # fmt: skip
@click.option("--keep-survivors", is_flag=True, help="Let the others go on as long as they like.")
@click.option(
    "--bind", type=click.Choice(["cores", "none"]), default="none", show_default=True,
    help="cores: bind each rank to cores of its own, if there are enough.",
)  # fmt: skip
@log_options
@host_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    sizes: tuple[int, ...] | None,
    is_module: bool,
    no_python: bool,
    max_restarts: int,
    grace: float,
    keep_survivors: bool,
    bind: str,
    log_dir: Path | None,
    tee: Choice | None,
    redirects: Choice | None,
    script: str,
    args: tuple[str, ...],
    **others: Any,
) -> None:
    """Run SCRIPT on N processes that form one job.

    In the script, ferrodist.init() joins it. Everything after SCRIPT belongs to the script. What
    rank 0 writes is passed on as it is, what the others write by lines that name them. If a process
    fails, the others are ended soon after; its traceback is shown last, and its exit code is that
    of this command.
    """
    options = HostOptions(**others)
    if is_module and no_python:
        raise click.UsageError("--module and --no-python exclude each other")
    files = LogOptions(log_dir, tee, redirects)
    if options.is_for_others:
        passed_on = ["--grace", str(grace), "--bind", bind, *files.to_words()]
        flags = {"-m": is_module, "--no-python": no_python, "--keep-survivors": keep_survivors}
        passed_on += [name for name, is_given in flags.items() if is_given]
        remote = find_remote(options, sizes, passed_on, [script, *args])
        files.check(sum(remote.sizes))
        ctx.exit(_run_there(HostsPlan(remote, max_restarts, grace, keep_survivors)))
    part = find_part(options, sizes)
    files.check(part.world_size)
    if len(part.sizes) > 1 and max_restarts and options.only_attempt is None:
        check_restarts(grace=grace, keeps_survivors=keep_survivors)
    plan = Plan(
        _command(script, args, is_module=is_module, no_python=no_python),
        part,
        most_restarts=max_restarts,
        grace=grace,
        keeps_survivors=keep_survivors,
        binds=bind == "cores",
        only_attempt=options.only_attempt,
    )
    ctx.exit(_run_here(plan, files.open(), options.rdzv_id if options.held_by_ssh else None))


def _run_here(plan: Plan, logs: LogFiles | None, held_by: str | None) -> int:
    """Run the ranks of this host; ``held_by`` is a job whose launcher has started this one."""
    console = console_of_files() if held_by is None else console_of_files(stdin=-1)
    leash = None if held_by is None else Leash(held_by, console)
    _introduce(plan, console, logs)
    try:
        with standard_files_taken():
            return supervise(plan, console, logs, leash)
    except OSError as error:
        raise click.ClickException(f"cannot start {plan.part.num_ranks} ranks: {error}") from error


def _run_there(plan: HostsPlan) -> int:
    """Run the ranks of all hosts."""
    console = console_of_files()
    introduce(plan.remote, console)
    try:
        with standard_files_taken():
            return supervise_hosts(plan, console)
    except OSError as error:
        raise click.ClickException(f"cannot start {plan.remote.ssh[0]!r}: {error}") from error


def _command(script: str, args: tuple[str, ...], *, is_module: bool, no_python: bool) -> list[str]:
    if no_python:
        if shutil.which(script) is None:
            raise click.UsageError(f"there is no program {script!r}")
        return [script, *args]
    if is_module:
        return [sys.executable, "-m", script, *args]
    if not Path(script).exists():
        raise click.UsageError(f"there is no file {script!r} here")
    return [sys.executable, script, *args]


def _introduce(plan: Plan, console: Console, logs: LogFiles | None) -> None:
    """Say once, to people, what they may not expect."""
    words = []
    if console.stderr.terminal is not None and plan.part.num_ranks > 1:
        has_own = plan.binds and share_cores(plan.part.num_ranks) is not None
        cores = "each with cores of its own" if has_own else "sharing all cores"
        threads = threads_per_rank(plan.part.num_ranks)
        words.append(f"{plan.part.num_ranks} ranks, {cores}, {threads} thread(s) each for OpenMP")
    if logs is not None:
        words.append(f"log files in {logs.directory}")
    if words:
        console.say(f"ferrodist run: {'; '.join(words)}")
