"""The processes that fork ranks, which have imported what ranks need.

All processes of a test run share them: importing torch and JAX takes seconds. A template imports
nothing before a test asks for a rank; then it forks a server for that test process.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HEAVY = ("torch", "torch._dynamo", "jax")  # take seconds to import; optimizers need the second
_JOBS = Path(__file__).with_name("jobs.py")
_QUIET = ("-W", "ignore:os.fork() was called:RuntimeWarning")  # JAX; ranks use it on their own


class Template:
    """A process that forks servers of ranks; it ends with the process that has started it."""

    def __init__(self, *, is_heavy: bool) -> None:
        self.address = f"\0ferrodist-test-{secrets.token_hex(8)}"
        installed = [name for name in HEAVY if find_spec(name.partition(".")[0])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._control, control = socket.socketpair()
        with control, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen()
            files = [listener.fileno(), control.fileno()]
            command = [sys.executable, *_QUIET, str(_JOBS), *map(str, files)]
            self._process = subprocess.Popen(
                [*command, *(installed if is_heavy else [])],
                pass_fds=files,
                env=environment,
                stdin=subprocess.DEVNULL,
            )

    def close(self) -> None:
        self._control.close()
        self._process.wait(30)
