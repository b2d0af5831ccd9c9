# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist run``: a script on n processes, of one host or several. Only the command line."""

from __future__ import annotations

import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from ferrodist.errors import InvalidArgument
from ferrodist.launch.hosts import Remote, find_remote, introduce, supervise_hosts
from ferrodist.launch.machine import share_cores, threads_per_rank
from ferrodist.launch.nodes import HostOptions, check_restarts, find_node, host_options
from ferrodist.launch.output.console import Console, console_of_files
from ferrodist.launch.output.logs import Choice, LogFiles, parse_choice
from ferrodist.launch.processes import NodeSpec, standard_files_taken
from ferrodist.launch.ssh import ControlPipe
from ferrodist.launch.supervisor import FailurePolicy, JobSpec, supervise
from ferrodist.rendezvous.errors import lacks_files, too_few_files
from ferrodist.rendezvous.job import number


def _parse_sizes(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Read numbers of ranks, one for all hosts or one for each; None is a rank per core."""
    if value is None or value == "auto":
        return None
    if value == "p":
        raise click.BadParameter("-np is mpiexec's option; write -n N, as in ferrodist run -n 2")
    sizes = tuple(map(number, value.split(",")))
    if min(sizes) < 1:
        raise click.BadParameter(f"{value!r} is neither a number above zero nor 'auto'")
    return sizes


def _parse_streams(ctx: click.Context, param: click.Parameter, value: str | None) -> Choice | None:
    try:
        return None if value is None else parse_choice(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from error


def _refuse_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("expected seconds")
    return value


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "--nproc-per-node", "sizes", callback=_parse_sizes, metavar="N",
    help="Processes per host. Default on one host: auto, which is one per core.",
)  # fmt: skip
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program, not Python code.")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), metavar="N", default=0, show_default=True,
    help="How often to restart all ranks after one has failed.",
)  # fmt: skip
@click.option(
    "--grace", type=click.FloatRange(min=0, max=1e9), callback=_refuse_nan, metavar="SECONDS",
    default=5.0, show_default=True,
    help="Seconds that other ranks may continue after a failure, before SIGTERM and SIGKILL. After "
    "a normal end, the time between the two for processes that ranks left running.",
)  # fmt: skip
@click.option(
    "--keep-survivors", is_flag=True,
    help="After a failure, let the other ranks continue without a limit.",
)  # fmt: skip
@click.option(
    "--keep-children", is_flag=True,
    help="After a normal end, do not end processes that ranks left running.",
)  # fmt: skip
@click.option(
    "--bind", type=click.Choice(["cores", "none"]), default="none", show_default=True,
    help="cores: bind each rank to its own cores, if there are enough.",
)  # fmt: skip
@click.option(
    "--log-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Also write the output of each rank to files in a new folder in DIR.",
)  # fmt: skip
@click.option(
    "-t", "--tee", callback=_parse_streams, metavar="STREAMS",
    help="Streams to show and write to files: 1 stdout, 2 stderr, 3 both; or 0:1,1:3 by rank.",
)  # fmt: skip
@click.option(
    "-r", "--redirects", callback=_parse_streams, metavar="STREAMS",
    help="Streams to write only to files.",
)  # fmt: skip
@click.option(
    "--debug-rank", type=click.IntRange(min=0), metavar="RANK",
    help="Give the terminal to this rank instead of rank 0, for a debugger in it; the others wait "
    "for it without a deadline, unless a timeout is set in the environment or passed to init() or "
    "a call. On one host.",
)  # fmt: skip
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
    keep_children: bool,
    bind: str,
    log_dir: Path | None,
    tee: Choice | None,
    redirects: Choice | None,
    debug_rank: int | None,
    script: str,
    args: tuple[str, ...],
    **others: Any,
) -> None:
    """Start N processes of SCRIPT as one job.

    The script joins the job with ferrodist.init(). Arguments after SCRIPT are passed to it. Output
    of rank 0 is unchanged; lines of other ranks are prefixed with their rank. If a rank fails, the
    others are ended after --grace seconds, its traceback is shown last, and its exit code is
    returned.
    """
    options = HostOptions(**others)
    if is_module and no_python:
        raise click.UsageError("--module and --no-python exclude each other")
    files = LogOptions(log_dir, tee, redirects)
    policy = FailurePolicy(max_restarts, grace, keep_survivors, keep_children)
    if options.is_for_others:
        _check_debug_rank(debug_rank, num_ranks=0)
        passed_on = ["--grace", str(grace), "--bind", bind, *files.to_arguments()]
        flags = {
            "-m": is_module,
            "--no-python": no_python,
            "--keep-survivors": keep_survivors,
            "--keep-children": keep_children,
        }
        passed_on += [name for name, is_given in flags.items() if is_given]
        remote = find_remote(options, sizes, passed_on, [script, *args])
        files.check(sum(remote.sizes))
        ctx.exit(_run_there(remote, policy))
    node = find_node(options, sizes)
    files.check(node.world_size)
    _check_debug_rank(debug_rank, num_ranks=node.world_size if len(node.sizes) == 1 else 0)
    node = replace(node, debug_rank=debug_rank)
    if len(node.sizes) > 1 and max_restarts and options.only_attempt is None:
        check_restarts(grace=grace, keeps_survivors=keep_survivors)
    command = _command(script, args, is_module=is_module, no_python=no_python)
    policy = policy._replace(only_attempt=options.only_attempt)
    spec = JobSpec(command, node, policy, binds=bind == "cores")
    ctx.exit(_run_here(spec, files.open(), options.rdzv_id if options.held_by_ssh else None))


def _check_debug_rank(rank: int | None, num_ranks: int) -> None:
    """Refuse a rank to debug that is not there; ``num_ranks`` is 0 for ranks on several hosts."""
    if rank is None or rank < num_ranks:
        return
    if num_ranks == 0:
        raise click.UsageError("--debug-rank is for a job on one host: its terminal is here")
    raise click.UsageError(f"--debug-rank {rank}: the ranks are 0 to {num_ranks - 1}")


class LogOptions(NamedTuple):
    """The values of the options for log files."""

    directory: Path | None
    tee: Choice | None
    redirects: Choice | None

    def check(self, world_size: int) -> None:
        for choice in (self.tee, self.redirects):
            if choice is not None and any(rank >= world_size for rank in choice.by_rank):
                raise click.UsageError(f"--tee or --redirects names a rank beyond {world_size - 1}")
        if self.directory is None and (self.tee is not None or self.redirects is not None):
            raise click.UsageError("--tee and --redirects write to files: say where, by --log-dir")

    def to_arguments(self) -> list[str]:
        words = [] if self.directory is None else ["--log-dir", str(self.directory)]
        for name, choice in {"--tee": self.tee, "--redirects": self.redirects}.items():
            words += [] if choice is None else [name, choice.to_text()]
        return words

    def open(self) -> LogFiles | None:
        if self.directory is None:
            return None
        try:
            return LogFiles(self.directory, tee=self.tee, redirects=self.redirects)
        except OSError as error:
            raise click.UsageError(f"--log-dir {self.directory}: {error.strerror}") from error


def _run_here(spec: JobSpec, logs: LogFiles | None, held_by: str | None) -> int:
    """Run the ranks of this host; ``held_by`` is a job whose launcher has started this one."""
    console = console_of_files() if held_by is None else console_of_files(stdin=-1)
    control = None if held_by is None else ControlPipe(held_by, console)
    _introduce(spec, console, logs)
    try:
        with standard_files_taken():
            return supervise(spec, console, logs, control)
    except OSError as error:
        raise click.ClickException(_why_not_started(spec.node, error)) from error


def _why_not_started(node: NodeSpec, error: OSError) -> str:
    what = f"cannot start {node.num_ranks} ranks"
    if not lacks_files(error):
        return f"{what}: {error}"
    return too_few_files(what, "the launcher", node.world_size)


def _run_there(remote: Remote, policy: FailurePolicy) -> int:
    console = console_of_files()
    introduce(remote, console)
    try:
        with standard_files_taken():
            return supervise_hosts(remote, policy, console)
    except OSError as error:
        raise click.ClickException(f"cannot start {remote.ssh[0]!r}: {error}") from error


def _command(script: str, args: tuple[str, ...], *, is_module: bool, no_python: bool) -> list[str]:
    if no_python:
        if shutil.which(script) is None:
            raise click.UsageError(f"there is no program {script!r}")
        return [script, *args]
    if is_module:
        return [sys.executable, "-m", script, *args]
    if not Path(script).exists():
        raise click.UsageError(_why_no_script(script, args))
    return [sys.executable, script, *args]


def _why_no_script(script: str, args: tuple[str, ...]) -> str:
    if args and re.fullmatch(r"python[\d.]*", Path(script).name):
        rest = " ".join(args)
        return (
            f"{script!r} is not needed, ferrodist run starts Python itself: write '{rest}' alone; "
            f"another interpreter is started by --no-python {script} {rest}"
        )
    if shutil.which(script) is not None:
        return f"there is no file {script!r} here; for the program of that name, say --no-python"
    return f"there is no file {script!r} here ({Path.cwd()})"


def _introduce(spec: JobSpec, console: Console, logs: LogFiles | None) -> None:
    words = []
    if console.stderr.terminal is not None and spec.node.num_ranks > 1:
        has_own = spec.binds and share_cores(spec.node.num_ranks) is not None
        cores = "each with cores of its own" if has_own else "sharing all cores"
        threads = threads_per_rank(spec.node.num_ranks)
        words.append(f"{spec.node.num_ranks} ranks, {cores}, {threads} thread(s) each for OpenMP")
    if logs is not None:
        words.append(f"log files in {logs.directory}")
    if words:
        console.say(f"ferrodist run: {'; '.join(words)}")
