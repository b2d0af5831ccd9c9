# SPDX-License-Identifier: MIT OR Apache-2.0
"""What reductions need besides the arrays: which operations there are, pairs, functions of users.

Pairs of values and indices travel as pairs of keys, of which the least is found natively. A user's
function is applied on one rank, which then gives the others the result, or what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ferrodist import _native
from ferrodist.arrays import InputArray, OutputArray, as_input, flatten, new_result, type_name
from ferrodist.backends.running_call import CollectiveArgs, Part, RunningCall
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind, Leaf
from ferrodist.collectives.request import applying
from ferrodist.errors import DistributedError, InvalidShape, UnsupportedArray, UnsupportedOp
from ferrodist.reduce_op import CustomOp, ReduceOp

# -- values with their indices ---------------------------------------------------------------------


def open_pair(x: Any, where: str) -> tuple[list[tuple[str, Any]], type[tuple[Any, ...]]]:
    """Take a pair apart, as ``flatten`` does a tree; it comes back as a tuple."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        found = f"a {type_name(x)}" + (f" of {len(x)}" if isinstance(x, (tuple, list)) else "")
        raise UnsupportedArray(
            f"{where} must be a pair (values, indices) of arrays or numbers, got {found}",
            got=found,
        )
    named, _ = flatten(x)
    if [path for path, _ in named] != ["[0]", "[1]"]:
        inside = next(type_name(part) for part in x if part is None or flatten(part)[0][0][0])
        raise UnsupportedArray(
            f"{where} must be a pair (values, indices) of arrays or numbers, one of them is a "
            f"{inside}",
            got=inside,
        )
    return named, tuple


def problem_of_pair(values: InputArray, indices: InputArray) -> DistributedError | None:
    """Make the error for two arrays that are no pair; None if they are one."""
    shape, dtype = values.buffer.shape, indices.buffer.dtype
    if indices.buffer.shape != shape:
        got = indices.buffer.shape
        return InvalidShape(
            f"values have shape {shape}, indices {got}; they must be alike", expected=shape, got=got
        )
    if not dtype.is_integer:
        return UnsupportedOp(f"indices are {dtype.label}; they must be integers", got=dtype.label)
    return None


class Pairs(NamedTuple):
    """Values and indices on their way as pairs, and where their reduction goes."""

    op: ReduceOp
    inputs: Sequence[InputArray]
    results: Sequence[OutputArray | None]
    input: Buffer
    output: Buffer | None

    @classmethod
    def pack(
        cls, op: ReduceOp, inputs: Sequence[InputArray], results: Sequence[OutputArray | None]
    ) -> Pairs:
        """Make pairs of two inputs of one shape."""
        shape = inputs[0].buffer.shape
        made = Buffer.empty(DType.PAIR, shape)
        output = None if results[0] is None else Buffer.empty(DType.PAIR, shape)
        pairs = cls(op, inputs, results, made, output)
        _native.pack_pairs(*pairs._form, made.memory, *(one.buffer.memory for one in inputs))
        return pairs

    @property
    def _form(self) -> tuple[DType, DType, bool]:
        values, indices = (one.buffer.dtype for one in self.inputs)
        return values, indices, self.op is ReduceOp.MAXLOC

    def part(self, kind: Kind, args: CollectiveArgs) -> Part:
        """Make the collective: largest first, the least pair is that of the largest value."""
        return Part(kind, self.input, self.output, args._replace(op=ReduceOp.MINLOC))

    def unpack(self) -> None:
        """Write values and indices to where the results are."""
        if self.output is not None:
            values, indices = (one.buffer.memory for one in self.results if one is not None)
            _native.unpack_pairs(*self._form, self.output.memory, values, indices)


