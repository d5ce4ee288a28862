"""One call of a layer, divided over the replicas, forward and backward.

              global batch x  (B, …)
        ┌───────────┼───────────┐          rows ⌊kB/N⌋ to ⌊(k+1)B/N⌋ to replica k
       x_0         x_1         x_2
        │ copy of θ │ copy of θ │ copy of θ
       y_0         y_1         y_2
        └───────────┼───────────┘          rows joined in order
              y  (B, …)                    ──▶  the loss J of the whole batch, once
              ∂J/∂y                        ◀──  the caller's tape
        ┌───────────┼───────────┐
     ∂J/∂y_0     ∂J/∂y_1     ∂J/∂y_2
        │           │           │          each replica's own backward pass
       g_0         g_1         g_2         g_k = (∂y_k/∂θ)ᵀ ∂J/∂y_k
        └────────── Σ ──────────┘          all-reduce: ∂J/∂θ = Σ_k g_k

∂J/∂y comes from the loss of the whole batch, so it includes the divisor of that loss: examples,
tokens under a mask, or a sum of weights. The sum over k is therefore exact for pieces of any size
and for any loss, even one that compares examples. A call that computes losses over its own rows
returns `Sums` instead of outputs (`per_replica_loss.py`), and receives 1/D in the backward pass. If
D follows from sizes, no worker waits for the others before its backward pass is done: the sums
travel with the gradients.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.packing import is_summable
from tfparallel.collectives.traffic import ROWS
from tfparallel.compute_context import within
from tfparallel.data import partition
from tfparallel.judge.check_rows import keeps_number_of_rows
from tfparallel.piece import Piece, for_replicas, of_known_number, times
from tfparallel.replication import state
from tfparallel.replication.backward_pass import BackwardPasses, Pass
from tfparallel.replication.inputs import BatchInputs, own_pieces
from tfparallel.replication.refusals import refuse_state
from tfparallel.replication.row_sums import Summed, Sums
from tfparallel.replication.weight_gradients import WeightGradients
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.seams.tensorflow import needs_gradient, recording
from tfparallel.step.logits import Logits, logits_of, output_of, sources_of
from tfparallel.step.row_counts import rows_of_examples
from tfparallel.strategies.replica_trace import ReplicaTrace
from tfparallel.tracing.custom_gradient import call_with_gradient, is_differentiable
from tfparallel.tracing.graphs import operations_here
from tfparallel.update.pending_sums import PendingSums


class _Replica(NamedTuple):
    """The results of one replica's forward pass."""

    piece: Piece
    tape: tf.GradientTape
    inputs: list[tf.Tensor]
    logits: list[Logits | None]  # One per output.
    sources: list[list[tf.Tensor]]  # The tensors to join for each output; its logits if known.
    per_example: list[Any]  # How many rows of each output an example has; None for a single piece.
    losses: list[tf.Tensor]
    sums: list[tf.Tensor]
    masks: list[tf.Tensor | None]
    scope: state.ReplicaScope
    structure: Any

    @property
    def joined(self) -> list[tf.Tensor]:
        """All tensors to join with the rows of the other replicas."""
        return list(itertools.chain(*self.sources))

    @property
    def per_example_joined(self) -> list[Any]:
        """How many rows of each of them an example has."""
        pairs = zip(self.per_example, self.sources, strict=True)
        return [number for number, tensors in pairs for _ in tensors]


