# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist doctor``: look at this machine, and at the way to another, before ranks do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict

import click
from rich.console import Console

import ferrodist
from ferrodist.config import Config, environment, variable
from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    InvalidArgument,
    ProtocolError,
    RendezvousError,
)
from ferrodist.launch.doctor import engines, host, network
from ferrodist.launch.doctor.peer import Listener, ListenResult, Measured, call
from ferrodist.launch.doctor.report import (
    Check,
    CheckContext,
    Diagnostic,
    Level,
    fail,
    named,
    note,
    ok,
    run_checks,
    show_diagnostics,
    to_json,
    warn,
    worst,
)
from ferrodist.launch.machine import readable_nbytes, usable_cores
from ferrodist.rendezvous.interfaces import choose_address, is_loopback, list_interfaces
from ferrodist.rendezvous.job import Endpoint, number, try_endpoint

_BETWEEN = "between hosts"
_SLOW = 30e6  # bytes per second: less than half of what a network of 1 Gbit/s carries
_FAR = 2e-3  # seconds of a round trip: more than any network of one building
_APART = 0.5  # seconds between two clocks
DEFAULT_PORT = 29500  # what most launchers make MASTER_PORT
CHECKS: Mapping[str, Check] = {
    "environment": engines.check_environment,
    "interfaces": network.check_interfaces,
    "names": network.check_names,
    "ports": network.check_ports,
    "cores": host.check_cores,
    "memory": host.check_memory,
    "files and processes": host.check_limits,
    "kernel": host.check_kernel,
    "clock": host.check_clock,
    "engines": engines.check_engines,
}
_ADVICE = {
    errno.ETIMEDOUT: "a firewall drops it, there or on the way: open the port; or the host is down",
    errno.ECONNREFUSED: "no doctor listens there (any more): start it with --listen PORT",
    None: "check name, address and port; 'ip route' shows which ways this host knows",
}

Callback = Callable[[click.Context, click.Parameter, str | None], Endpoint | None]


def parse_endpoint(text: str) -> Endpoint:
    found = try_endpoint(text)
    if found is None:
        raise InvalidArgument(
            f"{text!r} is no endpoint: expected HOST:PORT, or [ADDRESS]:PORT for IPv6", got=text
        )
    return found


def parse_peer(text: str) -> Endpoint:
    is_bare_address = text.count(":") > 1 and not text.startswith("[")
    host = f"[{text}]" if is_bare_address else text
    has_port = ":" in host.rpartition("]")[2]
    return parse_endpoint(host if has_port else f"{host}:{DEFAULT_PORT}")


def parse_listen(text: str) -> Endpoint:
    """Read a port, or a host and a port; port 0 is any."""
    host, _, port = text.rpartition(":")
    found = try_endpoint(f"{host or 'localhost'}:1")
    if found is None or not 0 <= number(port) <= 65535 or text.startswith(":"):
        raise InvalidArgument(f"{text!r} is neither PORT nor HOST:PORT", got=text)
    return Endpoint(found.host if host else "", number(port))