# -- functions of users ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class CustomReduction:
    """A reduction by a user's function: gathered on one rank, applied there, and handed out."""

    op: CustomOp
    kind: Kind
    home: int  # the rank that applies it
    inputs: Sequence[InputArray]
    results: Sequence[OutputArray | None]
    refused: BaseException | None = None  # after the call, what this rank raises

    def run(self, running: RunningCall) -> None:
        """Do the whole call."""
        is_home, world = running.backend.rank == self.home, running.backend.world_size
        gathered = [_blocks(taken.buffer, world) if is_home else None for taken in self.inputs]
        for taken, blocks in zip(self.inputs, gathered, strict=True):
            args = CollectiveArgs(root=self.home)
            running.collective(Kind.GATHER, taken.buffer, blocks, args)
        if is_home:
            self._reduce(running, gathered)
        if not self._confirm(running):
            return
        for number, blocks in enumerate(gathered):
            self._hand_out(running, self.inputs[number].buffer, self.results[number], blocks)

    def _reduce(self, running: RunningCall, gathered: Sequence[Buffer | None]) -> None:
        """Turn the inputs of all ranks into what the ranks up to each give."""
        try:
            for taken, blocks in zip(self.inputs, gathered, strict=True):
                assert blocks is not None
                self._reduce_blocks(running, taken, blocks)
        except UnsupportedOp as error:
            self.refused = error

    def _reduce_blocks(self, running: RunningCall, taken: InputArray, blocks: Buffer) -> None:
        memories = _cut(blocks, running.backend.world_size)
        held = _array_of(taken, next(memories))
        for memory in memories:
            held = self._apply(running, held, _array_of(taken, memory))
            found = self._check(running, taken, held)
            memory[:] = found.buffer.memory

    def _apply(self, running: RunningCall, left: Any, right: Any) -> Any:
        assert self.op.fn is not None
        applying.backend = running.backend
        try:
            return self.op.fn(left, right)
        except Exception as error:  # whatever the function of the program raises
            what = f"raised {type(error).__name__}: {error}"
            raise self._error(running, what) from error
        finally:
            applying.backend = None

    def _check(self, running: RunningCall, taken: InputArray, value: Any) -> InputArray:
        wanted = Leaf("", taken.buffer.dtype, taken.buffer.shape)
        try:
            found = as_input(value, "its result")
        except UnsupportedArray as error:
            raise self._error(running, f"gave a {type_name(value)}, not {wanted}") from error
        got = Leaf("", found.buffer.dtype, found.buffer.shape)
        if got != wanted:
            raise self._error(running, f"gave {got}, its arguments are {wanted}")
        return found

    def _error(self, running: RunningCall, what: str) -> UnsupportedOp:
        return UnsupportedOp(
            f"{self.kind.label} #{running.sequence}: {self.op.label} {what} (on rank {self.home})",
            rank=self.home,
            this_rank=self.home,
            op=self.kind.label,
            sequence=running.sequence,
        )

    def _confirm(self, running: RunningCall) -> bool:
        """Give all ranks the reason if there is no result: its length, then its text."""
        reason = bytearray(str(self.refused or "").encode(errors="replace"))
        length = np.array([len(reason)])
        running.broadcast(Buffer.of_numbers(length), self.home)
        if not length[0]:
            return True
        reason = reason or bytearray(int(length[0]))
        words = Buffer(memoryview(reason), DType.UINT8, (len(reason),), reason)
        running.broadcast(words, self.home)
        if self.refused is None:
            where = f" (on rank {self.home})"
            self.refused = UnsupportedOp(
                reason.decode().removesuffix(where) + where,
                rank=self.home,
                this_rank=running.backend.rank,
                op=running.call.kind.label,
                sequence=running.sequence,
            )
        return False

    def _hand_out(
        self, running: RunningCall, input: Buffer, result: OutputArray | None, blocks: Buffer | None
    ) -> None:
        """Give every rank what it is to have: the last block, or one each."""
        world = running.backend.world_size
        args, output = CollectiveArgs(root=self.home), None if result is None else result.buffer
        last = None if blocks is None else Buffer(list(_cut(blocks, world))[-1], *_form_of(input))
        if self.kind is Kind.REDUCE:
            if last is not None and output is not None:
                output.memory[:] = last.memory
            return
        if self.kind is Kind.ALLREDUCE:
            running.collective(Kind.BROADCAST, last, output, args)
            return
        if self.kind is Kind.EXSCAN:
            blocks = None if blocks is None else _shifted(blocks, world)
            output = output or Buffer.empty(*_form_of(input))  # of rank 0, which has no result
        running.collective(Kind.SCATTER, blocks, output, args)


def _form_of(buffer: Buffer) -> tuple[DType, tuple[int, ...]]:
    return buffer.dtype, buffer.shape


def _blocks(one: Buffer, world: int) -> Buffer:
    return Buffer.empty(one.dtype, (world, *one.shape))


def _cut(blocks: Buffer, world: int) -> Iterator[memoryview]:
    size = blocks.nbytes // world
    return (blocks.memory[rank * size : (rank + 1) * size] for rank in range(world))


def _shifted(blocks: Buffer, world: int) -> Buffer:
    """Give each rank the block of the one before it."""
    made, size = Buffer.empty(*_form_of(blocks)), blocks.nbytes // world
    made.memory[size:] = blocks.memory[: blocks.nbytes - size]
    return made


def _array_of(taken: InputArray, memory: memoryview) -> Any:
    """Make an array of the caller's kind of bytes."""
    made = new_result(taken, taken.buffer.shape)
    made.buffer.memory[:] = memory
    return made.finish()
