# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sources: who may tell a process its place, one launcher per file; ``find.py`` asks them in order.

The rule of this room: a source takes a mapping of variables and gives a Place, or None if it says
nothing. It may look at an open file that a variable names, and leaves it as it was; only the pipe
with the secret of ``ferrodist run`` is read, once.
"""