def endpoint_of(environ: Mapping[str, str]) -> Endpoint | None:
    """Return where variables say that rank 0 listens; None if they do not, or not rightly.

    What is wrong with them is said by the check of the environment.
    """
    given = environ.get(variable("endpoint"), "")
    if given:
        return try_endpoint(given)
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    is_bare_address = ":" in host and not host.startswith("[")
    return try_endpoint(f"[{host}]:{port}" if is_bare_address else f"{host}:{port}")


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
    help="Number of ranks that will run here.  [default: one per core]",
)  # fmt: skip
@click.option(
    "--endpoint", metavar="HOST:PORT", callback=_parsed(parse_endpoint),
    help="Where rank 0 of the job listens.  [default: MASTER_ADDR:MASTER_PORT, if set]",
)  # fmt: skip
@click.option(
    "--listen", metavar="[[HOST:]PORT]", is_flag=False, flag_value=str(DEFAULT_PORT),
    callback=_parsed(parse_listen),
    help="Wait for the doctor of another host, which needs the code shown. HOST is an address of "
    "this host. Default: the interface in FERRODIST_SOCKET_IFNAME; else, with "
    "FERRODIST_SECRET_FILE, the default route; else loopback. Port 0: any free port.  "
    f"[default port: {DEFAULT_PORT}]",
)  # fmt: skip
@click.option(
    "--peers", "num_peers", type=click.IntRange(min=1), metavar="N", default=1, show_default=True,
    help="Number of doctors to wait for with --listen.",
)  # fmt: skip
@click.option(
    "--peer", metavar="HOST[:PORT]", callback=_parsed(parse_peer),
    help=f"Check the connection to a host whose doctor listens.  [default port: {DEFAULT_PORT}]",
)  # fmt: skip
@click.option("--code", metavar="CODE", help="The code shown by the listening doctor; with --peer.")
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
    listen: Endpoint | None,
    num_peers: int,
    peer: Endpoint | None,
    code: str | None,
    patience: float,
    as_json: bool,
) -> None:
    """Check whether ranks can run on this machine.

    Checks network interfaces, names, ports, cores, memory, limits, clocks, environment variables
    and libraries, and says how to fix problems. Takes a few seconds and changes nothing. Exit code
    1 on errors; warnings do not count.

    To check the connection between two hosts, run "ferrodist doctor --listen HOST:29500" on one,
    with an address of that host, and the command that it prints on the other.
    """
    if listen is not None and peer is not None:
        raise click.UsageError("--listen is for one host, --peer for the other: use one of them")
    if (peer is None) != (code is None):
        raise click.UsageError(
            "--peer and --code belong together: the doctor that listens has both"
        )
    context = CheckContext(
        ranks or usable_cores(), endpoint or endpoint_of(environment()), peer, environment()
    )
    if listen is not None:
        diagnostics, peers = _check_and_listen(context, listen, num_peers, patience)
    else:
        diagnostics, peers = _check_and_call(context, code or "")
    if as_json:
        click.echo(to_json(diagnostics, [asdict(one) for one in peers]))
    else:
        show_diagnostics(Console(highlight=False), diagnostics)
    ctx.exit(1 if worst(diagnostics) is Level.ERROR else 0)


def _check_and_call(context: CheckContext, code: str) -> tuple[list[Diagnostic], list[Measured]]:
    """Look at this machine first, so that nothing disturbs what is measured afterwards."""
    diagnostics = run_checks(context, CHECKS)
    if context.peer is None:
        return diagnostics, []
    between, measured = _call(context, context.peer, code)
    return [*diagnostics, *named(_BETWEEN, between)], [] if measured is None else [measured]


def _call(
    context: CheckContext, peer: Endpoint, code: str
) -> tuple[list[Diagnostic], Measured | None]:
    try:
        measured = call(peer, code, context.config)
    except (RendezvousError, AuthenticationError, ProtocolError, InvalidArgument) as error:
        return [_not_met(peer, error)], None
    return list(peer_diagnostics(measured)), measured


def _check_and_listen(
    context: CheckContext, where: Endpoint, num_peers: int, patience: float
) -> tuple[list[Diagnostic], list[Measured]]:
    """Look at this machine first; who comes meanwhile has to wait."""
    with ExitStack() as stack:
        try:
            host = where.host or _own_address(context.config)
            listener = stack.enter_context(Listener(host, where.port, context.config))
        except OSError as error:
            why = error.strerror or str(error)
            raise click.ClickException(f"cannot listen at port {where.port}: {why}") from error
        click.echo(_invitation(listener, patience), err=True)
        diagnostics = run_checks(context, CHECKS)
        result = listener.wait(patience, num_peers)
    between = listener_diagnostics(result, listener.endpoint.port, patience)
    return [*diagnostics, *named(_BETWEEN, between)], result.peers


def _own_address(config: Config) -> str:
    if config.socket_ifname or config.secret_file:
        return choose_address(config.socket_ifname)[1]
    return "127.0.0.1"


def _invitation(listener: Listener, patience: float) -> str:
    here = listener.endpoint
    where, others = "the other host", ""
    if is_loopback(here.host):
        where = "this host"
        seen = [one.address for one in list_interfaces() if not one.is_loopback]
        hosts = [one for one in seen if "%" not in one] or ["HOST"]
        known = " or ".join(str(Endpoint(host, here.port)) for host in hosts)
        others = f" and for this host alone (others need --listen {known})"
    return (
        f"listening at {here} for {patience:g} s{others}; on {where}:\n\n"
        f"    ferrodist doctor --peer {here} --code {listener.code}\n"
    )


def _not_met(peer: Endpoint, error: DistributedError) -> Diagnostic:
    if isinstance(error, InvalidArgument):
        return fail(f"the settings of {peer} differ: {error}", "set it on both hosts")
    if isinstance(error, AuthenticationError):
        return fail(
            f"{peer} has refused: {error}", "copy the whole command that the other doctor shows"
        )
    if hasattr(error, "address"):
        return fail(
            f"{peer} can be reached, but not its ranks: {error}",
            f"a firewall there closes the way in: set {variable('ports')}=29600-29699 there, and "
            "open these ports",
        )
    return fail(
        f"{peer} cannot be reached: {error}",
        _ADVICE.get(getattr(error, "errno", None), _ADVICE[None]),
    )


