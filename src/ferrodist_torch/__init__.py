# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ``import torch`` runs to learn of ferrodist's backend: an entry point of ``torch.backends``.

It imports nothing before a group is made, and an error in it would break ``import torch``: a torch
without distributed, or with a backend of this name, is left as it is.
"""

from typing import Any


def register() -> None:
    """Tell torch.distributed that there is a backend named "ferrodist"; never raises."""
    try:
        from torch.distributed import Backend

        if "FERRODIST" not in Backend._plugins:
            Backend.register_backend("ferrodist", _create, extended_api=True, devices=["cpu"])
    except Exception:  # noqa: BLE001 -- whatever torch that is, it must stay usable
        pass


def _create(options: Any, backend_options: Any = None) -> Any:
    import ferrodist.torch

    return ferrodist.torch.create(options, backend_options)
