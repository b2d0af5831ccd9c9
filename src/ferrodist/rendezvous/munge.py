# SPDX-License-Identifier: MIT OR Apache-2.0
"""MUNGE: ranks of several hosts prove whose processes they are, and get the job's secret.

MUNGE runs on clusters, SLURM's above all. A credential is a few bytes that a daemon on one host
has encrypted and signed with the key of the cluster; that of another host tells who had it made,
and shows the content to nobody but the user it is for. In the handshake (``handshake.py``), before
any proof, and only for a job that has no other secret:

    client                                            server
    CREDENTIAL: "clie", hash of greetings and job  ->
                                                   <- CREDENTIAL: "serv", the same, the secret

Both are for the user of this process alone, and both sides check that they come from the same. The
greetings hold random numbers of both, so neither credential is good for another connection. The
secret is new for every job, and never leaves rank 0 but in a credential. The daemon is asked on a
thread of its own: while it hangs, others are served.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ferrodist.config import variable
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, ProtocolError
from ferrodist.rendezvous.job import SECRET_NBYTES, Job, how_to_make_secret
from ferrodist.rendezvous.wire import Channel, MessageKind, Steps, receive_answer

T = TypeVar("T")

_LIBRARY = "libmunge.so.2"
_ANSWER_SECONDS = 4.0  # for the daemon; a handshake has five
_MOST_ASKING = 128  # threads that wait for the daemon
# From munge.h; numbers of an interface that has been the same since 2007.
_CIPHER, _MAC, _SOCKET, _FOR_UID = 0, 1, 8, 9
_AES256, _SHA256 = 5, 5
_OF_ANOTHER_CLUSTER, _EXPIRED, _REWOUND, _FOR_OTHERS = 14, 15, 16, 18
_slots = threading.BoundedSemaphore(_MOST_ASKING)
_ADVICE = {
    _OF_ANOTHER_CLUSTER: "do all hosts have the same MUNGE key?",
    _EXPIRED: "are the clocks of the hosts minutes apart?",
    _REWOUND: "are the clocks of the hosts minutes apart?",
    _FOR_OTHERS: "it is for another user",
}
_SERVER, _CLIENT = b"serv", b"clie"  # who has made a credential; of one length


class Munge:
    """The MUNGE daemon of this host, at a socket: makes credentials and reads them."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path

    def encode(self, payload: bytes) -> bytes:
        """Make a credential with this content, which only processes of this user can read."""
        library, made = _load(), ctypes.c_void_p()
        context = self._open(library)
        try:
            for option, value in ((_CIPHER, _AES256), (_MAC, _SHA256), (_FOR_UID, os.geteuid())):
                library.munge_ctx_set(context, option, ctypes.c_int(value))
            code = library.munge_encode(ctypes.byref(made), context, payload, len(payload))
            self._check(library, context, code, "did not make a credential")
            return ctypes.string_at(made)
        finally:
            _free(made)
            library.munge_ctx_destroy(context)

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        library, content = _load(), ctypes.c_void_p()
        length, uid, gid = ctypes.c_int(), ctypes.c_uint32(), ctypes.c_uint32()
        context = self._open(library)
        try:
            results = map(ctypes.byref, (content, length, uid, gid))
            code = library.munge_decode(credential, context, *results)
            self._check(library, context, code, "refused a credential")
            return ctypes.string_at(content, length.value), uid.value
        finally:
            _free(content)
            library.munge_ctx_destroy(context)

    def _open(self, library: ctypes.CDLL) -> ctypes.c_void_p:
        context = ctypes.c_void_p(library.munge_ctx_create())
        library.munge_ctx_set(context, _SOCKET, self.socket_path.encode())
        return context

    def _check(self, library: ctypes.CDLL, context: ctypes.c_void_p, code: int, what: str) -> None:
        if code == 0:
            return
        why = library.munge_ctx_strerror(context) or library.munge_strerror(code)
        advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
        raise AuthenticationError(
            f"MUNGE, at {self.socket_path}, {what}: {why.decode(errors='replace')}{advice}"
        )


