"""The gradients of the weights that a replicated call reads, and their sums over the replicas.

| a replica has | its tape returns | the caller's tape gets |
| --- | --- | --- |
| a copy | a term of the sum | the sum; zero if the optimizer sums later |
| a share | the sum, computed at the gather (`gathers.py`) | the gradient of each share |
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives import indexed_slices
from tfparallel.collectives.reducer import Reducer
from tfparallel.extend import attach
from tfparallel.piece import Piece
from tfparallel.replication import state
from tfparallel.replication.dummy_rows import Gradient, zeros_without_rows
from tfparallel.replication.gathers import Gathers, between_replicas
from tfparallel.replication.row_sums import Sums
from tfparallel.seams.keras import storage_of
from tfparallel.strategies import variables
from tfparallel.update.pending_sums import PendingSums
from tfparallel.variables.sharded import ShardedVariable


class WeightGradients:
    """The gradients of the trained weights of a layer.

    Args:
        layer: The layer to call.
        call: Calls the layer with its arguments.
        strategy: The strategy of the replicas.
        pending: Takes terms for the optimizer to sum later; None to sum all terms at once.

    Attributes:
        gathers: Gathers the weights that are sharded over the replicas.
    """

    def __init__(
        self,
        layer: keras.Layer,
        call: Callable[..., Any],
        strategy,
        pending: PendingSums | None,
    ):
        self._layer, self._call, self._strategy, self._pending = layer, call, strategy, pending
        self._trained = [variable for variable in layer.variables if variable.trainable]
        self.gathers = Gathers(between_replicas)

    @property
    def _whole(self) -> list[keras.Variable]:
        return [v for v in self._trained if not isinstance(v, ShardedVariable)]

    def add_read(self, tape: tf.GradientTape) -> list[tf.Tensor]:
        """Adds the weights of other layers that the layer's call has read.

        For example, a `Lambda` may compute with the embedding table of another layer.

        Args:
            tape: The tape of a replica.

        Returns:
            The tensors that the caller's tape knows these weights by.
        """
        model = getattr(self._layer, "_model_of_step", lambda: None)()
        if model is None:
            return []
        watched = {id(variable) for variable in tape.watched_variables()}
        trained = set(map(id, self._trained))
        others = [
            variable
            for variable in model.trainable_variables
            if id(variable) not in trained
            if not watched.isdisjoint(map(id, _known_by(variable)))
        ]
        self._trained += others
        return self._sources_of(others)

    def sources(self) -> list[tf.Tensor]:
        """The tensors that the caller's tape knows the weights by: the shares of a sharded one."""
        return self._sources_of(self._trained)

    def _sources_of(self, weights: Sequence[keras.Variable]) -> list[tf.Tensor]:
        sources = []
        for variable in weights:
            is_sharded = isinstance(variable, ShardedVariable)
            for piece in variable.pieces if is_sharded else [variable.value]:
                with tf.device(piece.device):
                    sources.append(tf.convert_to_tensor(piece))
        return sources

    def variables_read(self, replica: int) -> list[tf.Variable]:
        """A local replica's copy or share of each weight."""
        return [variables.copies(variable)[replica] for variable in self._trained]

    def of_its_rows(self, piece: Piece, gradients: Sequence[Gradient]) -> list[Gradient]:
        """A replica's gradients: zeros if it computes only a dummy row.

        Those of shares are sums over all replicas, and stay as they are.

        Args:
            piece: Its rows.
            gradients: What its tape returns for each weight.
        """
        is_whole = [not isinstance(variable, ShardedVariable) for variable in self._trained]
        selected = iter(zeros_without_rows(piece, list(itertools.compress(gradients, is_whole))))
        return [
            next(selected) if whole else each
            for whole, each in zip(is_whole, gradients, strict=True)
        ]

    def check(self, gradients: Sequence[Gradient]) -> None:
        """Raises for gradients of shares that would not be summed."""
        for variable, gradient in zip(self._trained, gradients, strict=True):
            if isinstance(variable, ShardedVariable):
                self.gathers.check(variable, gradient)

    def totals(
        self,
        by_weight: Sequence[Sequence],
        beside: Sequence[tf.Tensor],
        arguments: Any,
        *,
        at_once: bool = False,
    ) -> tuple[list, list[tf.Tensor]]:
        """Returns Σ_k g_k, over the local replicas, then over the workers.

        Args:
            by_weight: For each weight, the gradients of the replicas' tapes.
            beside: Sums of this worker that travel with the gradients.
            arguments: The arguments of the call.
            at_once: Whether to leave no terms to the optimizer: a tape may use these gradients for
                something else than the update.

        Returns:
            The gradients of the sources, and the totals of `beside`.
        """
        pairs = list(zip(self._trained, by_weight, strict=True))
        terms = [terms for variable, terms in pairs if not isinstance(variable, ShardedVariable)]
        pending = None if at_once else self._pending
        whole_totals, beside = self._totals_of_whole(terms, beside, arguments, pending)
        totals, results = iter(whole_totals), []
        for variable, terms in pairs:
            is_sharded = isinstance(variable, ShardedVariable)
            results += terms if is_sharded else [next(totals)]
        return results, beside

    def terms(self, by_weight: Sequence[Sequence], replica: int) -> list[tf.Tensor | None]:
        """A replica's terms of the totals; None where a total is no sum of dense terms."""
        terms = []
        for variable, of_replicas in zip(self._trained, by_weight, strict=True):
            if isinstance(variable, ShardedVariable):
                terms += [None] * len(of_replicas)
            else:
                term = of_replicas[replica]
                terms.append(term if isinstance(term, tf.Tensor) else None)
        return terms

    def _totals_of_whole(self, by_weight, beside, arguments, pending):
        for variable, terms in zip(self._whole, by_weight, strict=True):
            for term in terms:
                # TensorFlow does not know the shape of every gradient (such as that of `einsum` for
                # a batch of any size). Tensors of unknown size are padded, and never compressed.
                if isinstance(term, tf.Tensor):
                    term.set_shape(variable.shape)
        is_pending = [pending is not None and pending.takes(terms) for terms in by_weight]
        pairs = zip(by_weight, is_pending, strict=True)

        def kinds_of_whole():
            kinds = zip(self._trained, self._kinds_of_readings(arguments), strict=True)
            return [kind for v, kind in kinds if not isinstance(v, ShardedVariable)]

        totals, beside = Reducer(self._strategy.all_reduce_ops, self._strategy.workers).totals(
            [[None] if is_left else terms for terms, is_left in pairs],
            kinds_of_whole,
            beside,
            self._whole,
        )
        for i, (variable, terms) in enumerate(zip(self._whole, by_weight, strict=True)):
            if is_pending[i]:
                totals[i] = pending.add(variable, terms)
        return totals, beside

    def begin_backward(self, arguments: Any) -> None:
        """Marks the start of the backward passes of the replicas.

        Args:
            arguments: The arguments of the call.
        """

        def kinds_of(variable, reading):
            pairs = zip(self._trained, self._kinds_of_readings(arguments), strict=True)
            (kinds,) = [kinds for trained, kinds in pairs if trained is variable]
            return None if kinds is None else kinds[reading]

        self.gathers.begin_backward(kinds_of)

    def _kinds_of_readings(self, arguments) -> list:
        """The kinds of each weight's readings in an eager step; in a graph, all None."""
        if not tf.executing_eagerly():
            return [None] * len(self._trained)
        trained = list(map(id, self._trained))  # Changes when a layer is frozen.
        ids_of_kinds, kinds = getattr(self._layer, "_kinds_of_readings", (None, None))
        if ids_of_kinds != trained:

            def call(arguments):
                with state.ReplicaScope(0):
                    outputs = self._call(*arguments[0], **arguments[1])
                return outputs.tensors if isinstance(outputs, Sums) else outputs

            weights = [
                v if isinstance(v, ShardedVariable) else variables.copies(v)[0]
                for v in self._trained
            ]
            kinds = indexed_slices.kinds_of(call, arguments, weights)
            attach(self._layer, _kinds_of_readings=(trained, kinds))
        return kinds


def _known_by(variable: keras.Variable) -> list[tf.Variable]:
    """The variables by which a tape records that a replica read a weight: its copies or storage."""
    share = variable.share if isinstance(variable, ShardedVariable) else variable
    return [storage_of(share), *variables.copies(share)]
