# SPDX-License-Identifier: MIT OR Apache-2.0
"""Training on several ranks: models are replicated, gradients become means over all ranks.

``bucket.py`` says which gradients travel together, a ``Bucket`` is such a group in one array, the
``Reducer`` keeps the ranks in step. On it stand ``ddp.py`` for torch, with ``gradients.py`` between
it and autograd, and ``data_parallel.py`` for everything else. ``sync_batch_norm.py`` is a layer
over all ranks' batches; ``sharding.py`` deals samples to ranks.

The rule of this package: it stands on ferrodist's public functions; besides, it converts trees of
any arrays.
"""

from __future__ import annotations

import ferrodist
from ferrodist.backends.registry import current_backend


def backend_of(backend: ferrodist.Backend | None, who: str) -> ferrodist.Backend:
    """Return the backend that was passed, or what init() made."""
    backend = backend or current_backend()
    if backend is None:
        raise ferrodist.NotInitialized(f"{who}: call ferrodist.init() first, or pass a backend")
    return backend
