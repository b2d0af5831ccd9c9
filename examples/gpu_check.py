# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check backend "nccl" on your GPUs: every call, dtype and operation, then the contract suite.

    python examples/gpu_check.py
    ferrodist run -n 2 examples/gpu_check.py

Use as many ranks as there are GPUs. It takes a minute and prints a table to paste into an issue.
Expected results come from ranks that are threads, on the CPU. If torch finds no GPU, the script
checks backend "gloo" with CPU tensors instead.
"""

import sys

import torch

import ferrodist
from ferrodist import ReduceOp
from ferrodist.testing import contract_cases, run_contract, run_ranks

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
OPS = [op for op in ReduceOp if op.name not in ("MINLOC", "MAXLOC")]


def values(rank, world, dtype):
    """Return small numbers that differ by rank, one block per rank; floats end with a NaN."""
    numbers = torch.arange(4 * world) % 5 + rank
    if dtype == "bool":
        return numbers % 2 == 0
    made = numbers.to(getattr(torch, dtype))
    if made.is_floating_point() and rank == world - 1:
        made[-1] = float("nan")
    return made


def run(backend, call, op, x):
    """Make one call; None if this rank gets no result, "refused" if the call is unsupported."""
    if call == "scatter" and backend.rank:
        x = x[: len(x) // backend.world_size]
    try:
        return getattr(backend, call)(x, **({} if op is None else {"op": op}))
    except ferrodist.UnsupportedOp:
        return "refused"


def problem(got, expected, device):
    """Describe what is wrong with a result; '' if it is right."""
    if expected is None or isinstance(expected, str):
        return "" if got is expected or got == expected else f"got {got}"
    if got.device.type != device or got.dtype != expected.dtype:
        return f"is {got.dtype} on {got.device}"
    got, wide = got.cpu(), torch.complex128 if got.is_complex() else torch.float64
    rough = {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(got.dtype, 1e-6)
    is_near = torch.allclose(got.to(wide), expected.to(wide), rtol=rough, equal_nan=True)
    return "" if is_near else f"{got.tolist()[:4]}, not {expected.tolist()[:4]}"


def check(backend, device, call, op):
    """Try a call with all dtypes; return the dtypes that are right, refused and wrong."""
    right, refused, wrong = [], [], {}
    world = backend.world_size
    for dtype in DTYPES:
        expected = run_ranks(world, lambda b, d=dtype: run(b, call, op, values(b.rank, world, d)))
        got = run(backend, call, op, values(backend.rank, world, dtype).to(device))
        if text := problem(got, expected[backend.rank], device):
            wrong[dtype] = text
        elif isinstance(got, str):
            refused.append(dtype)
        else:
            right.append(dtype)
    return right, refused, wrong


def check_streams(backend, device):
    """Use results on another stream immediately, without synchronizing with the host."""
    if device != "cuda":
        return "not tried: no GPU"
    x = torch.ones(1 << 20, device=device)
    backend.allreduce(x)  # NCCL connects in its first call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # on which x was made
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            total = backend.allreduce(backend.allreduce(x), async_op=True).wait() + 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    is_right = bool((total == backend.world_size**2).all())
    return "ok" if is_right else f"WRONG: {total[:4].tolist()}"


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = ferrodist.init("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(backend.local_rank)
    rows = [(call, op) for call in REDUCTIONS for op in OPS] + [(call, None) for call in MOVES]
    lines, is_clean = [], True
    for call, op in rows:
        right, refused, wrong = check(backend, device, call, op)
        everybody = backend.all_gather_object(wrong)
        failed = [f"rank {rank}: {one}" for rank, one in enumerate(everybody) if one]
        is_clean = is_clean and not failed
        name = call if op is None else f"{call} {op.label}"
        lines.append(f"{name:22} {len(right):2} right, {len(refused)} refused  {'; '.join(failed)}")
    streams = check_streams(backend, device)
    report = run_contract(backend, contract_cases(backend.world_size, in_order=False)[::8])
    if backend.rank == 0:
        nccl = torch.cuda.nccl.version() if device == "cuda" else "none"
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        print(f"ferrodist {ferrodist.__version__}, torch {torch.__version__}, NCCL {nccl}, {name}")
        print("\n".join([*lines, f"{'streams':22} {streams}", str(report)]), flush=True)
    sys.exit(not (is_clean and report.is_clean and "WRONG" not in streams))


if __name__ == "__main__":
    main()
