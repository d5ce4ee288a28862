"""A step of training: what the replicas leave, joined and added up.

Each replica follows the schedule (`schedule_executor.py`); that is traced for the first, and made
again for the others (`strategies/replica_trace.py`).

The gradient of a weight is Σ_d Σ_m g_dm; the optimizer updates once. The loss, the metrics and the
terms that layers add are those of the whole batch: the losses of each micro-batch have its divisor
(`micro_batch_loss.py`), and what the rows add to metrics is added up, so that no outputs meet. A
metric that is not known to allow that sees the joined rows of its output. Where the loss is not
known to allow it, all outputs are joined:

* "gpipe": the loss is computed once, of the joined outputs, between the forward and the backward
  passes; it may be any.
* "1f1b", "interleaved": as before, held against the loss of the joined outputs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.collectives import indexed_slices
from tfparallel.collectives.packing import is_summable
from tfparallel.data.rows_of_replica import for_replicas
from tfparallel.pipeline.batch_loss import ExtraLosses, WholeLoss, added_up, scale_of
from tfparallel.pipeline.batch_norm import write_averages
from tfparallel.pipeline.device_order import DeviceOrder
from tfparallel.pipeline.gradient_sums import GradientSums, totals
from tfparallel.pipeline.micro_batch_loss import check_equal
from tfparallel.pipeline.micro_batches import Batch, Joined
from tfparallel.pipeline.pass_context import StepMemory
from tfparallel.pipeline.pass_writes import sums_in_layers
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.pipeline.schedule_executor import How, Passed, ReplicaStep
from tfparallel.pipeline.stages import Values
from tfparallel.seams.keras import clear_losses
from tfparallel.step.one_step import PassResult
from tfparallel.step.where_rows_meet import aligned, of_the_batch
from tfparallel.strategies.replica_trace import MeshTrace
from tfparallel.strategies.variables import copies
from tfparallel.variables.replica import Replica

__all__ = ["Step"]


class Step:
    """One step, while it is traced (or run eagerly).

    Args:
        how: How the passes are made.
        replicas: Those of this process. Each has a copy of the weights, and takes as many
            micro-batches as the others.
        others: How many there are in all, and the workers that have them.
        gradients_stay: Whether gradients are those of this process's replicas, of the loss of all.

    Attributes:
        order: The instructions' ends, and their times, in the first replica.
    """

    order: DeviceOrder

    def __init__(
        self, how: How, replicas: Sequence[Replica], others: Others, *, gradients_stay: bool = False
    ):
        self._how = how
        self._replicas = replicas
        self._others = others
        self._gradients_stay = gradients_stay

    def run(self, x, y, sample_weight) -> PassResult:
        """Runs the passes."""
        number = self._how.schedule.num_micro_batches
        if self._how.metrics is not None:
            y, sample_weight = aligned(x, y, sample_weight)
        self._batch = Batch(self._how.model, x, y, sample_weight, number, self._others)
        memory, trace = StepMemory(), MeshTrace(self._replicas, self._others.first_replica)
        sums = sums_in_layers(self._how.model, self._others.num_replicas)

        def on_replica(*of_replica):
            return ReplicaStep(self._how, memory, self._batch, *of_replica).run()

        # Cut here, where sizes are known.
        inputs = self._by_replica(map(self._batch.inputs_of, self._batch.own))
        targets = self._by_replica(map(self._batch.targets_of, self._batch.own))
        by_micro_batch = [for_replicas(self._batch.own[m::number]) for m in range(number)]
        found = trace.run(on_replica, inputs, targets, list(zip(*by_micro_batch, strict=True)))
        self.order = found[0].step.order
        for each in sums:
            each.combine(self._others)
        moments: dict[Any, list[tuple]] = {}
        for own in found:
            for key, seen in zip(found[0].step.moment_keys, own.moments, strict=True):
                moments.setdefault(key, []).extend(seen)
        write_averages(moments, self._others)
        return self._meet(found, trace) if self._how.metrics is None else self._added_up(found)

    def _meet(self, found: Sequence[Passed], trace: MeshTrace) -> PassResult:
        """The loss of the joined outputs; if the backward passes begin with it, they follow."""
        joined, extra = self._joined(found, self._batch.output_keys), self._extra(found)
        whole = self._whole_loss([*joined.values()], extra)
        left = {"loss": whole.loss, "predictions": whole.predictions}
        if self._how.begins_joined:
            upstream = self._upstream(found, joined, whole)
            found = trace.run(ReplicaStep.run_back, [own.step for own in found], upstream)
            gradients, _ = self._totals(found, extra, whole.gradient, whole=whole)
            return self._found(gradients, **left)
        gradients, _ = self._totals(found, extra, lambda _: scale_of(self._how.model))
        return self._found(gradients, checked=self._checked(found, whole, extra), **left)

    def _by_replica(self, of_each: Iterable[Any]) -> list[list[Any]]:
        """What there is for each micro-batch here, by the replica that has it."""
        own, number = list(of_each), self._how.schedule.num_micro_batches
        return [own[first : first + number] for first in range(0, len(own), number)]

    def _found(self, gradients, **left) -> PassResult:
        rows, trained = self._batch.num_rows, self._how.model._trained()
        return PassResult(num_rows=rows, variables=trained, gradients=gradients, **left)

    def _where_the_loss_is(self):
        return tf.device(self._how.devices[self._how.schedule.device_of(len(self._how.stages) - 1)])

    def _extra(self, found: Sequence[Passed]) -> ExtraLosses:
        with self._where_the_loss_is():
            added = [terms for own in found for terms in own.added]
            return ExtraLosses(self._how.model, self._batch, added, self._others)

    def _joined(self, found: Sequence[Passed], keys: Sequence[int]) -> dict[int, Joined]:
        """Outputs of the whole batch, by key."""
        values = _values(found)
        with self._where_the_loss_is():
            return {key: self._batch.joined(key, values) for key in keys}

    def _whole_loss(self, joined: list[Joined], extra: ExtraLosses) -> WholeLoss:
        with self._where_the_loss_is():
            return WholeLoss(
                self._how.model, self._batch, joined, extra, differentiate=self._how.begins_joined
            )

    def _upstream(self, found, joined: dict[int, Joined], whole: WholeLoss) -> list:
        """The gradients of the loss, by replica, micro-batch and key of the outputs."""
        sources = {key: each for own in joined.values() for key, each in own.sources.items()}
        keys = found[0].step.output_keys
        with self._where_the_loss_is():
            gradients = [whole.gradient(sources[key]) if key in sources else None for key in keys]
            return self._by_replica(
                [None if each is None else self._batch.rows_of(shard, each) for each in gradients]
                for shard in self._batch.own
            )

    def _totals(
        self,
        found: Sequence[Passed],
        extra: ExtraLosses,
        seed_of,
        beside=(),
        whole: WholeLoss | None = None,
    ):
        """The gradients of what is trained, and what is summed beside."""
        trained, of_batch = self._how.model._trained(), GradientSums()
        extra.add_gradients(of_batch, seed_of)
        if whole is not None:
            whole.add_gradients(of_batch, self._others)
        return totals(
            [*(own.gradients for own in found), of_batch.of(trained)],
            trained,
            self._kinds_of_readings,
            self._others,
            beside,
            stay=self._gradients_stay,
        )

    def _kinds_of_readings(self) -> dict[int, Any]:
        """By the weight's id; in a graph a gradient itself tells."""
        if not tf.executing_eagerly():
            return {}

        def call(x):
            outputs = self._how.model(x, training=True)
            clear_losses(self._how.model)
            return outputs

        trained = self._how.model._trained()
        weights = [copies(variable)[0] for variable in trained]
        found = indexed_slices.kinds_of(call, self._batch.x, weights)
        return dict(zip(map(id, trained), found, strict=True))

    def _added_up(self, found: Sequence[Passed]) -> PassResult:
        """The gradients, the loss, and by what the metrics grow: sums over the micro-batches."""
        batch, extra = self._batch, self._extra(found)
        with self._where_the_loss_is():
            shares = _sums_by_place([part.shares for own in found for part in own.parts])
            grown = _sums_by_place([each for own in found for each in own.growth])
        # Each collective is waited for: these go with the gradients, if every transport sums them.
        beside = [*shares, *grown] if all(map(is_summable, grown)) else shares
        gradients, beside = self._totals(found, extra, lambda _: scale_of(self._how.model), beside)
        shares, grown = beside[: len(shares)], beside[len(shares) :] or self._others.summed(grown)
        with self._where_the_loss_is():
            values = _values(found)[0]
            outputs = [values[key] for key in batch.output_keys]
            loss = added_up(self._how.model, batch, shares, outputs, extra)
            types = batch.packed(of_the_batch(outputs, batch.num_rows))
        keys = [batch.output_keys[place] for place in self._how.metrics.places(types)]
        with self._where_the_loss_is():
            rows = [own.output() for own in self._joined(found, keys).values()]
        return self._found(
            gradients,
            loss=loss,
            metrics=self._how.metrics,
            growth=grown,
            outputs=types,
            rows=rows,
            divisor=found[0].step.loss.divisor(),
            num_added=len(extra.losses),
        )

    def _checked(self, found, whole: WholeLoss, extra: ExtraLosses) -> list[tf.Operation]:
        """The parts must add up, or no weight may change."""
        parts = [part for own in found for part in own.parts]
        if not parts:
            return []
        with self._where_the_loss_is():
            terms = [*(part.loss for part in parts), *extra.losses]
            check = check_equal(terms, whole.loss, self._how.model.compute_dtype)
        return [] if check is None else [check]


def _values(found: Sequence[Passed]) -> list[Values]:
    """The outputs of each micro-batch here, by key, with the masks and the logits behind them."""
    keys = found[0].step.output_keys
    return [dict(zip(keys, values, strict=True)) for own in found for values in own.outputs]


def _sums_by_place(lists: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Sums the first tensors of all lists, the second ones, and so on."""
    return [tf.add_n(list(of_all)) for of_all in zip(*lists, strict=True)]
