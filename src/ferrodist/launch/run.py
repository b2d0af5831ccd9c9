# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist run``: a script on n processes of this host. Here is the command line alone."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import click

from ferrodist.errors import InvalidArgument
from ferrodist.launch.cores import share_cores, threads_per_rank, usable_cores
from ferrodist.launch.output.console import Console, console_of_files
from ferrodist.launch.output.logs import Choice, LogFiles, parse_choice
from ferrodist.launch.processes import standard_files_taken
from ferrodist.launch.supervisor import Plan, supervise


def _parse_num_ranks(ctx: click.Context, param: click.Parameter, value: str) -> int:
    if value == "auto":
        return usable_cores()
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise click.BadParameter(f"{value!r} is neither a number above zero nor 'auto'")
    return int(value)


def _refuse_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("expected seconds")
    return value


def _parse_streams(ctx: click.Context, param: click.Parameter, value: str | None) -> Choice | None:
    try:
        return None if value is None else parse_choice(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from error


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "--nproc-per-node", "num_ranks", callback=_parse_num_ranks, metavar="N", default="auto",
    help="How many processes to start; auto, the default, is one per core.",
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
    "--bind", type=click.Choice(["cores", "none"]), default="cores", show_default=True,
    help="Give each rank cores of its own, if there are enough.",
)  # fmt: skip
@click.option(
    "--log-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Write what each rank writes to files in a new folder of DIR as well.",
)  # fmt: skip
@click.option(
    "-t", "--tee", callback=_parse_streams, metavar="STREAMS",
    help="Which streams to write to files as well: 1 stdout, 2 stderr, 3 both; or 0:1,1:3 by rank.",
)  # fmt: skip
@click.option(
    "-r", "--redirects", callback=_parse_streams, metavar="STREAMS",
    help="Which streams to write to files only.",
)  # fmt: skip
@click.option("--standalone", is_flag=True, hidden=True, help="What torchrun needs on one host.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    num_ranks: int,
    is_module: bool,
    no_python: bool,
    max_restarts: int,
    grace: float,
    keep_survivors: bool,
    bind: str,
    log_dir: Path | None,
    tee: Choice | None,
    redirects: Choice | None,
    standalone: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT on N processes that form one job.

    In the script, ferrodist.init() joins it. Everything after SCRIPT belongs to the script. What
    rank 0 writes is passed on as it is, what the others write by lines that name them. If a process
    fails, the others are ended soon after; its traceback is shown last, and its exit code is that
    of this command.
    """
    plan = Plan(
        _command(script, args, is_module=is_module, no_python=no_python),
        num_ranks,
        most_restarts=max_restarts,
        grace=grace,
        keeps_survivors=keep_survivors,
        binds=bind == "cores",
    )
    logs = _open_logs(log_dir, tee, redirects, num_ranks)
    console = console_of_files()
    _introduce(plan, console, logs)
    try:
        with standard_files_taken():
            code = supervise(plan, console, logs)
    except OSError as error:
        raise click.ClickException(f"cannot start {num_ranks} ranks: {error}") from error
    ctx.exit(code)


def _command(script: str, args: tuple[str, ...], *, is_module: bool, no_python: bool) -> list[str]:
    if is_module and no_python:
        raise click.UsageError("--module and --no-python exclude each other")
    if no_python:
        if shutil.which(script) is None:
            raise click.UsageError(f"there is no program {script!r}")
        return [script, *args]
    if is_module:
        return [sys.executable, "-m", script, *args]
    if not Path(script).exists():
        raise click.UsageError(f"there is no file {script!r} here")
    return [sys.executable, script, *args]


def _open_logs(
    directory: Path | None, tee: Choice | None, redirects: Choice | None, num_ranks: int
) -> LogFiles | None:
    for choice in (tee, redirects):
        if choice is not None and any(rank >= num_ranks for rank in choice.by_rank):
            raise click.UsageError(f"--tee or --redirects names a rank beyond {num_ranks - 1}")
    if directory is None:
        if tee is not None or redirects is not None:
            raise click.UsageError("--tee and --redirects write to files: say where, by --log-dir")
        return None
    try:
        return LogFiles(directory, tee=tee, redirects=redirects)
    except OSError as error:
        raise click.UsageError(f"--log-dir {directory}: {error.strerror}") from error


def _introduce(plan: Plan, console: Console, logs: LogFiles | None) -> None:
    """Say once, to people, what they may not expect."""
    words = []
    if console.stderr.terminal is not None and plan.num_ranks > 1:
        has_own = plan.binds and share_cores(plan.num_ranks) is not None
        cores = "each with cores of its own" if has_own else "sharing all cores"
        threads = threads_per_rank(plan.num_ranks)
        words.append(f"{plan.num_ranks} ranks, {cores}, {threads} thread(s) each for OpenMP")
    if logs is not None:
        words.append(f"log files in {logs.directory}")
    if words:
        console.say(f"ferrodist run: {'; '.join(words)}")