class ReplicatedCall:
    """A call of `layer` whose rows are divided among the replicas of a strategy.

    Differentiable, as often as needed, in the layer's trainable variables and its floating-point
    inputs.

    Args:
        layer: The built layer whose variables the call reads.
        call: The layer's original `__call__`, unreplicated.
        strategy: The `tfparallel.MirroredStrategy` that the variables belong to.
        partial_gradients: If given, it takes this worker's terms of the gradients of some
            variables, which stay unsummed; the tape receives zeros for them.
        worker_rows: How many rows each worker has, if the arguments hold only this worker's: one
            scalar tensor per worker, equal on all workers.
        gathers: Whether to join the outputs with those of the other workers.
    """

    def __init__(
        self,
        layer: keras.Layer,
        call: Callable[..., Any],
        strategy,
        partial_gradients: PendingSums | None = None,
        worker_rows: Sequence[tf.Tensor] | None = None,
        gathers: bool = True,
    ):
        self._layer = layer
        self._call = call
        self._strategy = strategy
        self._worker_rows = worker_rows
        self._gathers = gathers
        self._gradients = WeightGradients(layer, call, strategy, partial_gradients)
        self._waiting: list[tf.Tensor] = []  # This worker's sums that travel with the gradients,
        self._arrived: list[tf.Tensor] | None = None  # and their totals after the backward pass.

    def __call__(self, args: tuple, kwargs: dict) -> tuple[Any, list[tf.Tensor]]:
        """Runs the call.

        Args:
            args: Positional arguments of the call, including tensors of shape `(batch, …)`.
            kwargs: Keyword arguments of the call.

        Returns:
            The outputs, each of shape `(batch, …)` or with several rows per example, of all
            workers' rows if `gathers`, or `Summed` for `Sums`; and the losses that layers added,
            each averaged over the replicas, weighted by their shares of the batch.

        Raises:
            ValueError: If the inputs disagree on the batch size, or an output has no batch axis.
        """
        may_be_empty = self._worker_rows is not None or self._strategy.place is not None
        inputs = BatchInputs(args, kwargs, may_be_empty=may_be_empty)
        self._refuse_lost_gradients(inputs.whole_floats)
        call_state = state.CallState(self._layer)
        pieces_here = own_pieces(self._strategy, inputs.num_rows, self._worker_rows)
        trace = ReplicaTrace(self._strategy)
        replicas: list[_Replica] = []

        def forward(*_):
            replicas.extend(self._forward(inputs, call_state, pieces_here, trace))
            with recording():  # The caller's tape only sees sources that exist on return.
                sources.extend(self._gradients.add_read(replicas[0].tape))
            joined = [tf.concat(rows, 0) for rows in _transposed(replicas, "joined")]
            terms = _transposed(replicas, "losses") + _transposed(replicas, "sums")
            sums = [tf.add_n(of_replicas) for of_replicas in terms]
            numbers = replicas[0].per_example_joined
            joined = self._gathered(joined, numbers, inputs.num_rows)
            joined = self._of_known_size(joined, numbers, inputs.num_rows)
            if self._may_wait(replicas[0]):
                self._waiting = sums
            results = joined + (self._waiting or self._summed(sums))
            return results, self._backward(replicas, inputs, pieces_here, trace, sources, needed)

        needed = [needs_gradient([tensor]) for tensor in inputs.floats]
        sources = inputs.floats + self._gradients.sources()
        name = f"replicated call of {self._layer.name}"
        results = call_with_gradient(name, forward, sources, only_by_tapes=True)
        scopes = [replica.scope for replica in replicas]
        is_training = getattr(self._layer, "_in_train_step", False)
        if is_training and self._layer._accumulates:
            refuse_state(self._layer, call_state.written(scopes, with_sums=False))
        call_state.combine(
            scopes,
            pieces_here,
            self._of_workers
            if self._strategy.place is None
            else functools.partial(refuse_state, self._layer),
            functools.partial(self._rows_of_workers, inputs.num_rows),
        )
        first = replicas[0]
        num_joined = len(first.joined)
        losses = results[num_joined : num_joined + len(first.losses)]
        joined = keras.tree.pack_sequence_as(first.sources, results[:num_joined])
        outputs = list(map(output_of, joined, first.logits))
        masks_of_all = _transposed(replicas, "masks")
        for output, masks, number in zip(outputs, masks_of_all, first.per_example, strict=True):
            if masks[0] is not None:
                mask = self._gathered([tf.concat(masks, 0)], [number], inputs.num_rows)
                (mask,) = self._of_known_size(mask, [number], inputs.num_rows)
                set_mask(output, mask)
        if isinstance(first.structure, Sums):
            sums = results[len(results) - len(first.sums) :]
            wait = bool(self._waiting)
            return Summed(sums, self._waited_for if wait else lambda: sums, wait, outputs), losses
        return keras.tree.pack_sequence_as(first.structure, outputs), losses

    def _forward(self, inputs: BatchInputs, call_state: state.CallState, pieces_here, trace):
        """Calls the layer on each replica, with its rows of the inputs."""
        parts = inputs.split(pieces_here)

        def on_replica(k, piece, part):
            float_rows = inputs.floats_of(part)
            self._gradients.gathers.begin()
            with (
                within(piece=piece, gathers=self._gradients.gathers),
                tf.GradientTape(persistent=True) as tape,
            ):
                tape.watch(float_rows)
                replica_args, replica_kwargs = inputs.pack(part)
                with call_state.inherited(), state.ReplicaScope(k) as scope:
                    structure = self._call(*replica_args, **replica_kwargs)
                is_summed = isinstance(structure, Sums)
                sums = structure.tensors if is_summed else []
                sums = [piece.if_it_has_rows(term) for term in sums]
                flat = structure.rows if is_summed else keras.tree.flatten(structure)
                outputs = [checked_output(self._layer, output) for output in flat]
                masks = [mask_of(output) for output in outputs]
                logits = [logits_of(output) for output in outputs]
                # A step that sums has checked that there is one row per example.
                numbers = [1] * len(outputs)
                if not is_summed:
                    numbers = rows_of_examples(self._layer, outputs, piece)
                sources = [
                    [piece.without_dummy_row(tensor, number) for tensor in sources_of(*pair)]
                    for *pair, number in zip(outputs, logits, numbers, strict=True)
                ]
                masks = [
                    None if mask is None else piece.without_dummy_row(mask, number)
                    for mask, number in zip(masks, numbers, strict=True)
                ]
                losses = [
                    piece.if_it_has_rows(loss * piece.weight(loss.dtype)) for loss in scope.losses
                ]
            return _Replica(
                piece,
                tape,
                float_rows,
                logits,
                sources,
                numbers,
                losses,
                sums,
                masks,
                scope,
                structure,
            )

        replica_pieces, before = for_replicas(pieces_here), len(operations_here())
        replicas = trace.run(on_replica, range(len(pieces_here)), replica_pieces, parts)
        with recording():
            self._refuse_lost_gradients(_captured_floats(operations_here()[before:]))
        inputs.take_off_masks(parts[0])
        return replicas

    def _refuse_lost_gradients(self, tensors: Iterable[tf.Tensor]) -> None:
        """Raises if a tape needs the gradient of a tensor that each replica takes unchanged."""
        for tensor in tensors:
            if needs_gradient([tensor]):
                raise ValueError(
                    "A scalar that depends on trained weights cannot be passed to a call that is "
                    "split across replicas: its gradient would be lost. A tensor of shape (batch, "
                    f"…) is required. Received: shape {tensor.shape}, in a call of "
                    f"'{self._layer.name}'. Let the layer own the weight, or apply the scalar to "
                    "the result of the call."
                )

    def _may_wait(self, replica: _Replica) -> bool:
        sums = replica.structure if isinstance(replica.structure, Sums) else Sums([])
        return (
            self._strategy.workers is not None
            and sums.may_wait
            and not replica.losses  # Any code may read the losses that layers add.
            and all(map(is_summable, sums.tensors))
        )

    def _waited_for(self) -> list[tf.Tensor]:
        """The sums over all workers, by a separate collective if no gradient carried them."""
        if self._arrived is None:
            self._arrived = self._summed(self._waiting)
        return self._arrived

    def _of_known_size(self, joined, numbers, num_rows):
        """Restores the static batch size that the rows lost (`Piece.rows_used`).

        Only for a known number of rows per example.
        """
        is_whole = self._gathers and self._worker_rows is None
        if not is_whole or not keeps_number_of_rows(self._layer):
            return joined
        pairs = zip(joined, numbers, strict=True)
        return [of_known_number(each, num_rows, number) for each, number in pairs]

    def _gathered(self, tensors, numbers, num_rows):
        """Joins this worker's rows with those of the other workers.

        Args:
            tensors: Rows of the outputs, or of what has as many.
            numbers: How many rows of each an example has.
            num_rows: How many examples the arguments of the call have.
        """
        workers = self._strategy.workers
        if workers is None or not self._gathers:
            return tensors
        examples = self._rows_of_workers(num_rows)
        results, remaining = list(tensors), range(len(tensors))
        while remaining:  # One collective for all that have the same number.
            number = numbers[remaining[0]]
            alike = [place for place in remaining if numbers[place] is number]
            remaining = [place for place in remaining if numbers[place] is not number]
            counts = [times(count, number) for count in examples]
            rows = workers.all_gather([tensors[place] for place in alike], counts, ROWS)
            for place, each in zip(alike, rows, strict=True):
                results[place] = each
        return results

    def _rows_of_workers(self, num_rows):
        """The number of rows of each worker."""
        return self._worker_rows or partition.rows_of_workers(self._strategy, num_rows)

    def _summed(self, tensors):
        """Sums over the workers."""
        if self._strategy.workers is None:
            return list(tensors)
        # Gathered, not all-reduced, to detect a lost worker at once.
        return [tf.reduce_sum(each, 0) for each in self._of_workers(tensors)]

    def _of_workers(self, tensors):
        """Stacks each tensor of all workers."""
        workers, rows = self._strategy.workers, [tf.expand_dims(each, 0) for each in tensors]
        return workers.all_gather(rows, [1] * workers.num_workers) if workers and rows else rows

    def _backward(self, replicas, inputs, pieces_here, trace, sources, needed):
        """Returns the function from the gradients of the results to those of the sources."""
        passes = BackwardPasses(
            self._layer.name, replicas, inputs.structure, pieces_here, trace, self._gradients,
            lambda rows, number: self._joined(rows, number, inputs.num_rows), self._summed,
        )  # fmt: skip
        first, none = replicas[0], [[] for _ in replicas]
        num_joined, num_sums = len(first.joined), len(first.losses) + len(first.sums)
        computed = [each.joined + each.losses + each.sums for each in replicas]
        forward = Pass(computed, first.per_example_joined + [None] * num_sums, sources, none, [])

        def backward(*upstream):
            if isinstance(first.structure, Sums):
                upstream = [None] * num_joined + list(upstream[num_joined:])
            results, beside = passes.gradients(forward, upstream, needed, self._waiting)
            if self._waiting:
                self._arrived = beside
            return results

        return backward

    def _joined(self, rows, number, num_rows):
        """Joins the rows of all replicas, if there are any."""
        if any(part is None for part in rows):
            return None
        joined = tf.concat(rows, 0)
        if self._worker_rows is not None:
            return joined
        return self._gathered([joined], [number], num_rows)[0]


def checked_output(layer: keras.Layer, output: tf.Tensor) -> tf.Tensor:
    """Returns an output that has rows; raises for any other."""
    if output is None:
        raise ValueError(
            f"Layer '{layer.name}' returns None, which cannot be joined across replicas. Tensors "
            "are required. Received: an output of None. Return only tensors, or train on one "
            "device."
        )
    if output.shape.rank == 0:
        raise ValueError(
            f"Cannot join the replicas' outputs of layer '{layer.name}': one of them is a scalar, "
            "and how to join it depends on whether it is a mean, a sum or a maximum over the "
            "examples. Outputs of shape (batch, …) are required. Received: an output of shape (). "
            "Return one value per example, or add a scalar with `self.add_loss`."
        )
    return output


def _captured_floats(operations: Sequence[tf.Operation]) -> Iterator[tf.Tensor]:
    """The differentiable tensors that operations take from outside."""
    inner = {op.name for op in operations}
    taken = {id(each): each for op in operations for each in op.inputs if each.op.name not in inner}
    return filter(is_differentiable, taken.values())


def _transposed(replicas, field):
    """Turns each replica's list of a field into lists over the replicas."""
    return list(zip(*[getattr(replica, field) for replica in replicas], strict=True))
