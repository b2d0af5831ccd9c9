# SPDX-License-Identifier: MIT OR Apache-2.0
"""The script of a process: by it, jobs that have no name of their own are told apart.

On one host it is the resolved path. Between hosts the same project may lie in different places, so
only the last part of the path counts, as also where a path cannot be resolved any more: the program
has left its directory.
"""

from __future__ import annotations

import os
import sys

MAX_SCRIPT = 512  # bytes of its end: the name counts more than where it lies
_NO_SCRIPT = {"-c": "python -c", "-": "standard input", "": "standard input"}


def running_script() -> str:
    """Return the resolved path of the script that this process runs, or what it runs instead."""
    given = sys.argv[0] if sys.argv else ""
    if given in _NO_SCRIPT:
        return _NO_SCRIPT[given]
    # sys.argv names the script also under pdb, cProfile or multiprocessing. A script that Python
    # runs itself has its absolute path in __main__, which no chdir() makes wrong.
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    path = main if os.path.basename(main) == os.path.basename(given) else given
    found = os.path.realpath(path) if os.path.exists(path) else os.path.basename(path)
    return os.fsencode(found)[-MAX_SCRIPT:].decode(errors="ignore")


def is_same_script(one: str, other: str, *, on_one_host: bool) -> bool:
    if on_one_host and os.path.isabs(one) and os.path.isabs(other):
        return one == other
    return os.path.basename(one) == os.path.basename(other)
