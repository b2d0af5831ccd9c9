"""Ranks of several hosts prove by MUNGE whose processes they are, and get the secret that way."""

from __future__ import annotations

import contextlib
import gc
import hmac
import logging
import os
import pickle
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferrodist import AuthenticationError
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job, find_job, handshake
from ferrodist.rendezvous.interfaces import list_interfaces
from ferrodist.rendezvous.job import known_secret
from ferrodist.rendezvous.mesh import join_mesh, open_exchange
from ferrodist.rendezvous.munge import Munge, try_munge
from ferrodist.rendezvous.wire import Channel, MessageKind, run_steps
from test_rendezvous_tcp import Rank, connected, new_jobs

pytestmark = pytest.mark.timeout(60)

MUNGED = shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin")
NOBODY = 65534
# Not loopback: there ranks without a secret meet at a Unix socket, and need no MUNGE.
ADDRESSES = [one.address for one in list_interfaces() if not one.address.startswith("127.")]
HERE = next((one for one in ADDRESSES if ":" not in one), "")
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}

needs_library = pytest.mark.skipif(
    find_library("munge") is None, reason="libmunge is not installed: apt-get install libmunge2"
)
needs_network = pytest.mark.skipif(not HERE, reason="this host has loopback alone")


class PretendedMunge(Munge):
    """MUNGE without its daemon: signs with a key, and tells who it was told to be."""

    def __init__(self, key: bytes = b"of the cluster", uid: int | None = None) -> None:
        super().__init__("nowhere")
        self.key, self.uid = key, os.geteuid() if uid is None else uid
        self.made: list[bytes] = []

    def encode(self, payload: bytes) -> bytes:
        data = pickle.dumps((payload, self.uid))
        self.made.append(hmac.digest(self.key, data, "sha256") + data)
        return self.made[-1]

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        tag, data = credential[:32], credential[32:]
        if not hmac.compare_digest(tag, hmac.digest(self.key, data, "sha256")):
            raise AuthenticationError("MUNGE refused a credential")
        payload, uid = pickle.loads(data)
        return payload, uid


def munge_jobs(world_size: int, munge: Munge | None = None) -> list[Job]:
    jobs = new_jobs(world_size, HERE)
    return [
        replace(job, secret=known_secret(job.name), has_secret=False, munge=munge or fake())
        for job in jobs
    ]


def fake(**facts: Any) -> PretendedMunge:
    return PretendedMunge(**facts)


# -- the handshake, without a daemon ---------------------------------------------------------------