# -- what two doctors say of the way between them -------------------------------------------------


def peer_diagnostics(measured: Measured) -> Iterator[Diagnostic]:
    other = measured.other
    if measured.calls_back == "":
        yield ok(f"both ways are open: to {other}, and from there to {measured.own}")
    elif measured.calls_back is not None:
        yield _blocked(
            f"{other} can be reached from here, but cannot connect back to "
            f"{Endpoint(measured.own or '', measured.back_port or 0)}: {measured.calls_back}",
            "here",
        )
    if measured.seen_as and measured.own and measured.seen_as != measured.own:
        yield warn(
            f"this host is {measured.own} here and {measured.seen_as} there: addresses are "
            "translated on the way",
            "other ranks cannot connect to the address that this one knows: set "
            f"{variable('advertise')} to what they can reach",
        )
    yield from _numbers(measured)


def listener_diagnostics(result: ListenResult, port: int, waited: float) -> Iterator[Diagnostic]:
    if result.refusals:
        yield note(
            f"callers were sent away: {'; '.join(result.refusals)}",
            "a mistyped --code, or a stranger: the port is open to others, too",
        )
    for failure in result.failures:
        yield warn(
            f"a peer came and did not get through: {failure}", "look at what that doctor says"
        )
    if not result.peers:
        yield fail(
            f"nobody has come to port {port} within {waited:g} s",
            "start the other doctor meanwhile; if it says 'no answer' or 'no route', a firewall "
            f"or a wrong address keeps it from this host: open port {port} here",
        )
    for measured in result.peers:
        other = measured.other
        if measured.calls_back == "":
            yield ok(f"both ways are open: {other} to here, and from here to {other}")
        elif measured.calls_back is not None:
            yield _blocked(
                f"{other} reaches this host, but cannot be connected to at "
                f"{Endpoint(other, measured.back_port or 0)}: {measured.calls_back}",
                f"on {other}",
            )
        yield from _numbers(measured)


def _blocked(what: str, where: str) -> Diagnostic:
    return fail(
        what,
        f"a firewall {where} closes the way in: give ranks a range of ports with "
        f"{variable('ports')}=29600-29699 and open it {where}",
    )


def _numbers(measured: Measured) -> Iterator[Diagnostic]:
    if measured.other_version is not None and measured.other_version != ferrodist.__version__:
        yield fail(
            f"ferrodist {measured.other_version} is there, {ferrodist.__version__} is here",
            "all ranks of a job need the same version: install it on both",
        )
    if (seconds := measured.round_trip) is not None:
        what = f"a round trip takes {seconds * 1e3:.3f} ms"
        far = "far for ranks that meet in every step: fewer, larger calls help"
        yield note(what, far) if seconds > _FAR else ok(what)
    to, back = measured.bytes_per_second_to, measured.bytes_per_second_from
    if to is not None and back is not None:
        what = f"{readable_nbytes(to)} per second to there, {readable_nbytes(back)} from there"
        slow = "slow: is this the interface that you mean?"
        slow += f" {variable('socket_ifname')} chooses another"
        yield note(what, slow) if min(to, back) < _SLOW else ok(what)
    if measured.ahead is not None:
        yield _clock(measured.ahead)
    if measured.problem is not None:
        yield _problem(measured)


def _clock(ahead: float) -> Diagnostic:
    if abs(ahead) <= _APART:
        return ok(f"the clocks of both hosts are {abs(ahead) * 1e3:.1f} ms apart")
    return note(
        f"the clock there is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}",
        "ferrodist does not mind, but logs of both hosts are hard to compare: use NTP",
    )


def _problem(measured: Measured) -> Diagnostic:
    has_data = None not in (measured.bytes_per_second_from, measured.bytes_per_second_to)
    if measured.round_trip is not None and not has_data:
        return fail(
            f"small messages pass, large ones do not: {measured.problem}",
            "typical of a wrong MTU on the way (tunnels, overlays, jumbo frames): compare 'ip "
            "link' on both hosts, and lower the larger",
        )
    return fail(
        f"the talk with {measured.other} broke off: {measured.problem}",
        "try again; if it stays, something between the hosts ends connections",
    )
