# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings, and the only reader of the environment: field ``x`` is the variable ``FERRODIST_X``."""

from __future__ import annotations

import enum
import numbers
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, NamedTuple

from ferrodist.errors import InvalidArgument

DEFAULT_COLLECTIVE_TIMEOUT = 60.0
AUTO = "auto"  # a backend's name: whatever suits the hosts that ranks are on


class Default(enum.Enum):
    """The type of DEFAULT, which stands for the backend's own timeout."""

    DEFAULT = "backend.timeout"

    def __repr__(self) -> str:
        return "DEFAULT"


class DefaultTimeout(float):
    """The timeout of a program that has set none: not exact, late ranks that live are waited for.

    A timeout that the program has set is exact, even if it has the same value.
    """


DEFAULT = Default.DEFAULT
Timeout = float | timedelta | None | Default


_FLAGS = dict.fromkeys(("1", "true", "yes"), True) | dict.fromkeys(("0", "false", "no", ""), False)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _ports(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


class _Form(NamedTuple):
    """How a setting is written, what values it takes, and both in words."""

    words: str
    parse: Callable[[str], Any]
    takes: Callable[[Any], bool]


_SECONDS = _Form("seconds > 0", float, _is_positive)
_LIMIT = _Form(
    "seconds > 0, or none",
    lambda text: None if text.lower() == "none" else float(text),
    lambda value: value is None or _is_positive(value),
)
_SIZE = _Form(
    "bytes >= 4096, a multiple of 16",
    int,
    lambda value: isinstance(value, int) and value >= 4096 and value % 16 == 0,
)
_SWITCH = _Form("0 or 1", lambda text: _FLAGS[text.lower()], lambda value: isinstance(value, bool))
_NAME = _Form("the name of a backend", str, lambda value: isinstance(value, str) and value != "")
_LINK = _Form(
    "four numbers > 0, separated by commas",
    lambda text: tuple(float(word) for word in text.split(",")),
    lambda value: isinstance(value, tuple) and len(value) == 4 and all(map(_is_positive, value)),
)
_TEXT = _Form("text", str, lambda value: isinstance(value, str))
_EXECUTOR = _Form("native or python", str, lambda value: value in ("native", "python"))
_PORTS = _Form(
    "a port, or a range such as 29600-29699; 0 is any free port",
    _ports,
    lambda pair: isinstance(pair, tuple) and len(pair) == 2 and 0 <= pair[0] <= pair[1] <= 65535,
)


def _setting(default: Any, form: _Form, what: str, *, shared: bool = False) -> Any:
    """Declare a setting; one that is shared has to be the same on all ranks of a job."""
    return field(default=default, metadata={"form": form, "what": what, "shared": shared})


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a backend. ``Config.from_environment()`` reads them from FERRODIST_<FIELD>.

    Raises InvalidArgument for a value that a setting does not accept. The table of settings in the
    documentation is generated from this class.
    """

    timeout: float | None = _setting(
        DefaultTimeout(DEFAULT_COLLECTIVE_TIMEOUT),
        _LIMIT,
        "timeout of a call if none is passed; exact if you set it, even to 60",
    )
    late_timeout: float = _setting(
        1800.0,
        _SECONDS,
        "if no timeout is set, how long a call waits at most for ranks that are alive and not "
        "stuck in another call; less than the 60 s of the default timeout has no effect",
        shared=True,
    )
    reproducible: bool = _setting(
        False, _SWITCH, "reduce in rank order on every backend, whatever the algorithm"
    )
    check_sites: bool = _setting(
        False,
        _SWITCH,
        "also compare the file and line of each call between ranks, to detect calls of the same "
        "shape in different orders; slow",
        shared=True,
    )
    check: bool = _setting(
        True,
        _SWITCH,
        "on engines (MPI, Gloo, NCCL), compare the calls of all ranks before each collective; "
        "without it, a call there has no deadline, and mismatched calls hang or crash",
        shared=True,
    )
    log_wait_after: float = _setting(
        5.0, _SECONDS, "log a wait that takes longer than this, with the ranks it waits for"
    )
    message_nbytes: int = _setting(
        1 << 20, _SIZE, "largest message a collective sends; the unit of pipelining", shared=True
    )
    chunk_nbytes: int = _setting(
        1 << 22,
        _SIZE,
        "largest part of an array that is reduced at once; bounds scratch memory",
        shared=True,
    )
    fuse_nbytes: int = _setting(
        1 << 16,
        _SIZE,
        "leaves of a tree up to this size are fused into one message per dtype",
        shared=True,
    )
    unexpected_nbytes: int = _setting(
        16 << 20,
        _SIZE,
        "how many bytes of unreceived messages a rank may have sent to another; beyond that, "
        "small sends wait for the receiver, as large ones do",
        shared=True,
    )
    threads_link: tuple[float, float, float, float] = _setting(
        (2e-5, 2e-10, 1e-10, 2e-5),
        _LINK,
        "cost of a link between threads: latency (s), s per byte, per reduced byte, per message",
    )
    tcp_link: tuple[float, float, float, float] = _setting(
        (2.5e-5, 5e-10, 1e-10, 5e-6), _LINK, "the same for a TCP connection", shared=True
    )
    backend: str = _setting(
        AUTO,
        _NAME,
        "the backend that init() makes without a name; auto is shared_memory on one host and "
        "hybrid on several",
    )
    join_timeout: float = _setting(
        DefaultTimeout(60.0),
        _SECONDS,
        "how long the ranks of a job wait for each other at startup; exact if you set it, "
        "otherwise ranks of ferrodist run on one host wait as long as for a late call",
    )
    heartbeat: float = _setting(
        1.0, _SECONDS, "interval between heartbeats of a process", shared=True
    )
    heartbeat_timeout: float = _setting(
        10.0,
        _SECONDS,
        "a process without a heartbeat for this long is lost; must exceed the heartbeat interval",
        shared=True,
    )

    secret_file: str = _setting(
        "",
        _TEXT,
        "file with the secret of a job on several hosts; the same content on all hosts",
    )
    munge_socket: str = _setting(
        "",
        _TEXT,
        "the socket of MUNGE, which authenticates ranks on several hosts if there is no secret "
        "file; empty: the usual path",
    )
    socket_ifname: str = _setting(
        "",
        _TEXT,
        "network interfaces to use, in NCCL's notation: eth0,ib (prefixes), =eth0 (exact), "
        "^docker,lo (all except these); empty: the one that routes to rank 0",
    )
    ports: tuple[int, int] = _setting(
        (0, 0), _PORTS, "ports at which a rank listens while the ranks connect"
    )
    advertise: str = _setting(
        "",
        _TEXT,
        "address:port that other ranks connect to, if it differs from where this rank listens",
    )
    host_id: str = _setting(
        "",
        _TEXT,
        "name of this host; ranks with the same name share memory; empty: detected",
    )
    tls: bool = _setting(False, _SWITCH, "encrypt TCP connections between processes")
    executor: str = _setting(
        "native",
        _EXECUTOR,
        "what executes schedules over TCP: native code, or Python as a reference",
    )
    full_traceback: bool = _setting(False, _SWITCH, "show ferrodist's inner frames in tracebacks")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, form = getattr(self, setting.name), setting.metadata["form"]
            if not form.takes(value):
                raise InvalidArgument(f"{setting.name}={value!r}: expected {form.words}", got=value)
        if self.heartbeat_timeout <= self.heartbeat:
            raise InvalidArgument(
                f"{variable('heartbeat_timeout')}={self.heartbeat_timeout:g} is not above "
                f"{variable('heartbeat')}={self.heartbeat:g}: a healthy rank would count as lost "
                "between two heartbeats; make the first some ten times the second",
                got=self.heartbeat_timeout,
            )

    def shared(self) -> dict[str, Any]:
        """Return the settings that have to be the same on all ranks of a job."""
        shared = (setting.name for setting in fields(self) if setting.metadata["shared"])
        return {name: getattr(self, name) for name in shared}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the settings from ``FERRODIST_<FIELD>`` variables; defaults for those not set."""
        environ = environment() if environ is None else environ
        names = (setting.name for setting in fields(cls) if variable(setting.name) in environ)
        return cls(**{name: read_setting(name, environ) for name in names})


def environment() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def settings_table() -> str:
    """Make the table of all settings that stands in the documentation."""
    rows = ["| variable | field | default | takes | what it does |", "|---|---|---|---|---|"]
    for setting in fields(Config):
        form, what = setting.metadata["form"].words, setting.metadata["what"]
        what += "; must be the same on all ranks" if setting.metadata["shared"] else ""
        name = f"`{variable(setting.name)}` | `{setting.name}`"
        default = "empty" if setting.default == "" else f"`{setting.default}`"
        rows.append(f"| {name} | {default} | {form} | {what} |")
    return "\n".join(rows)


def variable(setting: str) -> str:
    """Name the environment variable of a setting."""
    return f"FERRODIST_{setting.upper()}"


def unread_variables(environ: Mapping[str, str], others: Collection[str]) -> dict[str, str]:
    """Find FERRODIST_ variables that are not settings, each with the setting that may be meant.

    ``others`` are those that are read and are no settings.
    """
    names = {variable(setting.name): setting.name for setting in fields(Config)}
    prefix, known = variable(""), names.keys() | others
    unread = sorted(name for name in environ if name.startswith(prefix) and name not in known)
    return {name: _nearest(name.removeprefix(prefix).lower(), names.values()) for name in unread}


def _nearest(word: str, settings: Iterable[str]) -> str:
    from difflib import get_close_matches  # only after a typing mistake

    return " or ".join(map(variable, get_close_matches(word, settings, n=2)))


def read_setting(setting: str, environ: Mapping[str, str]) -> Any:
    """Read the variable of one setting, which is there; raises InvalidArgument if it is wrong."""
    name = variable(setting)
    text = environ[name]
    form: _Form = Config.__dataclass_fields__[setting].metadata["form"]
    try:
        value = form.parse(text.strip())
    except (ValueError, KeyError) as error:
        raise InvalidArgument(f"{name}={text!r}: expected {form.words}", got=text) from error
    if not form.takes(value):
        raise InvalidArgument(f"{name}={text!r}: expected {form.words}", got=text)
    return value


def check_timeout(timeout: Any) -> float | None:
    """Return a timeout in seconds, None for no limit; raise InvalidArgument if it is not > 0."""
    if timeout is None:
        return None
    if isinstance(timeout, DefaultTimeout):
        return timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise InvalidArgument(
            f"timeout must be seconds above zero, a timedelta or None, got {timeout!r}", got=timeout
        )
    try:
        return None if seconds == float("inf") else float(seconds)
    except OverflowError as error:  # an int, too long to be shown
        text = "timeout is more seconds than a float can hold; None waits for ever"
        raise InvalidArgument(text) from error