@needs_network
def test_ranks_without_a_secret_get_one_that_rank_0_has_made():
    jobs, secrets = munge_jobs(3), {}

    def join(job: Job) -> None:
        with open_exchange(job, Config(), Deadline(20)) as exchange:
            exchange.gather(b"")
            secrets[job.rank] = exchange.secret

    threads = [threading.Thread(target=join, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(secrets) == 3
    assert len(set(secrets.values())) == 1
    assert secrets[0] != known_secret(jobs[0].name)


@needs_network
def test_a_mesh_is_made_with_the_secret_that_ranks_got_by_munge():
    jobs, keys = munge_jobs(3), {}

    def join(job: Job) -> None:
        for peer in join_mesh(job, Config(join_timeout=20)):
            if peer.rank != job.rank:
                keys[job.rank, peer.rank] = peer.key
                os.close(peer.socket)
                if peer.watch >= 0:
                    os.close(peer.watch)

    threads = [threading.Thread(target=join, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(keys) == 6
    assert all(keys[there, here] == key for (here, there), key in keys.items())


@needs_network
@pytest.mark.parametrize("wrong", [{"uid": os.geteuid() + 1}, {"key": b"of another cluster"}])
def test_a_process_of_another_user_or_cluster_is_not_let_in(wrong, caplog):
    jobs = munge_jobs(2)
    first = Rank(jobs[0])
    with caplog.at_level(logging.WARNING, "ferrodist"):
        stranger = Rank(replace(jobs[1], munge=fake(**wrong))).end()
        assert isinstance(stranger.error, AuthenticationError)
        assert "did not take the MUNGE credential of this process" in str(stranger.error)
        friend = Rank(jobs[1]).end()
    assert first.end().error is None
    assert friend.error is None
    reasons = ["is a process of user", "MUNGE refused a credential"]
    assert any(reason in caplog.text for reason in reasons)


@needs_network
def test_a_rank_0_of_another_user_learns_nothing_and_is_named():
    jobs = munge_jobs(2)
    munge = fake(uid=os.geteuid() + 1)
    munge.decode = lambda credential: (fake().decode(credential)[0], os.geteuid())  # type: ignore[method-assign]  # one that takes anybody
    impostor = Rank(replace(jobs[0], munge=munge), timeout=1.0)
    rank = Rank(jobs[1]).end()
    impostor.end()
    assert isinstance(rank.error, AuthenticationError)
    assert f"is a process of user {os.geteuid() + 1}, according to MUNGE" in str(rank.error)


def greet_by_hand(link: Channel, job: Job, credential: Callable[[bytes, bytes], bytes]) -> bool:
    """Greet as a client does, and send a credential; tell whether one comes back."""

    def steps() -> Any:
        mine = handshake._new_greeting(job).pack()
        link.send(MessageKind.MUNGE_GREETING, mine)
        theirs = (yield from link.receive(MessageKind.MUNGE_GREETING)).body
        link.send(MessageKind.CREDENTIAL, credential(mine, theirs))
        answer = yield from link.receive(MessageKind.CREDENTIAL, MessageKind.FAILURE)
        return answer.kind is MessageKind.CREDENTIAL

    return bool(run_steps(steps(), link, Deadline(10)))


@needs_network
def test_a_credential_is_good_for_its_own_connection_alone():
    jobs = munge_jobs(2)
    munge = jobs[0].munge
    assert isinstance(munge, PretendedMunge)
    first = Rank(jobs[0])
    with connected(jobs[1]) as link:
        bind = handshake.munge._bind
        own = [lambda mine, theirs: munge.encode(b"clie" + bind(jobs[1], mine, theirs))]
        assert greet_by_hand(link, jobs[1], own[0])
    seen_on_the_way = list(munge.made)
    assert len(seen_on_the_way) == 2  # the client's, and the server's with the secret
    for credential in (*seen_on_the_way, b"", b"MUNGE:rubbish:", bytes(2048)):
        with connected(jobs[1]) as link:
            assert not greet_by_hand(link, jobs[1], lambda *_, sent=credential: sent)
    other = replace(jobs[1], name="another job")
    with connected(jobs[1]) as link:

        def wrong(mine: bytes, theirs: bytes) -> bytes:
            return munge.encode(b"clie" + bind(other, mine, theirs))

        assert not greet_by_hand(link, jobs[1], wrong)
    rank = Rank(jobs[1]).end()
    assert first.end().error is None
    assert rank.error is None


@needs_network
def test_a_rank_does_not_take_the_secret_of_another_connection():
    jobs = munge_jobs(2)
    munge = jobs[1].munge
    assert isinstance(munge, PretendedMunge)
    left, right = map(Channel, socket.socketpair())

    def replay() -> Any:
        yield from right.receive(MessageKind.MUNGE_GREETING)
        right.send(MessageKind.MUNGE_GREETING, handshake._new_greeting(jobs[0]).pack())
        yield from right.receive(MessageKind.CREDENTIAL)
        right.send(MessageKind.CREDENTIAL, munge.encode(b"serv" + bytes(32) + bytes(32)))

    thread = threading.Thread(target=lambda: run_steps(replay(), right, Deadline(10)), daemon=True)
    thread.start()
    with pytest.raises(AuthenticationError, match="of another connection or job"):
        run_steps(handshake.greet_server(left, jobs[1]), left, Deadline(10))
    thread.join(10)
    left.close()
    right.close()


@needs_network
@pytest.mark.parametrize("with_file", [0, 1])
def test_a_secret_file_on_some_ranks_and_munge_on_others_is_said(with_file, caplog):
    jobs = munge_jobs(2)
    jobs[with_file] = replace(jobs[with_file], has_secret=True)
    first = Rank(jobs[0], timeout=1.0)
    second = Rank(jobs[1]).end()
    assert isinstance(second.error, AuthenticationError)
    expected = ("a secret file", "MUNGE") if with_file == 0 else ("MUNGE", "a secret file")
    text = str(second.error)
    assert f"rank 0 would prove itself by {expected[0]}, rank 1 of job" in text
    assert f"does by {expected[1]}: set FERRODIST_SECRET_FILE on all ranks or on none" in text
    assert "1 connections" in str(first.end().error)


class HangingMunge(PretendedMunge):
    """A daemon that answers nobody until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self._let_go = threading.Event(), threading.Event()

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        self.is_asked.set()
        assert self._let_go.wait(20)
        return super().decode(credential)

    def end(self) -> None:
        self._let_go.set()
        for thread in threading.enumerate():
            if thread.name == "munge":
                thread.join(10)


@needs_network
def test_while_the_munge_of_rank_0_hangs_others_are_served_and_all_end_in_time(monkeypatch, caplog):
    monkeypatch.setattr(handshake.munge, "_ANSWER_SECONDS", 1.0)
    jobs, hanging = munge_jobs(3), HangingMunge()
    ranks = [Rank(replace(jobs[0], munge=hanging), timeout=4.0), Rank(jobs[1])]
    assert hanging.is_asked.wait(10)
    with connected(jobs[0]) as link:  # served at once, while the daemon is asked
        link.send(MessageKind.MUNGE_GREETING, handshake._new_greeting(jobs[2]).pack())
        run_steps(link.receive(MessageKind.MUNGE_GREETING), link, Deadline(0.7))
        assert isinstance(ranks[1].end().error, AuthenticationError)
    assert ranks[1].seconds < 3.5
    assert "did not take the MUNGE credential" in str(ranks[1].error)
    assert ranks[0].end().error.missing == [1, 2]
    assert "connections that MUNGE did not show to be of this user" in str(ranks[0].error)
    assert "MUNGE, at nowhere, has not answered within 1 s: munged hangs" in caplog.text
    hanging.end()


@needs_network
def test_a_rank_whose_own_munge_hangs_says_so(monkeypatch):
    monkeypatch.setattr(handshake.munge, "_ANSWER_SECONDS", 0.3)
    jobs, hanging = munge_jobs(2), HangingMunge()
    ranks = [Rank(jobs[0], timeout=3.0), Rank(replace(jobs[1], munge=hanging))]
    assert "MUNGE, at nowhere, has not answered within 0.3 s" in str(ranks[1].end().error)
    assert ranks[0].end().error.missing == [1]
    hanging.end()


def test_handshakes_that_a_hanging_munge_leaves_behind_are_bounded(monkeypatch):
    monkeypatch.setattr(handshake.munge, "_slots", threading.BoundedSemaphore(3))
    hanging = HangingMunge()
    try:
        for _ in range(3):
            steps = handshake.munge._aside(hanging, lambda: hanging.decode(b""))
            next(steps)
            steps.close()  # the rank that asked is gone; the daemon does not know
        with pytest.raises(AuthenticationError, match="munged hangs"):
            next(handshake.munge._aside(hanging, bytes))
    finally:
        hanging.end()


def test_where_no_thread_can_be_started_only_the_handshake_fails(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    gc.collect()  # what earlier tests have left
    before = os.listdir("/proc/self/fd")
    for _ in range(200):  # more than may ask at once
        with pytest.raises(AuthenticationError, match="can't start new thread"):
            next(handshake.munge._aside(Munge("nowhere"), bytes))
    assert os.listdir("/proc/self/fd") == before


def test_ranks_on_loopback_need_no_munge():
    jobs = new_jobs(2)
    jobs = [replace(job, has_secret=False, munge=Munge("/nonexistent")) for job in jobs]
    assert not any(job.uses_munge for job in jobs)
    for rank in [Rank(job) for job in jobs]:
        assert rank.end().error is None


# -- MUNGE itself ----------------------------------------------------------------------------------


@contextlib.contextmanager
def running_munged() -> Iterator[Path]:
    """Run a munged with a key of its own; yield its socket, which all users can reach."""
    assert MUNGED is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {n: folder / n for n in ("socket", "pid-file", "seed-file", "log-file")}
        options = [f"--{option}={path}" for option, path in files.items()]
        command = [MUNGED, "--foreground", "--force", f"--key-file={key}", *options]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as daemon:
            try:
                end = time.monotonic() + 20
                while try_munge(str(files["socket"])) is None:
                    assert daemon.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.01)  # it tells nobody when it listens
                yield files["socket"]
            finally:
                daemon.terminate()


@pytest.fixture(scope="module")
def munge() -> Iterator[Munge]:
    if MUNGED is None:
        pytest.skip("munged is not installed: apt-get install munge")
    with running_munged() as path:
        found = try_munge(str(path))
        assert found is not None
        yield found


def as_user(uid: int, call: Callable[[], Any]) -> Any:
    """Call a function in a process of another user; return what it does, or its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(uid)
            os.setuid(uid)
            try:
                result = call()
            except AuthenticationError as error:
                result = error
            os.write(write, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        result = pickle.loads(stream.read())
    os.waitpid(child, 0)
    return result


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def test_a_credential_comes_back_with_the_user_who_made_it(munge):
    for payload in (b"", b"\0 bytes \0", bytes(100)):
        assert munge.decode(munge.encode(payload)) == (payload, os.geteuid())


def test_a_credential_can_be_read_once(munge):
    credential = munge.encode(b"once")
    munge.decode(credential)
    with pytest.raises(AuthenticationError, match=r"(?i)replayed"):
        munge.decode(credential)


@needs_root
def test_other_users_can_neither_read_a_credential_nor_be_taken_for_us(munge):
    credential = munge.encode(b"the secret of a job")
    assert b"secret" not in credential
    error = as_user(NOBODY, lambda: munge.decode(credential))
    assert isinstance(error, AuthenticationError)
    assert "it is for another user" in str(error)
    theirs = as_user(NOBODY, lambda: munge.encode(b"let me in"))
    with pytest.raises(AuthenticationError, match="it is for another user"):
        munge.decode(theirs)


def test_the_credential_of_another_cluster_is_refused(munge):
    with running_munged() as other:
        credential = Munge(str(other)).encode(b"from elsewhere")
    with pytest.raises(AuthenticationError, match="do all hosts have the same MUNGE key"):
        munge.decode(credential)


@needs_library
def test_a_munge_that_has_gone_is_named():
    with pytest.raises(AuthenticationError, match="MUNGE, at /nonexistent, did not make"):
        Munge("/nonexistent").encode(b"")


def test_a_library_that_is_missing_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(handshake.munge, "_LIBRARY", "libmunge.so.2.nonexistent")
    for call in (Munge("/nonexistent").encode, Munge("/nonexistent").decode):
        with pytest.raises(AuthenticationError, match=r"nonexistent.*install .* libmunge2"):
            call(b"")
    assert try_munge() is None


@needs_network
def test_ranks_meet_by_a_real_munge(munge):
    ranks = [Rank(job) for job in munge_jobs(3, munge)]
    for rank in ranks:
        assert rank.end().error is None
        assert rank.heard == [b"rank 0", b"rank 1", b"rank 2"]


@needs_root
@needs_network
def test_another_user_cannot_join_by_a_real_munge(munge):
    jobs = munge_jobs(2, munge)
    first = Rank(jobs[0])
    with connected(jobs[1]):  # rank 0 listens
        pass
    error = as_user(NOBODY, lambda: Rank(jobs[1], timeout=5.0).end().error)
    assert isinstance(error, AuthenticationError)
    assert f"this process, which is user {NOBODY}'s" in str(error)
    second = Rank(jobs[1]).end()
    assert first.end().error is None
    assert second.error is None


# -- finding it ------------------------------------------------------------------------------------


def test_a_step_on_several_hosts_uses_munge_where_there_is_one(munge, tmp_path, caplog):
    environ = SLURM | {"FERRODIST_MUNGE_SOCKET": munge.socket_path}
    with caplog.at_level(logging.INFO, "ferrodist"):
        assert find_job.find_job(environ).uses_munge
    assert "which prove themselves by MUNGE" in caplog.text
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(bytes(range(32)))
    assert not find_job.find_job(environ | {"FERRODIST_SECRET_FILE": str(secret)}).uses_munge
    assert not find_job.find_job(environ | {"SLURM_STEP_NUM_NODES": "1"}).uses_munge


@pytest.mark.parametrize("path", ["/nonexistent", "/etc/passwd", "\0"])
def test_what_is_no_socket_is_no_munge(path):
    job = find_job.find_job(SLURM | {"FERRODIST_MUNGE_SOCKET": path})
    assert job.munge is None
    assert not job.uses_munge


@pytest.mark.parametrize(
    "more",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "7.0"},
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
    ],
)
def test_ranks_with_variables_of_an_mpi_meet_where_those_of_a_plain_step_do(more, munge):
    environ = SLURM | more | {"FERRODIST_MUNGE_SOCKET": munge.socket_path}
    job = find_job.find_job(environ)
    assert job.uses_munge
    assert job.endpoint is not None
    assert job.endpoint.host == "n1"
