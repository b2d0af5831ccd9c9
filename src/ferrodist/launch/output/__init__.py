# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ranks write, on its way to the terminal, the notebook and the log files.

::

    a rank's pipe or terminal -> flow -> speaker -> outlet -> sink
                                 |       |          rank 0 and the folded lines of others share it
                                 |       rank 0 as it is, others by lines that name them
                                 log file and the last words

``Streams`` has the streams of all ranks of one attempt, ``Console`` is where they end.
"""
