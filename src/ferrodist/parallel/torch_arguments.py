# SPDX-License-Identifier: MIT OR Apache-2.0
"""The arguments of torch's DDP: which mean something here, and what to write for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import ferrodist

_WITHOUT_EFFECT = {
    "find_unused_parameters",  # they are found in any case
    "gradient_as_bucket_view",  # they are, and who keeps one does not see it change
    "static_graph",  # nothing depends on it
    "check_reduction",
    "skip_all_reduce_unused_params",
}

_BUCKETS = "buckets follow the order in which gradients come: omit it"
_INSTEAD: dict[str, tuple[Any, str]] = {  # what is taken, and what to write for all else
    "output_device": (None, "outputs are where the module puts them: omit it"),
    "dim": (0, "batches are cut by the program, see shard_indices: omit it"),
    "init_sync": (True, "parameters are always those of rank 0 at the start: omit it"),
    "mixed_precision": (None, "run the module under torch.autocast"),
    "device_mesh": (None, "pass a backend, of some ranks backend.split(ranks)"),
    "delay_all_reduce_named_params": (None, _BUCKETS),
    "param_to_hook_all_reduce": (None, _BUCKETS),
}


def check(arguments: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Refuse what would do something else here. DDP uses bucket_cap_mb and process_group."""
    for name, value in arguments.items():
        if name in _INSTEAD:
            taken, instead = _INSTEAD[name]
            if value != taken:
                raise ferrodist.InvalidArgument(f"DDP: {name}={value!r}; {instead}", got=value)
        elif name == "device_ids":
            _check_devices(value, module)
        elif name == "process_group":
            _check_group(value)
        elif name not in _WITHOUT_EFFECT and name != "bucket_cap_mb":
            raise TypeError(f"DDP() got an unexpected keyword argument {name!r}")


def _check_devices(devices: Any, module: torch.nn.Module) -> None:
    found = {str(parameter.device) for parameter in module.parameters()}
    named = {f"cuda:{one}" if isinstance(one, int) else str(one) for one in devices or ()}
    if found and not named <= found:
        raise ferrodist.InvalidArgument(
            f"DDP: device_ids={devices!r}, but the module is on {', '.join(sorted(found))}; move "
            "it with module.to(device) and omit device_ids",
            got=devices,
        )


def _check_group(group: Any) -> None:
    if group is not None and not isinstance(group, ferrodist.Backend):
        raise ferrodist.InvalidArgument(
            f"DDP: process_group is a {type(group).__name__}; pass a backend of ferrodist, of some "
            "ranks backend.split(ranks)",
            got=group,
        )
