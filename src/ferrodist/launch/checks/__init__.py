# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks: what ``ferrodist doctor`` looks at, one file per kind; ``exam.py`` runs them all.

The rule of this room: a check takes a ``Situation`` and yields findings. It changes nothing on the
machine, waits for nothing without a limit, and says of everything that is wrong what to do. Files
under /proc and /sys are read below ``situation.root`` and variables from ``situation.environ``, so
that a test can make any machine up.
"""
