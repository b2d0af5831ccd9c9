# SPDX-License-Identifier: MIT OR Apache-2.0
"""The environment: what launchers have said, and which settings are set, misspelt or wrong.

Nothing is taken from a launcher: the pipe with a job's secret stays full for the rank it is for.
"""

from __future__ import annotations

import difflib
import logging
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from ferrodist.backends.registry import backend_names
from ferrodist.config import Config, variable
from ferrodist.errors import AuthenticationError, DistributedError
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.job_secret import no_secret, secret_from_file
from ferrodist.rendezvous.launch import Launch, brief
from ferrodist.rendezvous.sources.find import find_job
from ferrodist.rendezvous.sources.nesting import OUTER_JOBS

about = Subject("environment")

_PREFIX = variable("")
_SETTINGS = {variable(one.name): one.name for one in fields(Config)}
_NO_SETTINGS = {variable(one.name) for one in fields(Launch)} | {OUTER_JOBS, variable("ssh")}
_SECRET_FILE = variable("secret_file")
_FORMER_IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check(situation: Situation) -> Iterator[Finding]:
    """Look at launchers' variables, then at ferrodist's own."""
    environ = dict(situation.environ)
    yield from _launchers(environ)
    yield from _misspelt(environ)
    good = {}
    for name in sorted(environ.keys() & _SETTINGS.keys()):
        try:
            good[name] = getattr(Config.from_environment({name: environ[name]}), _SETTINGS[name])
        except DistributedError as error:
            yield _wrong(str(error))
    yield from _changed(environ, good)
    yield from _odd(good)
    yield from _other_names(environ)


def _wrong(text: str) -> Finding:
    """Make a finding of an error whose first half says what, and the second what to do."""
    what, _, advice = text.partition("; ")
    return about.error(what, advice or "correct it, or unset it")


def _launchers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Say what init() would find here."""
    try:
        launch = Launch.from_environment(environ)
        if launch is not None:
            yield about.ok(
                f"'ferrodist run' has set its variables: rank {launch.rank} of "
                f"{launch.world_size} in job {brief(launch.job)!r}"
            )
            return
        with _heard() as records:
            job = find_job(_without_pipe(environ))
    except AuthenticationError as error:
        if not environ.get(_SECRET_FILE):  # if there is one, it is looked at by itself
            yield _wrong(str(error))
        return
    except DistributedError as error:
        yield _wrong(str(error))
        return
    for record in records:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            yield about.warning(text, "each process would compute alone: is that meant?")
        else:
            yield about.ok(text)
    if _lacks_secret(job) and not environ.get(_SECRET_FILE):
        yield _wrong(str(no_secret(job.name, job.source.name, job.hosts, job.rank)))


def _lacks_secret(job: Job) -> bool:
    is_here = job.endpoint is not None and is_loopback(job.endpoint.host)
    return job.several_hosts and not job.has_secret and not is_here


class _Collector(logging.Handler):
    """Puts what is logged into a list."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self._records.append(record)


def _without_pipe(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Leave out a secret that could be read only once."""
    is_pipe = _is_pipe(environ.get(_SECRET_FILE, ""))
    return {name: value for name, value in environ.items() if not is_pipe or name != _SECRET_FILE}


@contextmanager
def _heard() -> Iterator[list[logging.LogRecord]]:
    """Collect what the library logs, instead of showing it."""
    logger = logging.getLogger("ferrodist")
    records: list[logging.LogRecord] = []
    handler = _Collector(records)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _misspelt(environ: Mapping[str, str]) -> Iterator[Finding]:
    known = _SETTINGS.keys() | _NO_SETTINGS
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            near = map(variable, difflib.get_close_matches(_word(name), _SETTINGS.values(), n=2))
            words = " or ".join(near)
            yield about.warning(
                f"{name} is no setting of this version, and nobody reads it",
                f"did you mean {words}?" if words else f"unset {name}",
            )


def _word(name: str) -> str:
    """Return the name of the setting that a variable would have."""
    return name.removeprefix(_PREFIX).lower()


def _changed(environ: Mapping[str, str], values: Mapping[str, object]) -> Iterator[Finding]:
    """List the settings that are not the default."""
    usual = Config()
    changed = [n for n, value in values.items() if value != getattr(usual, _SETTINGS[n])]
    if changed:
        yield about.ok("set: " + ", ".join(f"{name}={brief(environ[name])}" for name in changed))
    else:
        yield about.ok("all settings have their defaults")


def _odd(values: Mapping[str, object]) -> Iterator[Finding]:
    """Find settings that are right by themselves and make no sense here."""
    config = Config(**{_SETTINGS[name]: value for name, value in values.items()})  # type: ignore[arg-type] # checked one by one
    if config.silence <= config.heartbeat:
        yield about.error(
            f"{variable('silence')}={config.silence:g} is not above {variable('heartbeat')}="
            f"{config.heartbeat:g}: every rank would count as lost between two signs of life",
            f"make {variable('silence')} some ten times {variable('heartbeat')}",
        )
    names = backend_names()
    if config.backend not in ("auto", *names):
        yield about.error(
            f"{variable('backend')}={brief(config.backend)}: no such backend",
            f"known: auto, {', '.join(names)}",
        )
    if config.secret_file:
        yield from _secret(config.secret_file)


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(Path(path).expanduser().stat().st_mode)
    except (OSError, ValueError):
        return False


def _secret(path: str) -> Iterator[Finding]:
    """Judge the file with the job's secret as a rank would."""
    if _is_pipe(path):  # what is read from it would be missing for the rank
        yield about.note(f"{_SECRET_FILE}={brief(path)} is a pipe, and was not read")
        return
    try:
        secret_from_file(path)
    except DistributedError as error:
        yield _wrong(str(error))


def _other_names(environ: Mapping[str, str]) -> Iterator[Finding]:
    own = variable("socket_ifname")
    found = [name for name in _FORMER_IFNAMES if environ.get(name)]
    if found and own not in environ:
        shown = ", ".join(f"{name}={brief(environ[name])}" for name in found)
        yield about.note(
            f"{shown} is for other libraries; ferrodist does not follow it",
            f"set {own} too if its ranks are to use the same interface",
        )
