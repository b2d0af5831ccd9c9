# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command that ssh runs on another host: ``ferrodist run`` for the ranks of that host.

It is read by a shell there, so every word is quoted. The secret of the job is not in it: it comes
through the standard input of ssh.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ferrodist.config import environment, variable
from ferrodist.errors import InvalidArgument
from ferrodist.launch.hosts import Host
from ferrodist.launch.part import Attempt
from ferrodist.rendezvous.launch import Endpoint, Launch
from ferrodist.rendezvous.sources.nesting import OUTER_JOBS

# A password cannot be typed: all hosts would ask at once. A host that is away is noticed soon.
DEFAULT_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"

_OURS = variable("")  # what the names of our variables begin with
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STAY_HERE = frozenset(
    {variable(one.name) for one in fields(Launch)}
    | {variable("ssh"), variable("secret_file"), OUTER_JOBS}
)


@dataclass(frozen=True, slots=True)
class Remote:
    """What all hosts of a job are told alike."""

    hosts: Sequence[Host]
    ssh: Sequence[str]
    sizes: Sequence[int]
    endpoint: Endpoint
    job: str
    variables: Mapping[str, str]
    options: Sequence[str]  # of this command, passed on
    script: Sequence[str]  # and its arguments

    def command(self, node_rank: int, attempt: Attempt) -> list[str]:
        """Return the command that starts the ranks of a host."""
        options = {
            "--nnodes": len(self.hosts),
            "--node-rank": node_rank,
            "--rdzv-endpoint": self.endpoint,
            "--rdzv-id": self.job,
            "--nproc-per-node": ",".join(map(str, self.sizes)),
            "--max-restarts": attempt.most_restarts,
            "--only-attempt": attempt.restarts,
        }
        words = [f"{name}={value}" for name, value in self.variables.items()]
        words += [sys.executable, "-m", "ferrodist", "run", "--held-by-ssh"]
        words += [str(word) for pair in options.items() for word in pair]
        words += [*self.options, "--", *self.script]
        there = f"cd {shlex.quote(_folder())} && exec env {shlex.join(words)}"
        return [*self.ssh, self.hosts[node_rank].name, there]


def variables_for(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of this process that go to all hosts: ours, and those with these names.

    Raises:
        InvalidArgument: if one is not set, or is no name at all.
    """
    here = environment()
    for name in names:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{name!r} is no name of a variable")
        if name not in here:
            raise InvalidArgument(f"{name} is not set here")
    found = {name for name in here if _NAME.fullmatch(name) and name.startswith(_OURS)}
    return {name: here[name] for name in sorted((found - _STAY_HERE) | set(names))}


def ssh_words(option: str | None) -> list[str]:
    """Return the program that reaches other hosts, and its options.

    Raises:
        InvalidArgument: if the words cannot be told apart.
    """
    text = (option or environment().get(variable("ssh")) or "").strip() or DEFAULT_SSH
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is no command: {error}") from error


def _folder() -> str:
    """Return the working directory, by the name under which it was entered, if that is known."""
    here, named = Path.cwd(), environment().get("PWD", "")
    is_it = os.path.isabs(named) and os.path.exists(named) and os.path.samefile(named, here)
    return named if is_it else str(here)
