# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ranks write, on its way to the terminal, the notebook and the log files.

::

    a rank's pipe or terminal -> Reader -> PassThrough, Prefixer -> Writer -> Sink
                                 |         |                       rank 0 and the de-duplicated
                                 |         |                       lines of others share it
                                 |         rank 0 as it is, others by lines that name them
                                 log file and the tail

``Streams`` has the streams of all ranks of one attempt, ``Console`` is where they end.
"""
