# SPDX-License-Identifier: MIT OR Apache-2.0
"""ferrodist as a backend of torch.distributed.

    import ferrodist.torch
    torch.distributed.init_process_group("ferrodist")

Everything that stands on torch.distributed (DDP, FSDP, DTensor, pipelining, checkpoints) then runs
on ferrodist's collectives, for tensors in CPU memory.

``process_group.py`` defines the calls and ``group_base.py`` what they share; ``joining.py`` creates
groups; ``operators.py`` serves torch's C++ code; ``work.py`` has what calls return, ``tensors.py``
prepares their arguments. In this package ``torch`` is torch itself: every import is absolute.
"""

from __future__ import annotations

import os

import torch

import ferrodist_torch
from ferrodist.call import NOT_THE_USERS
from ferrodist.torch import operators
from ferrodist.torch.joining import create as create
from ferrodist.torch.joining import process_group
from ferrodist.torch.process_group import ProcessGroup, backend_of

__all__ = ["ProcessGroup", "process_group", "backend_of"]

NOT_THE_USERS.append(os.path.dirname(torch.__file__) + os.sep)  # errors name the user's own line
operators.install()
ferrodist_torch.register()