def try_munge(socket_path: str = "") -> Munge | None:
    """Find the MUNGE of this host, at its usual socket unless another is given; None if none."""
    try:
        path = socket_path or _usual_socket(_load())
        return Munge(path) if stat.S_ISSOCK(os.stat(path).st_mode) else None
    except (OSError, ValueError):  # AuthenticationError, for want of the library, is one
        return None


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise AuthenticationError(
            f"MUNGE cannot be used: {_LIBRARY} cannot be loaded ({error}); install the package "
            "libmunge2 (Debian and Ubuntu; munge-libs on Fedora), or use a secret file"
        ) from error
    library.munge_ctx_create.restype = ctypes.c_void_p
    for name in ("munge_strerror", "munge_ctx_strerror"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def _usual_socket(library: ctypes.CDLL) -> str:
    context, path = ctypes.c_void_p(library.munge_ctx_create()), ctypes.c_char_p()
    try:
        library.munge_ctx_get(context, _SOCKET, ctypes.byref(path))
        return (path.value or b"").decode()
    finally:
        library.munge_ctx_destroy(context)


def _free(memory: ctypes.c_void_p) -> None:
    free = ctypes.CDLL(None).free
    free.argtypes, free.restype = [ctypes.c_void_p], None
    free(memory)


# -- in the handshake -----------------------------------------------------------------------------


def ask_for_secret(
    channel: Channel, job: Job, client: bytes, server: bytes, where: str
) -> Steps[Job]:
    """Prove to rank 0 whose process this is, and return the job with the secret that it tells.

    Raises AuthenticationError if the process that listens is not this user's.
    """
    assert job.munge is not None
    munge, binding = job.munge, _bind(job, client, server)
    credential = yield from _aside(munge, lambda: munge.encode(_CLIENT + binding))
    channel.send(MessageKind.CREDENTIAL, credential)
    try:
        answer = yield from receive_answer(channel, MessageKind.CREDENTIAL, is_trusted=False)
    except ProtocolError as error:  # a refusal, perhaps; it may come from anybody
        raise AuthenticationError(
            f"the process that listens{where} for job {job.name!r} did not take the MUNGE "
            f"credential of this process, which is user {os.geteuid()}'s: it belongs to another "
            "user, or its MUNGE has another key; look at its output. Instead of MUNGE, "
            f"{how_to_make_secret()}",
            rank=0,
            this_rank=job.rank,
        ) from error
    who = f"the process that listens{where}"
    secret = yield from _aside(munge, lambda: _read(job, answer.body, _SERVER + binding, who))
    if len(secret) != SECRET_NBYTES:
        raise AuthenticationError(f"{who} told no secret", rank=0)
    return replace(job, secret=secret)


def tell_secret(channel: Channel, job: Job, client: bytes, server: bytes) -> Steps[None]:
    """Tell a client the secret, if it proves to be a process of this user."""
    assert job.munge is not None
    munge, binding = job.munge, _bind(job, client, server)
    credential = (yield from channel.receive(MessageKind.CREDENTIAL)).body

    def answer() -> bytes:
        if _read(job, credential, _CLIENT + binding, "a process that wants to join"):
            raise AuthenticationError("a process sent a MUNGE credential with more than expected")
        return munge.encode(_SERVER + binding + job.secret)

    channel.send(MessageKind.CREDENTIAL, (yield from _aside(munge, answer)))


def _aside(munge: Munge, ask: Callable[[], T]) -> Steps[T]:
    """Ask the daemon on a thread, which hangs as long as that does; wait for it, but not longer."""
    found: list[T] = []
    failed: list[Exception] = []
    if not _slots.acquire(blocking=False):
        raise AuthenticationError(
            f"MUNGE, at {munge.socket_path}, answers none of {_MOST_ASKING} requests: munged hangs"
        )
    read, write = os.pipe()

    def work() -> None:
        try:
            found.append(ask())
        except Exception as error:  # noqa: BLE001 -- the top of a thread; the handshake gets it
            failed.append(error)
        finally:
            _slots.release()
            os.close(write)

    deadline = Deadline(_ANSWER_SECONDS)
    try:
        try:
            threading.Thread(target=work, name="munge", daemon=True).start()
        except RuntimeError as error:  # this process may have no more threads
            _slots.release()
            os.close(write)
            raise AuthenticationError(f"MUNGE could not be asked: {error}") from error
        while not (found or failed):
            if deadline.remaining() <= 0:
                raise AuthenticationError(
                    f"MUNGE, at {munge.socket_path}, has not answered within {deadline}: munged "
                    "hangs, or its host is overloaded; restart it, or use a secret file"
                )
            yield read
    finally:
        os.close(read)
    if failed:
        raise failed[0]
    return found[0]


def _bind(job: Job, client: bytes, server: bytes) -> bytes:
    """Name this connection of this job: both greetings hold random numbers."""
    return hashlib.sha256(client + server + job.name.encode()).digest()


def _read(job: Job, credential: bytes, start: bytes, who: str) -> bytes:
    """Read the credential of the other side; return what stands after its start."""
    assert job.munge is not None
    content, uid = job.munge.decode(credential)
    if uid != os.geteuid():
        raise AuthenticationError(
            f"{who} for job {job.name!r} is a process of user {uid}, according to MUNGE, and this "
            f"is user {os.geteuid()}",
            this_rank=job.rank,
            got=uid,
            expected=os.geteuid(),
        )
    if not hmac.compare_digest(content[: len(start)], start):
        raise AuthenticationError(
            f"{who} sent a MUNGE credential of another connection or job than {job.name!r}",
            this_rank=job.rank,
        )
    return content[len(start) :]


def mixed(job: Job, who: str) -> AuthenticationError:
    own, other = ("MUNGE", "a secret file") if job.uses_munge else ("a secret file", "MUNGE")
    return AuthenticationError(
        f"{who} would prove itself by {other}, rank {job.rank} of job {job.name!r} does by {own}: "
        f"set {variable('secret_file')} on all ranks or on none",
        this_rank=job.rank,
    )
