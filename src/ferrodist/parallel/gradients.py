# SPDX-License-Identifier: MIT OR Apache-2.0
"""Gradients: those of torch parameters, on their way through a reducer.

After a round every ``.grad`` is a view of a bucket. As long as it stays one, autograd adds to it in
place, and nothing is copied; after ``zero_grad(set_to_none=True)`` one copy brings it back. What is
reduced only at the end of a round is also copied there, all in one go.

Sparse gradients, rows of large tables of which each rank has a few, are in no bucket: at the end of
a round every rank gets the indices and values of all, and adds them up in rank order.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch

import ferrodist
from ferrodist.parallel.bucket import Bucket, BucketSizes, GradientSpec, Hook, Memories
from ferrodist.parallel.reducer import Reducer, explain
from ferrodist.parallel.replicas import DDP_ADVICE, is_dense


def makes_sparse_gradients(module: torch.nn.Module) -> bool:
    """Tell whether it is a table that was asked for sparse gradients of its weight."""
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse


class SparseGradients:
    """The gradients of some parameters; ``touched`` are those with one since the last round.

    ``weight`` is that of all ranks together in the last round.
    """

    def __init__(
        self,
        backend: ferrodist.Backend,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        before: SparseGradients | None = None,
    ) -> None:
        self._backend = backend
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        touched = {id(before.parameters[number]) for number in before.touched} if before else ()
        self.touched: set[int] = {n for n, one in enumerate(self.parameters) if id(one) in touched}
        self.weight = 0.0

    def reduce(self, weight: float | None, divisor: float | None) -> None:
        """Make means of the gradients that some rank has; weighted ones if there is a weight."""
        if not self.parameters:
            return
        own = 1.0 if weight is None else weight
        flags = [float(number in self.touched) for number in range(len(self.parameters))]
        try:
            mine = torch.tensor([[*flags, own]], dtype=torch.float64)
            everybodys = ferrodist.all_gather(mine, self._backend)
            *used, self.weight = everybodys.sum(dim=0).tolist()
            for number in (number for number, count in enumerate(used) if count):
                self._reduce(number, own, divisor or self.weight)
        except ferrodist.DistributedError as error:
            names = ", ".join(self._names)
            explain(error, f"DDP: sparse gradients of {names}", DDP_ADVICE)
            raise
        self.touched.clear()

    def _reduce(self, number: int, weight: float, divisor: float) -> None:
        parameter = self.parameters[number]
        gradient = parameter.grad
        if gradient is None or weight == 0:
            gradient = parameter.new_zeros((0, *parameter.shape[1:])).to_sparse(1)
            gradient.sparse_resize_(parameter.shape, 1, parameter.dim() - 1)
        elif gradient.layout is torch.strided:
            gradient = gradient.to_sparse(1)
        gradient = gradient.detach().coalesce()
        rows = gradient.indices().t().contiguous()
        # 16 bits have no room for weights, nor for sums of many.
        wide = torch.float32 if parameter.element_size() == 2 else parameter.dtype
        values = gradient.values().to(wide) * weight
        rows = ferrodist.all_gather_uneven(rows, self._backend)
        values = ferrodist.all_gather_uneven(values, self._backend)
        total = torch.sparse_coo_tensor(rows.t(), values, gradient.shape).coalesce()
        parameter.grad = torch.sparse_coo_tensor(
            total.indices(), (total.values() / divisor).to(parameter.dtype), total.shape
        ).coalesce()


# -- all gradients ---------------------------------------------------------------------------------


logger = logging.getLogger("ferrodist")

_engine = torch.autograd.Variable._execution_engine


adds_to_all_gradients = _engine.is_checkpoint_valid
"""Tell whether all of a graph runs backward, not the part that autograd.grad or inputs= ask for."""


def _none() -> None:
    """Stand for the weak reference of something that is gone."""


class Gradients:
    """The gradients of some parameters. ``backward`` makes means of them, or ``sync`` does.

    ``weigh``: None, or what tells how much this rank counts for in a round's mean, which is divided
    by the weights of all, or by ``divisor``. ``is_on``: False while gradients of what forward
    computes are to stay as they are. ``after_round`` is called with the number of rounds.
    """

    def __init__(
        self,
        backend: ferrodist.Backend,
        *,
        sizes: BucketSizes,
        hook: Hook,
        overlap: bool,
        after_round: Callable[[int], None],
    ) -> None:
        self._backend = backend
        self._sizes = sizes
        self._hook = hook
        self._overlaps = overlap
        self._parameters: list[torch.nn.Parameter] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._is_open = False  # between the first gradient of a backward and its end
        self._end: Callable[[], object] = _none  # gives what will be called then
        self._local: Callable[[], object] = _none  # gives something while a backward is local
        self._touched: set[int] = set()  # have a gradient since the last round
        self._fired: dict[int, None] = {}  # have one in this backward, in this order
        self._often: set[int] = set()  # get it in several parts
        self._early: set[int] = set()  # are brought in as soon as they have it
        self._memories: list[Memories] = []
        self._sparse = SparseGradients(backend, ())
        self._kept: dict[int, torch.Tensor] = {}  # gradients that a round may have to give back
        self.after_round = after_round
        self.weigh: Callable[[], float] | None = None
        self.divisor: float | None = None
        self._weight: float | None = None  # in this round
        self.is_on = True
        self.num_rounds = 0
        self.num_copies = 0

    def hold(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: Sequence[tuple[str, torch.nn.Parameter]] = (),
    ) -> None:
        """Take care of these parameters, in place of those before."""
        touched = {id(self._parameters[number]) for number in self._touched}
        self._parameters = [parameter for _, parameter in named]
        self._sparse = SparseGradients(self._backend, sparse, self._sparse)
        self._dtypes = {id(parameter): parameter.dtype for _, parameter in [*named, *sparse]}
        self._touched = {n for n, p in enumerate(self._parameters) if id(p) in touched}
        self._reducer = Reducer(
            [_leaf_of(name, parameter) for name, parameter in named],
            self._backend,
            kind="torch",
            owner="DDP",
            advice=DDP_ADVICE,
            sizes=self._sizes,
            hook=self._hook,
        )
        self._find_views()
        # In the first round nothing is known yet of the order, nor of what comes in parts.
        self._is_first = self._overlaps
        self._often.clear()
        self._early.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = self._watch() if self._overlaps else []

    def holds(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Tell whether these are among those it takes care of, as they were then."""
        return all(self._dtypes.get(id(parameter)) == parameter.dtype for parameter in parameters)

    @property
    def buckets(self) -> list[Bucket]:
        """What a round is made of: a call each."""
        return self._reducer.buckets

    # -- while backward runs --------------------------------------------------------------------

    def _watch(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Register a hook that is called with every gradient, for as long as this object lives."""
        weak = weakref.ref(self)

        def hook_of(number: int) -> Callable[[torch.nn.Parameter], None]:
            def take(_: torch.nn.Parameter) -> None:
                if (gradients := weak()) is None:
                    return
                gradients._touched.add(number)
                if gradients._end() is None or gradients._is_first or number in gradients._early:
                    gradients._take(number)

            return take

        def hook_of_sparse(number: int) -> Callable[[torch.nn.Parameter], None]:
            def take(_: torch.nn.Parameter) -> None:
                if (gradients := weak()) is not None:
                    gradients._sparse.touched.add(number)
                    if not gradients._is_local():
                        gradients._open()

            return take

        return [
            parameter.register_post_accumulate_grad_hook(hook(number))
            for hook, parameters in (
                (hook_of, self._parameters),
                (hook_of_sparse, self._sparse.parameters),
            )
            for number, parameter in enumerate(parameters)
        ]

    def expect(self, output: torch.Tensor) -> None:
        """Open the round when backward comes to an output of the module.

        That is in the outermost backward, whose end is that of the round; parts that are computed
        again (activation checkpoints) have a backward of their own inside it.
        """
        if self._overlaps and (node := output.grad_fn) is not None:
            # For a third of what a hook of the tensor takes.
            node.register_prehook(self._meet_output if self.is_on else self._meet_local_output)

    def _meet_output(self, _: object) -> None:
        if adds_to_all_gradients():
            self._open()

    def _meet_local_output(self, _: object) -> None:
        """Let gradients stay as they are until this backward ends: no_sync() was on in forward."""
        if self._end() is None:
            mark = lambda: None  # noqa: E731 -- a function of its own, which autograd lets go of
            self._local = weakref.ref(mark)
            _engine.queue_callback(mark)

    def _open(self) -> None:
        self.check_whole()
        if not self._is_open:
            self._begin()
            # Autograd lets go of it at the end of backward, without a call if that has failed.
            end = self._finish
            self._end = weakref.ref(end)
            _engine.queue_callback(end)

    def _is_local(self) -> bool:
        """Tell whether a gradient opens no round."""
        return self._end() is None and (self._local() is not None or not self.is_on)

    def _take(self, number: int) -> None:
        if self._is_local():
            return
        self._open()
        if number in self._fired:
            self._note_more(number)
        self._fired[number] = None
        if number in self._early:
            self._bring_in([number])
            self._parameters[number].grad = self._views[number]
            self._reducer.set_ready([number])

    def _note_more(self, number: int) -> None:
        """Note that a parameter gets its gradient in parts; from now on its bucket waits."""
        if self._reducer.has_started(number):
            raise ferrodist.DistributedError(
                f"DDP: {self._name(number)} got more gradient after its bucket was sent, because "
                "an activation checkpoint uses it a second time; use checkpoint(..., "
                "use_reentrant=False), or DDP(..., overlap=False) and sync_gradients()"
            )
        self._often.add(number)
        self._early.discard(number)

    def check_whole(self) -> None:
        """Refuse to go on after a round that has failed on this rank; tell the others.

        They wait for the rest of it, and would take the next one's gradients for that.
        """
        if not self._is_open or self._end() is not None:
            return
        self._backend.abort(
            f"DDP: a backward of rank {self._backend.rank} failed and training went on without "
            "it, which cannot be made good on one rank alone; let its error end the program"
        )
        ferrodist.barrier(self._backend)  # raises what the group came to its end by

    # -- a round ----------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make means of all gradients there are now."""
        self.check_whole()
        self._touched, self._sparse.touched = (
            {number for number, parameter in enumerate(parameters) if parameter.grad is not None}
            for parameters in (self._parameters, self._sparse.parameters)
        )
        self._begin()
        self._finish()

    def _begin(self) -> None:
        for memories in self._memories:
            if memories.are_kept(self._parameters):
                self._move(memories)
        self._is_open = True
        self._fired.clear()
        self._weight = None if self.weigh is None else self.weigh()
        self._reducer.begin(self._weight, self.divisor)

    def shadow(self) -> float:
        """Take part in a round of others with nothing; return the weight of all together.

        If they train this rank gets their means; else gradients stay what they are.
        """
        for memories in self._memories:
            if not memories.are_free(self._parameters):
                self._move(memories)
        self._reducer.begin(0.0, self.divisor)
        used = self._reducer.finish(self._fill_with_nothing)
        self._sparse.reduce(0.0, self.divisor)
        weight = self._sparse.weight or self._reducer.weight
        for number in used:
            self._parameters[number].grad = self._views[number]
        self._end_round()
        return weight

    def _finish(self) -> None:
        """End the round: all that is not on its way is sent, and everything waited for."""
        self._end = _none
        parameters, touched = self._parameters, self._touched
        late = [n for n in self._reducer.late if n in touched and parameters[n].grad is not None]
        self._bring_in(late)
        self._reducer.set_ready(late)
        used = self._reducer.finish(self._fill)
        for number in used:
            parameters[number].grad = self._views[number]
        for number, gradient in self._kept.items():
            if number not in used:
                parameters[number].grad.copy_(gradient)
        self._sparse.reduce(self._weight, self.divisor)
        self._log_unused(used)
        self._touched.clear()
        self._kept.clear()
        self._is_open = False
        self._end_round()

    def _end_round(self) -> None:
        self.num_rounds += 1
        if self._is_first:
            self._is_first = False
            self._learn_order()
        self.after_round(self.num_rounds)

    def _fill(self, number: int) -> bool:
        """Put into its view what an unready leaf contributes: what it has, or nothing."""
        gradient, is_touched = self._parameters[number].grad, number in self._touched
        if gradient is None:
            return self._fill_with_nothing(number)
        if not is_touched:  # the mean of equal numbers need not be that number
            self._kept[number] = gradient.clone()
        self._bring_in([number])
        return is_touched

    def _fill_with_nothing(self, number: int) -> bool:
        self._views[number].zero_()
        return False

    def _bring_in(self, numbers: Iterable[int]) -> None:
        """Put gradients into their buckets, unless they are there."""
        views, gradients = [], []
        for number in numbers:
            gradient, view = self._parameters[number].grad, self._views[number]
            if gradient is not view:
                if gradient.requires_grad or gradient.layout is not torch.strided:
                    raise self._refuse(number, gradient)
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)
            self.num_copies += len(views)

    def _refuse(self, number: int, gradient: torch.Tensor) -> ferrodist.DistributedError:
        if gradient.requires_grad:
            return ferrodist.InvalidArgument(
                f"DDP: backward(create_graph=True) made a gradient of {self._name(number)} that "
                "has a graph of its own; means over ranks have none. Compute higher derivatives "
                "with torch.autograd.grad on the module inside, or within no_sync()"
            )
        return ferrodist.UnsupportedArray(
            f"DDP: the gradient of {self._name(number)} is {gradient.layout}; make it dense, or "
            "use an Embedding or EmbeddingBag that has sparse=True when it is wrapped"
        )

    def _learn_order(self) -> None:
        """Lay the buckets out anew, in the order in which rank 0 has got its gradients."""
        order = ferrodist.broadcast_object(list(self._fired), self._backend)
        rest = set(range(len(self._parameters))).difference(order)
        self._reducer.use_order([*order, *sorted(rest, reverse=True)])
        old = self._views
        self._find_views()
        for parameter, before, view in zip(self._parameters, old, self._views, strict=True):
            view.copy_(before)
            if parameter.grad is before:
                parameter.grad = view
        self._early = {*order, *rest}.difference(self._often, self._reducer.late)

    def _find_views(self) -> None:
        """Learn where every gradient has its part of a bucket."""
        known = {memories.bucket: memories for memories in self._memories}
        buckets = self._reducer.buckets
        self._memories = [known.get(bucket) or Memories(bucket) for bucket in buckets]
        self._views = [self._reducer.view(number) for number in range(len(self._parameters))]

    def _move(self, memories: Memories) -> None:
        """Give a bucket other memory: the program still holds gradients in the old."""
        memories.change()
        for number, view in memories.bucket.views.items():
            self._views[number] = view

    def _log_unused(self, used: AbstractSet[int]) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            mine = [self._name(n) for n in sorted(used - self._touched)]
            nobodys = [self._name(n) for n in range(len(self._parameters)) if n not in used]
            if mine or nobodys:
                text = "rank %d: DDP, step %d: unused on this rank alone: %s; on every rank: %s"
                logger.debug(text, self._backend.rank, self.num_rounds + 1, mine, nobodys)

    def _name(self, number: int) -> str:
        return self._reducer.leaves[number].name


def _leaf_of(name: str, parameter: torch.nn.Parameter) -> GradientSpec:
    """Describe a gradient, in the layout that autograd wants it in."""
    is_turned = is_dense(parameter) and not parameter.is_contiguous()
    strides = parameter.stride() if is_turned else None
    return GradientSpec(
        name, tuple(parameter.shape), parameter.dtype, parameter.element_size(), strides
    )
