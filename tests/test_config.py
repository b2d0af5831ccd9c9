"""Settings come from the environment, every one of them, and are checked."""

from pathlib import Path

import pytest

import ferrodist
from ferrodist import Config, InvalidArgument, SimulatedBackend
from ferrodist.config import settings_table, variable

GOOD = {
    "backend": ("shm", "shm"),
    "timeout": ("2.5", 2.5),
    "late_timeout": ("7", 7.0),
    "reproducible": ("1", True),
    "check_sites": ("1", True),
    "check": ("1", True),
    "log_wait_after": ("0.5", 0.5),
    "message_nbytes": ("8192", 8192),
    "chunk_nbytes": ("65536", 65536),
    "unexpected_nbytes": ("1048576", 1 << 20),
    "fuse_nbytes": ("4096", 4096),
    "threads_link": ("1e-6, 1e-9, 1e-10, 1e-6", (1e-6, 1e-9, 1e-10, 1e-6)),
    "join_timeout": ("5", 5.0),
    "heartbeat": ("0.2", 0.2),
    "heartbeat_timeout": ("3", 3.0),
    "tcp_link": ("1e-5, 1e-9, 1e-10, 1e-6", (1e-5, 1e-9, 1e-10, 1e-6)),
    "secret_file": ("/run/secret", "/run/secret"),
    "munge_socket": ("/run/munge/socket", "/run/munge/socket"),
    "socket_ifname": ("^lo,docker", "^lo,docker"),
    "ports": ("29600-29699", (29600, 29699)),
    "advertise": ("10.0.0.2:29600", "10.0.0.2:29600"),
    "host_id": ("left", "left"),
    "tls": ("1", True),
    "executor": ("python", "python"),
    "full_traceback": ("1", True),
}


def test_every_setting_is_covered_here():
    assert GOOD.keys() == set(Config.__dataclass_fields__)


@pytest.mark.parametrize("name", GOOD)
def test_a_setting_is_read_from_its_variable(name):
    text, value = GOOD[name]
    assert variable(name) == f"FERRODIST_{name.upper()}"
    assert getattr(Config.from_environment({variable(name): text}), name) == value
    assert Config.from_environment({}) == Config()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("timeout", "soon"),
        ("timeout", "0"),
        ("timeout", "-1"),
        ("timeout", "nan"),
        ("reproducible", "maybe"),
        ("message_nbytes", "1e6"),
        ("message_nbytes", "1"),
        ("message_nbytes", "5000"),
        ("threads_link", "1,2,3"),
        ("threads_link", "1,2,3,-4"),
        ("ports", "70000"),
        ("ports", "29699-29600"),
        ("ports", "free"),
        ("executor", "rust"),
    ],
)
def test_a_bad_value_names_the_variable_and_what_it_takes(name, text):
    with pytest.raises(InvalidArgument, match=f"{variable(name)}='{text}': expected ") as caught:
        Config.from_environment({variable(name): text})
    assert Config.__dataclass_fields__[name].metadata["form"].words in str(caught.value)


def test_none_waits_for_ever():
    assert Config.from_environment({"FERRODIST_TIMEOUT": "none"}).timeout is None


def test_a_group_takes_its_settings_when_it_is_made(monkeypatch):
    monkeypatch.setenv("FERRODIST_TIMEOUT", "7")
    monkeypatch.setenv("FERRODIST_REPRODUCIBLE", "1")
    (backend,) = SimulatedBackend.create_group(1)
    assert backend.timeout == 7.0
    assert backend.reproducible
    with pytest.raises(ferrodist.UnsupportedOp):
        ferrodist.allreduce(1.0, backend, algorithm="ring")


def test_a_group_split_off_inherits_timeout_and_reproducible():
    (backend,) = SimulatedBackend.create_group(1)
    backend.timeout, backend.reproducible = 3, True
    group = backend.split([0])
    assert (group.timeout, group.reproducible) == (3.0, True)


@pytest.mark.parametrize(
    "settings",
    [{"timeout": -1}, {"message_nbytes": 0}, {"reproducible": "yes"}, {"log_wait_after": None}],
)
def test_settings_from_a_program_are_checked_too(settings):
    with pytest.raises(InvalidArgument, match="expected"):
        Config(**settings)


@pytest.mark.parametrize("timeout", [0.5, 1.0])
def test_a_heartbeat_timeout_that_is_not_above_the_heartbeat_is_refused(timeout):
    words = f"FERRODIST_HEARTBEAT_TIMEOUT={timeout:g} is not above FERRODIST_HEARTBEAT=1: a healthy"
    with pytest.raises(InvalidArgument, match=words):
        Config(heartbeat_timeout=timeout)
    with pytest.raises(InvalidArgument, match=words):
        Config.from_environment({"FERRODIST_HEARTBEAT_TIMEOUT": str(timeout)})
    assert Config(heartbeat=0.2, heartbeat_timeout=timeout).heartbeat_timeout == timeout


def test_the_table_in_the_documentation_is_up_to_date():
    page = Path(__file__).parent.parent / "docs" / "settings.md"
    assert settings_table() in page.read_text(), "write settings_table() into docs/settings.md"
