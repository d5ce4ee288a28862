"""Spreads the inference calls of `evaluate` and `predict` over the replicas.

Each replica of each worker passes its share of the rows through its own stages. The outputs are
joined on the loss's device, in order, with their masks and the logits behind them. A model that
mixes rows or changes a state runs on the first replica alone.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.compute_context import within
from tfparallel.data.partition import row_ranges
from tfparallel.extend import attach
from tfparallel.judge.check_rows import keeps_number_of_rows, why_not_in_pieces
from tfparallel.piece import Piece, for_replicas, of_known_number, working_on
from tfparallel.pipeline.allowed_writes import other_writes
from tfparallel.pipeline.gathers import MeshGathers
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.problems import PlacementError
from tfparallel.replication.inputs import BatchInputs
from tfparallel.replication.replicated_call import checked_output
from tfparallel.seams.keras import clear_losses, mask_of, set_mask
from tfparallel.step.logits import logits_of, output_of, sources_of
from tfparallel.step.row_counts import rows_of_examples
from tfparallel.strategies.replica_trace import MeshTrace
from tfparallel.user_log import notice
from tfparallel.variables.mesh_replica import replicas_of

_IN_BOLD = re.compile(r"\x1b\[1m(.*?)\x1b\[0m", re.DOTALL)


class _Inference(keras.StatelessScope):
    """Collects the losses that layers add in `losses`; refuses each write."""

    def __init__(self):
        super().__init__(collect_losses=True)

    def add_update(self, update) -> None:
        variable, _ = update
        raise PlacementError(f"'{variable.path}' is written during inference, once in each replica")


class _ReplicaOutputs(NamedTuple):
    """The results of a call in one replica."""

    structure: Any
    logits: list
    sources: list[list[tf.Tensor]]
    masks: list[tf.Tensor | None]
    per_example: list[Any]
    losses: list[tf.Tensor]


class SpreadCall:
    """Extends a model with several replicas.

    A step of `evaluate` or `predict` spreads its first call of the model: Keras's own steps make
    one. Further calls, in a user's own step, run on the first replica.
    """

    _spreads_next = False  # Whether to spread the next call.
    _can_spread = True

    def __call__(self, *args, **kwargs):
        """Calls the model; within a step of `evaluate` or `predict`, on all replicas."""
        if not self._spreads_next:
            return super().__call__(*args, **kwargs)
        attach(self, _spreads_next=False)
        call, others = super().__call__, Others(self._layout.mesh.data, self._workers)
        try:
            if self.check_rows and others.num_replicas > 1:
                reason = why_not_in_pieces(self, call, args, kwargs)
                if reason is not None:
                    raise PlacementError(reason)
            outputs, losses = self._on_replicas(call, args, kwargs, others)
        except ValueError as error:  # If the program is at fault, Keras raises its own error below.
            attach(self, _can_spread=False)
            if self._is_chief:
                wrapped = _IN_BOLD.search(str(error))  # Keras formats errors of a layer's call so.
                reason = (wrapped[1] if wrapped else str(error)).partition(". ")[0]
                notice(f"Model '{self.name}' is evaluated only on the first replica: {reason}.")
            return call(*args, **kwargs)
        clear_losses(self)
        if losses:
            keras.Layer.add_loss(self, losses)  # A functional model refuses its own.
        return outputs

    @contextlib.contextmanager
    def _spreading(self) -> Iterator[None]:
        """Surrounds a step of `evaluate` or `predict`."""
        attach(self, _spreads_next=self._can_spread and self._layout.mesh.data > 1)
        try:
            yield
        finally:
            attach(self, _spreads_next=False)

    def _on_replicas(
        self, call: Callable, args: tuple, kwargs: dict, others: Others
    ) -> tuple[Any, list[tf.Tensor]]:
        """Returns the outputs of the whole batch, and the losses that layers added.

        Args:
            call: The model's own `__call__`.
            args: Its arguments; tensors are `(batch, …)`.
            kwargs: Its keyword arguments; tensors are `(batch, …)`.
            others: The replicas of all workers.
        """
        replicas = MeshTrace(replicas_of(self._layout), others.first_replica)
        inputs, gathers = BatchInputs(args, kwargs), MeshGathers(replicas)
        number = others.num_replicas
        all_pieces = [
            Piece(k, number, start, size, inputs.num_rows)
            for k, (start, size) in enumerate(row_ranges(inputs.num_rows, number))
        ]
        own_pieces = others.local(all_pieces)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = 0 if graph is None else len(graph.get_operations())

        def on_replica(piece, rows):
            own_args, own_kwargs = inputs.pack(rows)
            gathers.begin()
            with working_on(piece), within(gathers=gathers), _Inference() as scope:
                structure = call(*own_args, **own_kwargs)
            outputs = [checked_output(self, o) for o in keras.tree.flatten(structure)]
            logits = list(map(logits_of, outputs))
            sources = list(map(sources_of, outputs, logits))
            masks = list(map(mask_of, outputs))
            numbers = rows_of_examples(self, outputs, piece)
            losses = [loss * piece.weight(loss.dtype) for loss in scope.losses]
            return _ReplicaOutputs(structure, logits, sources, masks, numbers, losses)

        replica_pieces, parts = for_replicas(own_pieces), inputs.split(own_pieces)
        results = replicas.run(on_replica, replica_pieces, parts)
        writes = [] if graph is None else list(other_writes(graph, before))
        for op in [op for op in writes if op.name not in gathers.writes]:
            # Too late for another way: the step already contains these operations.
            raise RuntimeError(
                "A `tf.Variable` that a layer writes during inference is written once in each "
                "replica. Keras must track the variable; the model is then evaluated on one "
                f"replica. Received: {op.type} '{op.name}' in model '{self.name}'. Create it with "
                "`self.add_weight`."
            )
        with tf.device(self._last_device):

            def joined(parts, numbers):
                each = zip(own_pieces, parts, numbers, strict=True)
                rows = [piece.without_dummy_row(part, number) for piece, part, number in each]
                whole = others.joined(tf.concat(rows, 0), all_pieces, numbers[0])
                if not keeps_number_of_rows(self):
                    return whole
                return of_known_number(whole, inputs.num_rows, numbers[0])

            logits, sources, masks, numbers, losses = (
                [list(each) for each in zip(*(getattr(r, name) for r in results), strict=True)]
                for name in ("logits", "sources", "masks", "per_example", "losses")
            )
            flat = [
                output_of(
                    [joined(parts, number) for parts in zip(*of_all, strict=True)], of_output[0]
                )
                for of_all, of_output, number in zip(sources, logits, numbers, strict=True)
            ]
            for output, of_all, number in zip(flat, masks, numbers, strict=True):
                if of_all[0] is not None:
                    set_mask(output, joined(of_all, number))
            added = [tf.add_n(terms) for terms in losses]
            added = others.summed(added)
        return keras.tree.pack_sequence_as(results[0].structure, flat), added
