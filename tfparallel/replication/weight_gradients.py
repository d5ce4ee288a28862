"""The gradients of the weights that a replicated call reads: what a tape finds, and their sums.

| a replica has | its tape finds | the caller's tape gets |
| --- | --- | --- |
| a copy | a term of the sum | the sum; zero where the optimizer is to sum |
| a share | the sum, where the weight was gathered (`gathers.py`) | the gradient of each share |
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives import indexed_slices
from tfparallel.collectives.reducer import Reducer
from tfparallel.extend import attach
from tfparallel.replication import state
from tfparallel.replication.gathers import Gathers
from tfparallel.replication.row_sums import Sums
from tfparallel.seams.keras import storage_of
from tfparallel.strategies import variables
from tfparallel.update.pending import PendingSums
from tfparallel.variables.sharded import ShardedVariable

__all__ = ["WeightGradients"]


class WeightGradients:
    """The gradients of what a layer trains.

    Args:
        layer: The layer that is called.
        call: What calls it, with its arguments.
        strategy: Whose replicas call it.
        pending: Where terms may be left for the optimizer to sum; None for nowhere.

    Attributes:
        gathers: What joins weights of which each replica has a share.
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
        self.gathers = Gathers(strategy)

    @property
    def _whole(self) -> list[keras.Variable]:
        return [v for v in self._trained if not isinstance(v, ShardedVariable)]

    def add_read(self, tape: tf.GradientTape) -> list[tf.Tensor]:
        """Adds the weights of other layers that the call of this one has read.

        A function that computes with the table of another layer, say, in a `Lambda`.

        Args:
            tape: A replica's.

        Returns:
            What the caller's tape knows them by.
        """
        model = getattr(self._layer, "_model_of_step", lambda: None)()
        if model is None:
            return []
        read = {id(variable) for variable in tape.watched_variables()}
        held = set(map(id, self._trained))
        others = [
            variable
            for variable in model.trainable_variables
            if id(variable) not in held
            if not read.isdisjoint(map(id, _known_by(variable)))
        ]
        self._trained += others
        return self._sources_of(others)

    def sources(self) -> list[tf.Tensor]:
        """What the caller's tape knows the weights by: of a sharded one, its shares."""
        return self._sources_of(self._trained)

    def _sources_of(self, weights: Sequence[keras.Variable]) -> list[tf.Tensor]:
        found = []
        for variable in weights:
            is_sharded = isinstance(variable, ShardedVariable)
            for held in variable.pieces if is_sharded else [variable.value]:
                with tf.device(held.device):
                    found.append(tf.convert_to_tensor(held))
        return found

    def held(self, replica: int) -> list[tf.Variable]:
        """What a replica of this process has of each weight."""
        return [variables.copies(variable)[replica] for variable in self._trained]

    def check(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
        """Raises for gradients of what a replica has that nobody would sum."""
        for variable, gradient in zip(self._trained, gradients, strict=True):
            if isinstance(variable, ShardedVariable):
                self.gathers.check(variable, gradient)

    def totals(
        self, by_weight: Sequence[Sequence], beside: Sequence[tf.Tensor], arguments: Any
    ) -> tuple[list, list[tf.Tensor]]:
        """Σ_k g_k: over the replicas here, then over the workers.

        Args:
            by_weight: Of each weight what the replicas' tapes have found.
            beside: Sums of this worker that travel with the gradients.
            arguments: Of the call.

        Returns:
            The gradients of the sources; and what was summed beside.
        """
        pairs = list(zip(self._trained, by_weight, strict=True))
        terms = [own for variable, own in pairs if not isinstance(variable, ShardedVariable)]
        found, beside = self._totals_of_whole(terms, beside, arguments)
        totals, results = iter(found), []
        for variable, own in pairs:
            is_sharded = isinstance(variable, ShardedVariable)
            results += own if is_sharded else [next(totals)]
        return results, beside

    def _totals_of_whole(self, by_weight, beside, arguments):
        for variable, terms in zip(self._whole, by_weight, strict=True):
            for term in terms:
                # TensorFlow does not know that of every gradient (of `einsum`, say, for a batch of
                # any size), and what has no size in the graph is padded, and never compressed.
                if isinstance(term, tf.Tensor):
                    term.set_shape(variable.shape)
        pending = self._pending
        left = [pending is not None and pending.takes(terms) for terms in by_weight]
        pairs = zip(by_weight, left, strict=True)

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
            if left[i]:
                pending.add(variable, terms)
                totals[i] = tf.zeros_like(variable.value)
        return totals, beside

    def begin_backward(self, arguments: Any) -> None:
        """Tells that the replicas' tapes look for gradients from here on.

        Args:
            arguments: Of the call.
        """

        def kinds_of(variable, reading):
            of_all = zip(self._trained, self._kinds_of_readings(arguments), strict=True)
            (kinds,) = [found for trained, found in of_all if trained is variable]
            return None if kinds is None else kinds[reading]

        self.gathers.begin_backward(kinds_of)

    def _kinds_of_readings(self, arguments) -> list:
        """By weight, where no graph is traced; else a gradient itself tells."""
        if not tf.executing_eagerly():
            return [None] * len(self._trained)
        trained = list(map(id, self._trained))  # Others, once a layer is frozen.
        known, kinds = getattr(self._layer, "_kinds_of_readings", (None, None))
        if known != trained:

            def call(arguments):
                with state.ReplicaScope(0):
                    found = self._call(*arguments[0], **arguments[1])
                return found.tensors if isinstance(found, Sums) else found

            weights = [
                v if isinstance(v, ShardedVariable) else variables.copies(v)[0]
                for v in self._trained
            ]
            kinds = indexed_slices.kinds_of(call, arguments, weights)
            attach(self._layer, _kinds_of_readings=(trained, kinds))
        return kinds


def _known_by(variable: keras.Variable) -> list[tf.Variable]:
    """By what a tape notes that a replica has read a weight: its copies, or what holds them."""
    share = variable.share if isinstance(variable, ShardedVariable) else variable
    return [storage_of(share), *variables.copies(share)]
