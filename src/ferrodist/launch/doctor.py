# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist doctor``: look at this machine, and at the way to another, before ranks do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import click
from rich.console import Console

from ferrodist.config import environment
from ferrodist.errors import AuthenticationError, InvalidArgument, RendezvousError
from ferrodist.launch.checks.endpoint import DEFAULT_PORT, endpoint_of, parse_endpoint, parse_peer
from ferrodist.launch.checks.exam import examine
from ferrodist.launch.checks.finding import Finding, Level
from ferrodist.launch.checks.peer_call import call
from ferrodist.launch.checks.peer_findings import about, listener_findings, peer_findings
from ferrodist.launch.checks.peer_listen import Listener
from ferrodist.launch.checks.peer_measure import Measured
from ferrodist.launch.checks.report import show_findings, to_json, worst
from ferrodist.launch.checks.situation import Situation
from ferrodist.launch.cores import usable_cores
from ferrodist.rendezvous.interfaces import choose_address, list_interfaces
from ferrodist.rendezvous.launch import Endpoint

_ADVICE = {
    errno.ETIMEDOUT: "a firewall drops it, there or on the way: open the port; or the host is down",
    errno.ECONNREFUSED: "no doctor listens there (any more): start it with --listen PORT",
    None: "check name, address and port; 'ip route' shows which ways this host knows",
}

Callback = Callable[[click.Context, click.Parameter, str | None], Endpoint | None]


def _parsed(parse: Callable[[str], Endpoint]) -> Callback:
    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Endpoint | None:
        try:
            return None if value is None else parse(value)
        except InvalidArgument as error:
            raise click.BadParameter(str(error)) from error

    return callback


@click.command()
@click.option(
    "-n", "--ranks", type=click.IntRange(1, 4096), metavar="RANKS",
    help="How many ranks are to run here.  [default: one per core]",
)  # fmt: skip
@click.option(
    "--endpoint", metavar="HOST:PORT", callback=_parsed(parse_endpoint),
    help="Where rank 0 of the job listens.  [default: MASTER_ADDR:MASTER_PORT, if set]",
)  # fmt: skip
@click.option(
    "--listen", type=click.IntRange(0, 65535), metavar="[PORT]", is_flag=False,
    flag_value=DEFAULT_PORT,
    help="Wait at this port for the doctor of another host; it has to be told the code that is "
    f"shown; 0 is any free port.  [default: {DEFAULT_PORT}]",
)  # fmt: skip
@click.option(
    "--peer", metavar="HOST[:PORT]", callback=_parsed(parse_peer),
    help=f"Check both ways to the host whose doctor listens.  [default port: {DEFAULT_PORT}]",
)  # fmt: skip
@click.option("--code", metavar="CODE", help="What the doctor shows that listens; with --peer.")
@click.option(
    "--wait", "patience", type=click.FloatRange(min=0.1, max=86400), metavar="SECONDS", default=120,
    show_default=True, help="How long to wait with --listen.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def doctor(
    ctx: click.Context,
    ranks: int | None,
    endpoint: Endpoint | None,
    listen: int | None,
    peer: Endpoint | None,
    code: str | None,
    patience: float,
    as_json: bool,
) -> None:
    """Check this machine as a place to run ranks, and say what to do.

    Looks at network interfaces, names, ports, cores, memory, limits, clocks, variables, and at
    which libraries work. Takes some seconds and changes nothing. Exit code 1 if there is an error;
    warnings do not count.

    To check the way between two hosts, start "ferrodist doctor --listen 29500" on one of them, and
    on the other the command that it shows.
    """
    if listen is not None and peer is not None:
        raise click.UsageError("--listen is for one host, --peer for the other: use one of them")
    if (peer is None) != (code is None):
        raise click.UsageError(
            "--peer and --code belong together: the doctor that listens has both"
        )
    situation = Situation(
        ranks or usable_cores(), endpoint or endpoint_of(environment()), peer, environment()
    )
    findings, measured = _examine(situation, listen, code, patience)
    if as_json:
        click.echo(to_json(findings, measured))
    else:
        show_findings(Console(highlight=False), findings)
    ctx.exit(1 if worst(findings) is Level.ERROR else 0)


def _examine(
    situation: Situation, port: int | None, code: str | None, patience: float
) -> tuple[list[Finding], Measured | None]:
    """Look at this machine first, so that nothing disturbs what is measured afterwards."""
    if port is not None:
        return _examine_and_listen(situation, port, patience)
    findings, measured = examine(situation), None
    if situation.peer is not None:
        between, measured = _call(situation, situation.peer, code or "")
        findings += between
    return findings, measured


def _examine_and_listen(
    situation: Situation, port: int, patience: float
) -> tuple[list[Finding], Measured | None]:
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(Listener(port, _own_address(situation)))
        except OSError as error:
            raise click.ClickException(f"cannot listen at port {port}: {error.strerror}") from error
        click.echo(_invitation(listener, patience), err=True)
        findings = examine(situation)
        visit = listener.wait(patience)
    return [*findings, *listener_findings(visit, listener.port, patience)], visit.measured


def _own_address(situation: Situation) -> str | None:
    """Return the one address to listen at; None, which is all, if nobody has chosen."""
    pattern = situation.config.socket_ifname
    return choose_address(pattern)[1] if pattern else None


def _invitation(listener: Listener, patience: float) -> str:
    addresses = [listener.address] if listener.address else _addresses()
    command = f"ferrodist doctor --peer {Endpoint(addresses[0], listener.port)}"
    others = f" (or {', '.join(addresses[1:])})" if addresses[1:] else ""
    return (
        f"listening at {Endpoint(addresses[0], listener.port)}{others} for {patience:g} s; on the "
        f"other host:\n\n    {command} --code {listener.code}\n"
    )


def _addresses() -> list[str]:
    """List where others may find this host, the likeliest first."""
    first = choose_address("")[1]
    others = [
        one.address
        for one in list_interfaces()
        if not one.is_loopback and "%" not in one.address and one.address != first
    ]
    return [first, *others]


def _call(situation: Situation, peer: Endpoint, code: str) -> tuple[list[Finding], Measured | None]:
    try:
        measured = call(peer, code, situation.config.ports)
    except (RendezvousError, AuthenticationError) as error:
        return list(_no_talk(peer, error)), None
    return list(peer_findings(measured)), measured


def _no_talk(peer: Endpoint, error: RendezvousError | AuthenticationError) -> Iterator[Finding]:
    if isinstance(error, AuthenticationError):
        yield about.error(
            f"{peer} has refused: {error}", "copy the whole command that the other doctor shows"
        )
    else:
        yield about.error(
            f"{peer} cannot be reached: {error}", _ADVICE.get(error.errno, _ADVICE[None])
        )
