# SPDX-License-Identifier: MIT OR Apache-2.0
"""Engines: libraries that run a large collective once all ranks are known to be in it.

``engine.py`` has what all engines share: a hybrid backend, which compares the calls, watches the
ranks and does everything else. ``torch.py`` (Gloo, NCCL) and ``mpi.py`` add how their ranks meet
and how a collective is started; ``torch_calls.py`` and ``mpi_calls.py`` say which collectives the
library does as we promise. ``fast_path.py`` is a plain call on one array in some microseconds.
"""
