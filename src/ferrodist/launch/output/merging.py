# SPDX-License-Identifier: MIT OR Apache-2.0
"""Merging: several flows that end at one console, looked after while somebody is waited for."""

from __future__ import annotations

from ferrodist.launch.output.console import Console
from ferrodist.launch.output.flow import Flow


class Merging:
    """Flows to one console; whoever has them says which they are.

    Around every wait, wait no longer than ``wait_seconds``, and ``write_due``. At the end of all,
    ``finish``.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def _flows(self) -> list[Flow]:
        raise NotImplementedError

    def wait_seconds(self) -> float:
        """Return how long ``write_due`` will have nothing to do, unless something is read."""
        held = [outlet.wait_seconds() for outlet in self._console.outlets]
        return min([*held, *(flow.wait_seconds() for flow in self._flows)])

    def write_due(self) -> None:
        """Write what has been held long enough."""
        for outlet in self._console.outlets:
            outlet.write_due()
        for flow in self._flows:
            flow.write_due()

    def finish(self) -> None:
        """Take all that has been written, and wait for nobody; the console is finished later."""
        for flow in self._flows:
            flow.end()
        for outlet in self._console.outlets:
            outlet.flush()
