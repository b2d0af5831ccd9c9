# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line and ``ferrodist.run``: whatever starts ranks. ``main.py`` lists the commands.

``processes.py`` starts, watches and ends the processes of a job, for all who need some.

The rule of this room: it stands on ferrodist's public functions and never looks below them. Only
here may click and rich be imported.
"""
