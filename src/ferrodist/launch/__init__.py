# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line. One file per command; ``main.py`` lists them.

The rule of this room: it stands on ferrodist's public functions and never looks below them. Only
here may click and rich be imported.
"""
