# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line and ``ferrodist.run``: whatever starts ranks. ``main.py`` lists the commands.

``processes.py`` starts, watches and ends the processes of a job, for all who need some; ``output/``
brings what they write to the terminal, the notebook and the log files.

The rule of this package: it stands on ferrodist's public functions, and on what a launcher and its
ranks must agree about. Only here may click and rich be imported.
"""
