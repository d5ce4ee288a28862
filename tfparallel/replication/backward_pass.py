"""The backward pass of a replicated call, which tapes can differentiate again.

    the call              x_k, θ            ──▶  y_k, joined;  s_k, summed over the replicas
    its backward pass     x_k, θ, ẏ_k, ṡ    ──▶  ẋ_k, joined;  θ̇_k, summed
    and that one's        x_k, θ, ẏ_k, ṡ, … ──▶  again rows, and sums

A loss of forces, the residual of a differential equation and a gradient penalty contain gradients.
Each pass has the form of the call: every replica computes rows, and terms of sums, from its rows
and its copies of the weights. So one function serves all orders. The tape of a replica, which
recorded the call, also records its own gradients if a tape of the caller may ask for more.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf

from tfparallel.piece import Piece, working_on
from tfparallel.replication.dummy_rows import zeros_without_rows
from tfparallel.replication.weight_gradients import WeightGradients
from tfparallel.seams.tapes import recording_on
from tfparallel.seams.tensorflow import is_recording, needs_gradient
from tfparallel.strategies.replica_trace import ReplicaTrace
from tfparallel.tracing.custom_gradient import call_with_gradient, is_differentiable

Tensors = list[tf.Tensor | None]


class _Replica(Protocol):
    """What a replica keeps of its call."""

    piece: Piece
    tape: tf.GradientTape
    inputs: list[tf.Tensor]


class Pass(NamedTuple):
    """A forward or backward pass of all replicas.

    Attributes:
        computed: What each replica computed; None where there is no gradient.
        per_example: For each result, how many rows of it an example has; None for a sum, of which
            the replicas have terms, and if there is a single replica.
        sources: The tensors that the caller's tape knows: inputs, weights, and gradients that
            earlier passes took.
        taken: Each replica's part of these gradients.
        per_example_taken: As `per_example`, for each of these gradients.
    """

    computed: Sequence[Tensors]
    per_example: Sequence[int | tf.Tensor | None]
    sources: list[tf.Tensor]
    taken: Sequence[Tensors]
    per_example_taken: Sequence[int | tf.Tensor | None]


class BackwardPasses:
    """The backward passes of one replicated call.

    Args:
        name: The layer's name, for errors.
        replicas: For each local replica its piece, the persistent tape of its call, and its rows of
            the differentiable inputs; traced, like `trace`.
        arguments: The arguments of the call, for the whole batch.
        shards_here: The rows of each local replica.
        trace: The trace of the call.
        weights: The gradients of the weights.
        joined: Joins a tensor's rows of all replicas, given how many of them an example has.
        summed: Sums tensors over the workers.
    """

    def __init__(
        self,
        name: str,
        replicas: Sequence[_Replica],
        arguments: tuple,
        pieces_here: Sequence[Piece],
        trace: ReplicaTrace,
        weights: WeightGradients,
        joined: Callable[[Sequence[tf.Tensor | None], int | tf.Tensor], tf.Tensor | None],
        summed: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ):
        self._name, self._replicas, self._arguments = name, replicas, arguments
        self._pieces, self._trace, self._weights = pieces_here, trace, weights
        self._joined, self._summed = joined, summed
        self._num_inputs = len(replicas[0].inputs)

    def gradients(
        self,
        step: Pass,
        upstream: Sequence[tf.Tensor | None],
        needed: Sequence[bool],
        beside: Sequence[tf.Tensor] = (),
    ) -> tuple[list, list[tf.Tensor]]:
        """Differentiates a pass.

        Args:
            step: The pass.
            upstream: The gradients of its results; None if there is none.
            needed: Whether the caller needs the gradient of each source that is no weight.
            beside: Sums of this worker that travel with the gradients of the weights.

        Returns:
            The gradients of the sources, and the totals of `beside`.

        Raises:
            ValueError: If a result cannot be differentiated.
        """
        if not is_recording():
            results, beside, _ = self._differentiated(step, upstream, needed, beside, again=False)
            return results, beside
        upstream = [None if dy is None else tf.convert_to_tensor(dy) for dy in upstream]
        taken = [dy for dy in upstream if dy is not None]
        results, totals, places = [], [], []

        def function(*_):
            of_sources, total, after = self._differentiated(
                step, upstream, needed, beside, again=True
            )
            results.extend(of_sources)
            totals.extend(total)
            places.extend(place for place, each in enumerate(results) if each is not None)
            dense = [_values(results[place]) for place in places]

            def backward(*second):
                gradients: Tensors = [None] * len(results)
                for place, gradient in zip(places, second, strict=True):
                    gradients[place] = gradient
                return self.gradients(after, gradients, needed_again)[0]

            return dense, backward

        # Tapes that have ended by now ask for no gradient of a gradient.
        needed_again = [needs_gradient([each]) for each in (*self._without_weights(step), *taken)]
        sources = [*step.sources, *taken]
        name = "gradient of a replicated call"
        recorded = call_with_gradient(name, function, sources, only_by_tapes=True)
        for place, value in zip(places, recorded, strict=True):
            if isinstance(results[place], tf.IndexedSlices):
                slices = results[place]
                value = tf.IndexedSlices(value, slices.indices, slices.dense_shape)
            results[place] = value
        return results, totals

    def _without_weights(self, step: Pass) -> list[tf.Tensor]:
        first_taken = len(step.sources) - len(step.taken[0])
        return [*step.sources[: self._num_inputs], *step.sources[first_taken:]]

    def _differentiated(self, step, upstream, needed, beside, again) -> tuple[list, list, Pass]:
        """The gradients of the sources, the totals of `beside`, and this pass."""
        self._check(step, upstream)
        present = [place for place, dy in enumerate(upstream) if dy is not None]
        seeds = [
            [piece.rows(upstream[place], step.per_example[place]) for place in present]
            for piece in self._pieces
        ]
        num_inputs = self._num_inputs

        def on_replica(k, seeds):
            replica = self._replicas[k]
            piece, tape = replica.piece, replica.tape
            pairs = [
                (step.computed[k][place], seed) for place, seed in zip(present, seeds, strict=True)
            ]
            pairs = [pair for pair in pairs if is_differentiable(pair[0])]
            sources = [*replica.inputs, *self._weights.variables_read(k), *step.taken[k]]
            entered = recording_on(tape) if again else contextlib.nullcontext()
            with working_on(piece), entered:
                if again:
                    tape.watch(seeds)
                gradients = tape.gradient(
                    [target for target, _ in pairs], sources, [seed for _, seed in pairs]
                )
                for place in range(num_inputs):
                    if gradients[place] is not None:
                        rows = tf.convert_to_tensor(gradients[place])
                        gradients[place] = piece.without_dummy_row(rows, 1)
                end = len(gradients) - len(step.taken[k])
                of_weights = self._weights.of_its_rows(piece, gradients[num_inputs:end])
                of_taken = zeros_without_rows(piece, gradients[end:])
            self._weights.check(of_weights)
            return [*gradients[:num_inputs], *of_weights, *of_taken], seeds

        self._weights.begin_backward(self._arguments)
        results = self._trace.run(on_replica, range(len(self._pieces)), seeds)
        gradients = [of_replica for of_replica, _ in results]
        by_source = list(zip(*gradients, strict=True))
        by_input = by_source[:num_inputs]
        by_taken = by_source[len(by_source) - len(step.taken[0]) :]
        by_weight = by_source[num_inputs : len(by_source) - len(by_taken)]
        needed = iter(needed)
        of_inputs = [self._joined(rows, 1) if next(needed) else None for rows in by_input]
        of_weights, beside = self._weights.totals(by_weight, beside, self._arguments, at_once=again)
        of_taken = self._totals_of_taken(by_taken, step.per_example_taken, list(needed))
        taken_now = [step.per_example[place] for place in present]
        after = Pass(
            [
                [
                    *of_replica[:num_inputs],
                    *self._weights.terms(by_weight, k),
                    *of_replica[len(of_replica) - len(by_taken) :],
                ]
                for k, of_replica in enumerate(gradients)
            ],
            [*[1] * num_inputs, *[None] * len(of_weights), *step.per_example_taken],
            [*step.sources, *(upstream[place] for place in present)],
            [[*earlier, *seeds] for earlier, (_, seeds) in zip(step.taken, results, strict=True)],
            [*step.per_example_taken, *taken_now],
        )
        return [*of_inputs, *of_weights, *of_taken], beside, after

    def _totals_of_taken(self, by_taken, numbers, needed) -> Tensors:
        """The gradients of what earlier passes took."""
        totals: Tensors = [None] * len(by_taken)
        terms = {}
        for place, parts in enumerate(by_taken):
            if not needed[place] or parts[0] is None:
                continue
            parts = [tf.convert_to_tensor(part) for part in parts]
            if numbers[place] is not None:
                totals[place] = self._joined(parts, numbers[place])
            else:
                terms[place] = tf.add_n(parts)
        for place, total in zip(terms, self._summed(list(terms.values())), strict=True):
            totals[place] = total
        return totals

    def _check(self, step: Pass, upstream) -> None:
        for computed, dy in zip(step.computed[0], upstream, strict=True):
            if dy is not None and computed is None:
                raise ValueError(
                    "Cannot differentiate the gradient of a weight that is sharded over the "
                    "replicas, or of an embedding's rows. A loss of gradients of the inputs, or "
                    "of other weights, is required. Received: a gradient of a gradient, in a call "
                    f"of '{self._name}'. Use `shard='optimizer'`, or leave this weight out of the "
                    "penalty."
                )


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
