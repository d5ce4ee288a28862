"""A step of training: runs the replicas, and joins and sums their results.

Each replica follows the schedule (`schedule_executor.py`); the first one is traced, and replayed
for the others (`strategies/replica_trace.py`).

The gradient of a weight is Σ_d Σ_m g_dm; the optimizer updates once. The loss, the metrics and the
losses that layers add are those of the whole batch: the loss of each micro-batch has the batch's
divisor (`micro_batch_loss.py`), and the increments of metrics are summed, so outputs are not
joined. A metric that is not proved to allow this reads the joined rows of its output. If the loss
is not proved to allow it, all outputs are joined:

* "gpipe": the loss is computed once, from the joined outputs, between the forward and the backward
  passes; any loss works.
* "1f1b", "interleaved": as before, but checked against the loss of the joined outputs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.collectives import indexed_slices
from tfparallel.collectives.packing import is_summable
from tfparallel.piece import for_replicas
from tfparallel.pipeline.allowed_writes import sums_in_layers
from tfparallel.pipeline.batch_loss import ExtraLosses, WholeLoss, added_up, scale_of
from tfparallel.pipeline.batch_norm import write_averages
from tfparallel.pipeline.device_order import DeviceOrder
from tfparallel.pipeline.gradient_sums import GradientSums, totals
from tfparallel.pipeline.micro_batch_loss import check_equal
from tfparallel.pipeline.micro_batches import Batch, Joined
from tfparallel.pipeline.pass_context import StepMemory
from tfparallel.pipeline.pass_options import PassOptions
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.pipeline.schedule_executor import PassOutputs, ReplicaStep
from tfparallel.pipeline.stages import Values
from tfparallel.seams.keras import clear_losses
from tfparallel.step.one_step import PassResult
from tfparallel.step.row_counts import aligned
from tfparallel.step.where_rows_meet import of_the_batch
from tfparallel.strategies.replica_trace import MeshTrace
from tfparallel.strategies.variables import copies
from tfparallel.variables.mesh_replica import Replica
from tfparallel.variables.sharded import ShardedVariable


class Step:
    """One step, while it is traced (or run eagerly).

    Args:
        options: How to make the passes.
        replicas: The replicas of this process. Each has a copy of the weights and the same number
            of micro-batches.
        others: The total number of replicas, and the workers that have them.
        gradients_stay: Whether gradients are summed only over this process's replicas.

    Attributes:
        order: The ends and times of the instructions in the first replica.
    """

    order: DeviceOrder

    def __init__(
        self,
        options: PassOptions,
        replicas: Sequence[Replica],
        others: Others,
        *,
        gradients_stay: bool = False,
    ):
        self._options = options
        self._replicas = replicas
        self._others = others
        self._gradients_stay = gradients_stay

    def run(self, x, y, sample_weight) -> PassResult:
        """Runs the passes."""
        number = self._options.schedule.num_micro_batches
        if self._options.metrics is not None:
            y, sample_weight = aligned(x, y, sample_weight)
        self._batch = Batch(self._options.model, x, y, sample_weight, number, self._others)
        memory, trace = StepMemory(), MeshTrace(self._replicas, self._others.first_replica)
        sums = sums_in_layers(self._options.model, self._others.num_replicas)

        def on_replica(*of_replica):
            return ReplicaStep(self._options, memory, self._batch, trace, *of_replica).run()

        # Cut outside of the replicas' traces, where sizes are known.
        inputs = self._by_replica(map(self._batch.inputs_of, self._batch.local_pieces))
        targets = self._by_replica(map(self._batch.targets_of, self._batch.local_pieces))
        by_micro_batch = [for_replicas(self._batch.local_pieces[m::number]) for m in range(number)]
        results = trace.run(on_replica, inputs, targets, list(zip(*by_micro_batch, strict=True)))
        self.order = results[0].step.order
        for each in sums:
            each.combine(self._others)
        moments: dict[Any, list[tuple]] = {}
        for result in results:
            for key, seen in zip(results[0].step.moment_keys, result.moments, strict=True):
                moments.setdefault(key, []).extend(seen)
        write_averages(moments, self._others)
        if self._options.metrics is None:
            return self._from_joined(results, trace)
        return self._from_sums(results)

    def _from_joined(self, results: Sequence[PassOutputs], trace: MeshTrace) -> PassResult:
        """Computes the loss of the joined outputs; under "gpipe", the backward passes follow."""
        joined, extra = self._joined(results, self._batch.output_keys), self._extra(results)
        whole = self._whole_loss(joined, extra)
        loss_result = {"loss": whole.loss, "predictions": whole.predictions}
        if self._options.begins_joined:
            upstream = self._upstream(results, joined, whole)
            of_added = [whole.gradient(each) for each in extra.averages]
            results = trace.run(
                lambda step, of_outputs: step.run_back(of_outputs, of_added),
                [result.step for result in results],
                upstream,
            )
            gradients, _ = self._totals(results, extra, whole.gradient, whole=whole)
            return self._pass_result(gradients, **loss_result)
        gradients, _ = self._totals(results, extra, lambda _: scale_of(self._options.model))
        return self._pass_result(
            gradients, checked=self._checked(results, whole, extra), **loss_result
        )

    def _by_replica(self, iterable: Iterable[Any]) -> list[list[Any]]:
        """Groups the items of local micro-batches by replica."""
        items, number = list(iterable), self._options.schedule.num_micro_batches
        return [items[first : first + number] for first in range(0, len(items), number)]

    def _pass_result(self, gradients, **loss_result) -> PassResult:
        rows, trained = self._batch.num_rows, self._options.model._trained()
        return PassResult(num_rows=rows, variables=trained, gradients=gradients, **loss_result)

    def _on_loss_device(self):
        last_stage = len(self._options.stages) - 1
        return tf.device(self._options.devices[self._options.schedule.device_of(last_stage)])

    def _extra(self, results: Sequence[PassOutputs]) -> ExtraLosses:
        with self._on_loss_device():
            added = [terms for result in results for terms in result.added]
            return ExtraLosses(self._options.model, self._batch, added, self._others)

    def _joined(self, results: Sequence[PassOutputs], keys: Sequence[int]) -> list[Joined]:
        """Returns outputs of the whole batch; a model may return one tensor as several outputs."""
        values = _values(results)
        with self._on_loss_device():
            joined = {key: self._batch.joined(key, values) for key in dict.fromkeys(keys)}
        return [joined[key] for key in keys]

    def _whole_loss(self, joined: list[Joined], extra: ExtraLosses) -> WholeLoss:
        with self._on_loss_device():
            return WholeLoss(
                self._options.model,
                self._batch,
                joined,
                extra,
                differentiate=self._options.begins_joined,
            )

    def _upstream(self, results, joined: Sequence[Joined], whole: WholeLoss) -> list:
        """Returns the gradients of the loss, by replica, micro-batch and output key."""
        sources = {
            key: (source, output.per_example)
            for output in joined
            for key, source in output.sources.items()
        }
        pairs = [sources.get(key, (None, None)) for key in results[0].step.output_keys]
        with self._on_loss_device():
            gradients = [(whole.gradient(source), number) for source, number in pairs]
            return self._by_replica(
                [
                    None if gradient is None else self._batch.rows_of(piece, gradient, number)
                    for gradient, number in gradients
                ]
                for piece in self._batch.local_pieces
            )

    def _totals(
        self,
        results: Sequence[PassOutputs],
        extra: ExtraLosses,
        seed_of,
        beside=(),
        whole: WholeLoss | None = None,
    ):
        """Returns the gradients of the trainable weights, and the sums of `beside`."""
        trained, of_batch = self._options.model._trained(), GradientSums()
        extra.add_gradients(of_batch, seed_of)
        if whole is not None:
            whole.add_gradients(of_batch, self._others)
        return totals(
            [*(result.gradients for result in results), of_batch.of(trained)],
            trained,
            self._kinds_of_readings,
            self._others,
            beside,
            stay=self._gradients_stay,
        )

    def _kinds_of_readings(self) -> dict[int, Any]:
        """Returns kinds by weight id; in a graph, the gradient itself shows its kind."""
        if not tf.executing_eagerly():
            return {}

        def call(x):
            outputs = self._options.model(x, training=True)
            clear_losses(self._options.model)
            return outputs

        trained = self._options.model._trained()
        weights = [v if isinstance(v, ShardedVariable) else copies(v)[0] for v in trained]
        kinds = indexed_slices.kinds_of(call, self._batch.x, weights)
        pairs = zip(trained, kinds, strict=True)
        return {id(v): _of_any_read(k) if isinstance(v, ShardedVariable) else k for v, k in pairs}

    def _from_sums(self, results: Sequence[PassOutputs]) -> PassResult:
        """Returns the result if loss, gradients and metrics are sums over micro-batches."""
        batch, extra = self._batch, self._extra(results)
        with self._on_loss_device():
            shares = _sums_by_place([part.shares for each in results for part in each.parts])
            grown = _sums_by_place([each for result in results for each in result.growth])
        # A collective costs a wait: send these with the gradients if every transport sums them.
        beside = [*shares, *grown] if all(map(is_summable, grown)) else shares
        gradients, beside = self._totals(
            results, extra, lambda _: scale_of(self._options.model), beside
        )
        shares, grown = beside[: len(shares)], beside[len(shares) :] or self._others.summed(grown)
        with self._on_loss_device():
            values = _values(results)[0]
            outputs = [values[key] for key in batch.output_keys]
            loss = added_up(self._options.model, batch, shares, outputs, extra)
            types = batch.packed(of_the_batch(outputs, batch.num_rows))
        keys = [batch.output_keys[place] for place in self._options.metrics.places(types)]
        with self._on_loss_device():
            rows = [each.output() for each in self._joined(results, keys)]
        return self._pass_result(
            gradients,
            loss=loss,
            metrics=self._options.metrics,
            growth=grown,
            outputs=types,
            rows=rows,
            divisor=results[0].step.loss.divisor(),
            num_added=len(extra.losses),
        )

    def _checked(self, results, whole: WholeLoss, extra: ExtraLosses) -> list[tf.Operation]:
        """Returns an operation that fails unless the parts add up, before weights change."""
        parts = [part for result in results for part in result.parts]
        if not parts:
            return []
        with self._on_loss_device():
            terms = [*(part.loss for part in parts), *extra.losses]
            check = check_equal(terms, whole.loss, self._options.model.compute_dtype)
        return [] if check is None else [check]


def _of_any_read(kinds: Sequence[Sequence | None]) -> Sequence | None:
    """The kinds of the lookups in all reads of a sharded weight."""
    return [kind for of_read in kinds for kind in of_read or ()] or None


def _values(results: Sequence[PassOutputs]) -> list[Values]:
    """Returns the outputs of each local micro-batch, by key, with masks and the logits behind."""
    keys = results[0].step.output_keys
    return [dict(zip(keys, values, strict=True)) for result in results for values in result.outputs]


def _sums_by_place(lists: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Sums the first tensors of all lists, the second ones, and so on."""
    return [tf.add_n(list(of_all)) for of_all in zip(*lists, strict=True)]
