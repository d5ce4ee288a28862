"""A step of training, as a schedule says: the graph in which each device does one thing at a time.

For each device, in the order of its instructions:

```
   F0 ───────► F1 ───────► B0 ───────► F2 …     control dependencies: the order on a device
   │ outputs   │ outputs   ▲ gradients
   ▼           ▼           │                    data: from device to device
   the next stage's F0, F1 …  B0
```

An instruction begins when the one before it on its device has ended, and what it reads has come. So
which activations are held, and how many, is the graph's own order, and not left to chance.

The gradient of a stage's weights is Σ_m g_m, added up on the weights' device; the optimizer updates
once. The loss, the metrics and the terms that layers add are those of the whole batch: the losses
of each micro-batch have its divisor (`loss.py`), and what the rows add to metrics is added up, so
that no outputs meet. A metric that is not known to allow that sees the joined rows of its output.
Where the loss is not known to allow it, all outputs are joined:

* "gpipe": the loss is computed once, of the joined outputs, between the forward and the backward
  passes; it may be any.
* "1f1b", "interleaved": as before, held against the loss of the joined outputs.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives import traced_readings
from tfparallel.collectives.between_workers import is_summable
from tfparallel.collectives.gradient import is_differentiable
from tfparallel.layout.schedule import Schedule
from tfparallel.pipeline.batch import Batch
from tfparallel.pipeline.batch_norm import write_averages
from tfparallel.pipeline.cut import Key, LogitsOf, Stage, Values, with_mask_of
from tfparallel.pipeline.gradient_sums import GradientSums
from tfparallel.pipeline.loss import Part, check_equal
from tfparallel.pipeline.micro_batch import StepMemory
from tfparallel.pipeline.order import Order
from tfparallel.pipeline.others import Others
from tfparallel.pipeline.pass_scope import PassScope, writable
from tfparallel.pipeline.stage_call import LossCall, StageCall
from tfparallel.pipeline.traced_once import MustTraceEach
from tfparallel.pipeline.whole_loss import ExtraLosses, WholeLoss, added_up, scale_of
from tfparallel.placement.gradients import gradients_of_a_part
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.one_step import Found
from tfparallel.step.where_rows_meet import aligned, of_the_batch
from tfparallel.variables.copies import Replica, at_work, copies_of

__all__ = ["Step"]


class Recorded(NamedTuple):
    """What a forward pass leaves for its backward pass."""

    tape: tf.GradientTape
    made: Values  # And taken.
    added: list[tuple[tf.Tensor, tf.Tensor]]  # Losses that layers added, and their shares.
    moments: dict[Any, tuple]  # Of batch normalization.
    loss: tuple[tf.GradientTape, Part] | None  # Behind the last stage.
    grown: list[tf.Tensor]  # By what the metrics' states grow.


class Step:
    """One step, while it is traced (or run eagerly).

    Args:
        model: The pipelined model.
        stages: Its stages.
        schedule: What each device does.
        devices: Their names, those of the second replica behind those of the first.
        replicas: Those of this process. Each has a copy of the weights, and takes as many
            micro-batches as the others.
        others: How many there are in all, and the workers that have them.
        recompute: "never", "always" or "except_last".
        metrics: The compiled metrics, where the loss is that of the micro-batches, added up; None
            where the outputs meet.
        traces_each: Whether each micro-batch is traced, or only the first.
        has_parts: Whether a stage is on several devices, which its gradients follow.
        gradients_stay: Whether gradients are those of this process's replicas, of the loss of all.
        timed: Whether to note when each instruction begins and ends.

    Attributes:
        order: The instructions' ends, and their times.
        checked: What must be done before the weights may change.
    """

    def __init__(
        self,
        model: keras.Model,
        stages: Sequence[Stage],
        schedule: Schedule,
        devices: Sequence[str],
        replicas: Sequence[Replica],
        others: Others,
        *,
        recompute: str = "never",
        metrics: StepMetrics | None = None,
        traces_each: bool = False,
        has_parts: bool = False,
        gradients_stay: bool = False,
        timed: bool = False,
    ):
        self._model = model
        self._has_parts = has_parts
        self._stages = stages
        self._schedule = schedule
        self._devices = devices
        self._replicas = replicas
        self._others = others
        # What runs eagerly is done at once, and holds what it holds.
        self._recompute = "never" if tf.executing_eagerly() else recompute
        self._memory = StepMemory()
        self._writable = writable(model, recompute)
        self._sums = GradientSums(
            model._trained(), self._kinds_of_readings, others, stay=gradients_stay
        )
        self._taken: dict[tuple, Values] = {}  # By stage and micro-batch: what was sent.
        self._recorded: dict[tuple, Recorded] = {}  # Likewise.
        self._upstream: dict[tuple, list] = {}  # Gradients that have come back, by tensor.
        self._metrics = metrics
        self._traces_each = traces_each
        self._parts: list[Part] = []  # Of the loss, by micro-batch.
        self._growth: list[list[tf.Tensor]] = []  # Of the metrics' states, likewise.
        self._kinds: dict[int, Any] = {}
        self._read: list[set[int]] = [set() for _ in stages]  # Values of weights, by stage.
        self.order = Order(devices, timed)
        self.checked: list[tf.Operation] = []

    @property
    def _begins_joined(self) -> bool:
        """Whether the backward passes begin with the loss of the joined outputs."""
        return self._schedule.name == "gpipe" and self._metrics is None

    def run(self, x, y, sample_weight) -> Found:
        """Runs the passes."""
        number, others = self._schedule.num_micro_batches, self._others
        if self._metrics is not None:
            y, sample_weight = aligned(x, y, sample_weight)
        self._batch = Batch(self._model, x, y, sample_weight, number, others)
        batch, memory = self._batch, self._memory
        traced = {"each": self._traces_each}
        trained = self._model._trained()
        self._calls, self._losses = [], []  # By replica: each reads its own weights.
        for replica in self._replicas:
            with at_work(replica):
                self._calls.append([
                    StageCall(stage, batch, memory, self._scope, trained, **traced)
                    for stage in self._stages
                ])  # fmt: skip
            self._losses.append(LossCall(self._model, batch, metrics=self._metrics, **traced))
        # By micro-batch: what stages made for others, and the losses that layers added.
        self._values = {shard.replica: batch.inputs_of(shard) for shard in batch.own}
        self._added: dict[int, list[tf.Tensor]] = {shard.replica: [] for shard in batch.own}
        whole = None
        for device, instruction in self._schedule.in_order():
            if instruction.kind == "backward" and whole is None and self._begins_joined:
                whole = self._whole_loss()
            for replica in self._replicas:
                self._follow(instruction, device, replica)
        if self._metrics is not None:
            gradients, left = self._added_up(trained)
        else:
            whole = whole or self._whole_loss()
            gradients, _ = self._sums.of(trained)
            left = {"loss": whole.loss, "predictions": whole.predictions}
        write_averages(self._memory, others)
        return Found(
            num_rows=batch.num_rows,
            variables=trained,
            gradients=gradients,
            checked=self.checked,
            **left,
        )

    def _follow(self, instruction, device, replica):
        """Does what a replica's device is to do."""
        number = self._schedule.num_micro_batches
        m = self._batch.own[replica.index * number + instruction.micro_batch].replica
        device += replica.index * self._schedule.num_devices
        own = dataclasses.replace(instruction, micro_batch=m)
        with at_work(replica), self.order.next(device, own) as done:
            act = self._forward if own.kind == "forward" else self._backward
            done += act(own.stage, m)

    def _forward(self, index, m):
        stage, values = self._stages[index], self._values[m]
        taken = self._received(_of(values, stage.inputs))
        self._taken[index, m] = taken
        found = self._run_stage(stage, m, taken)
        values.update(found.made if self._is_last(index) else _of(found.made, stage.outputs))
        self._added[m] += [term for term, _ in found.added]
        for key, moments in found.moments.items():
            self._memory.moments.setdefault(key, []).append(moments)
        done = [*_of(found.made, stage.outputs).values(), *(term for term, _ in found.added)]
        if found.loss is not None:
            _, part = found.loss
            self._parts.append(part)
            done.append(part.loss)
        if self._is_last(index):
            self._growth.append(found.grown)
        if not self._is_recomputed(m):
            self._recorded[index, m] = found
        return done or [tensor for tensor in taken.values() if tensor is not None]

    def _backward(self, index, m):
        stage = self._stages[index]
        taken = self._taken.pop((index, m))
        is_repeated = self._is_recomputed(m)
        if is_repeated:
            # Behind the instruction before: else it would be computed again too early.
            taken = self._received(taken)
            found = self._run_stage(stage, m, taken)
        else:
            found = self._recorded.pop((index, m))
        begins = not is_repeated
        if found.loss is not None:
            self._begin_with_loss(index, m, found, noted=begins)
            begins = False
        keys, targets, seeds = self._seeds(index, m, found)
        self._calls_of(m)[index].check_seeded(keys)
        if not targets:
            return []
        if begins:
            seeds = self.order.begun(seeds)
        sent, variables = self._returned(taken), self._variables_of(stage)
        # A function of the user's own keeps the copies that it was traced with.
        copies = [(variable, copy) for variable in variables for copy in copies_of(variable)]
        sources = [*sent.values(), *(copy for _, copy in copies)]
        gradients = self._gradients(found.tape, targets, sources, seeds)
        done: list[Any] = []
        of_whom = [*sent, *(variable for variable, _ in copies)]
        for source, gradient in zip(of_whom, gradients, strict=True):
            if gradient is None:
                continue
            if isinstance(source, keras.Variable):
                done += self._sums.add(source, gradient, index)
                continue
            if not isinstance(gradient, tf.RaggedTensor):
                gradient = tf.convert_to_tensor(gradient)
            done += tf.nest.flatten(gradient, expand_composites=True)
            self._upstream.setdefault((self._maker(source), m, source), []).append(gradient)
        return done or seeds

    def _run_stage(self, stage, m, taken) -> Recorded:
        """Calls the stage's layers, and behind the last the loss, under a tape."""
        shard, loss, grown = self._batch.shards[m], None, []
        with tf.GradientTape() as tape:
            tape.watch(list(self._returned(taken).values()))
            tape.watch([c for variable in self._variables_of(stage) for c in copies_of(variable)])
            made = self._calls_of(shard.replica)[stage.index](taken, shard)
            self._read[stage.index] |= {id(value) for value in tape.watched_variables()}
            added = [(loss, tf.ones_like(loss) * shard.weight(loss.dtype)) for loss in made.losses]
        values = made.values | taken
        if self._is_last(stage.index) and not self._begins_joined:
            with tf.GradientTape() as tape_of_loss:
                tape_of_loss.watch([t for t in values.values() if is_differentiable(t)])
                part, grown = self._losses[self._replica_of(shard.replica)](values, shard)
            loss = None if part is None else (tape_of_loss, part)
        return Recorded(tape, values, added, made.moments, loss, grown)

    def _begin_with_loss(self, index, m, found: Recorded, noted: bool):
        """Sends the gradient of the loss to the outputs that it was computed of."""
        tape, part = found.loss
        seed = tf.cast(scale_of(self._model), part.loss.dtype)
        if noted:
            (seed,) = self.order.begun([seed])
        sources = self._returned(found.made)
        gradients = self._gradients(tape, part.loss, [*sources.values()], seed)
        for key, gradient in zip(sources, gradients, strict=True):
            if gradient is not None:
                gradient = tf.convert_to_tensor(gradient)
                self._upstream.setdefault((self._maker(key), m, key), []).append(gradient)

    def _seeds(self, index, m, found: Recorded) -> tuple[list[Key], list, list]:
        """What the backward pass begins with: the gradients of what the stage made.

        Returns:
            The keys of what it made for others, the tensors and the losses, their gradients.
        """
        scale = scale_of(self._model)
        keys, targets, seeds = [], [], []
        for key, tensor in found.made.items():
            come = self._upstream.pop((index, m, key), None)
            if come and is_differentiable(tensor):
                keys.append(key)
                targets.append(tensor)
                seeds.append(tf.identity(come[0]) if len(come) == 1 else _sum(come))
        for term, share in found.added:
            targets.append(term)
            seeds.append(share * tf.cast(scale, share.dtype))
        return keys, targets, seeds

    def _gradients(self, tape, targets, sources, seeds):
        try:
            if self._has_parts and not tf.executing_eagerly():
                return gradients_of_a_part(*map(tf.nest.flatten, (targets, sources, seeds)))
            return tape.gradient(targets, sources, output_gradients=seeds)
        except Exception as error:
            if self._traces_each or tf.executing_eagerly():
                raise
            # Of a function TensorFlow takes the gradient in every argument, also where an
            # operation of the user's has none and nobody asks for it.
            raise MustTraceEach from error

    def _scope(self) -> PassScope:
        return PassScope(self._writable, self._recompute != "never")

    def _received(self, sent: Values) -> Values:
        """What was sent, on this device, once its turn has come."""
        keys = [key for key, tensor in sent.items() if tensor is not None]
        here = self.order.begun([tf.identity(sent[key]) for key in keys])
        found = dict.fromkeys(sent) | dict(zip(keys, here, strict=True))
        for key in keys:
            with_mask_of(found[key], sent[key])
        return found

    def _returned(self, taken: Values) -> Values:
        """Of what was sent, that whose gradient goes back: not the model's inputs."""
        return {
            key: tensor
            for key, tensor in taken.items()
            if is_differentiable(tensor) and self._maker(key) >= 0
        }

    def _maker(self, key) -> int:
        """The stage that made a tensor; -1 for the model's inputs."""
        if isinstance(key, LogitsOf):
            key = key.output
        return next((stage.index for stage in self._stages if key in stage.outputs), -1)

    def _is_last(self, index) -> bool:
        return index == len(self._stages) - 1

    def _replica_of(self, m) -> int:
        """The index here of the replica that has a piece."""
        return m // self._schedule.num_micro_batches % len(self._replicas)

    def _calls_of(self, m) -> list[StageCall]:
        return self._calls[self._replica_of(m)]

    def _is_recomputed(self, m) -> bool:
        is_last = (m + 1) % self._schedule.num_micro_batches == 0
        return self._recompute == "always" or (self._recompute == "except_last" and not is_last)

    def _variables_of(self, stage):
        """What is trained of a stage's layers, and what they read of others' (in a closure)."""
        # A variable may be trained in a layer that is not: of a frozen one Keras names none.
        held = self._model._parts([v for layer in stage.layers for v in layer.variables])
        own, read = {*map(id, held)}, self._read
        return [
            variable
            for variable in self._model._trained()
            if id(variable) in own or read[stage.index].intersection(map(id, copies_of(variable)))
        ]

    def _kinds_of_readings(self) -> dict[int, Any]:
        """By the weight's id; in a graph a gradient itself tells."""
        if not tf.executing_eagerly():
            return {}
        if not self._kinds:

            def call(x):
                outputs = self._model(x, training=True)
                self._model._clear_losses()
                return outputs

            trained = self._model._trained()
            found = traced_readings.kinds_of(call, self._batch.x, [v._value for v in trained])
            self._kinds = dict(zip(map(id, trained), found, strict=True))
        return self._kinds

    def _whole_loss(self) -> WholeLoss:
        """Joins the outputs; under "gpipe" the loss's gradients go on their way back."""
        batch, keys = self._batch, self._batch.output_keys
        with tf.device(self._devices[self._schedule.device_of(len(self._stages) - 1)]):
            joined = [batch.joined(key, [*self._values.values()]) for key in keys]
            extra = ExtraLosses(self._model, batch, [*self._added.values()], self._others)
            whole = WholeLoss(self._model, batch, joined, extra, differentiate=self._begins_joined)
            if not self._begins_joined:
                self._check(whole, extra)
                extra.add_gradients(self._sums, lambda _: scale_of(self._model))
                return whole
            extra.add_gradients(self._sums, whole.gradient)
            for key, tensor in itertools.chain(*(own.sources.items() for own in joined)):
                gradient = whole.gradient(tensor)
                for shard in batch.own if gradient is not None else ():
                    m, rows = shard.replica, batch.rows_of(shard, gradient)
                    self._upstream.setdefault((self._maker(key), m, key), []).append(rows)
        return whole

    def _added_up(self, trained) -> tuple[list[Any], dict[str, Any]]:
        """The gradients, the loss, and by what the metrics grow: sums over the micro-batches.

        Returns:
            The gradients of what is trained, and other fields of `Found`.
        """
        batch, values = self._batch, [*self._values.values()]
        with tf.device(self._devices[self._schedule.device_of(len(self._stages) - 1)]):
            extra = ExtraLosses(self._model, batch, [*self._added.values()], self._others)
            shares = _sums_by_place([part.shares for part in self._parts])
            grown = _sums_by_place(self._growth)
        extra.add_gradients(self._sums, lambda _: scale_of(self._model))
        # Each collective is waited for: these go with the gradients, if every transport sums them.
        beside = [*shares, *grown] if all(map(is_summable, grown)) else shares
        gradients, beside = self._sums.of(trained, beside)
        shares, grown = beside[: len(shares)], beside[len(shares) :] or self._others.summed(grown)
        with tf.device(self._devices[self._schedule.device_of(len(self._stages) - 1)]):
            outputs = [values[0][key] for key in batch.output_keys]
            loss = added_up(self._model, batch, shares, outputs, extra)
            types = batch.packed(of_the_batch(outputs, batch.num_rows))
            keys = [batch.output_keys[place] for place in self._metrics.places(types)]
            rows = [batch.joined(key, values).output() for key in keys]
        return gradients, {
            "loss": loss,
            "metrics": self._metrics,
            "growth": grown,
            "outputs": types,
            "rows": rows,
            "divisor": self._losses[0].divisor(),
            "num_added": len(extra.losses),
        }

    def _check(self, whole: WholeLoss, extra: ExtraLosses):
        """The parts must add up, or no weight may change."""
        if not self._parts:
            return
        terms = [*(part.loss for part in self._parts), *extra.losses]
        check = check_equal(terms, whole.loss, self._model.compute_dtype)
        self.checked += [] if check is None else [check]


def _of(values: Values, keys) -> Values:
    """The values of some keys, with the logits behind them."""
    found = {key: values[key] for key in keys}
    return found | {key: values[key] for key in map(LogitsOf, keys) if key in values}


def _sums_by_place(lists: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Sums the first tensors of all lists, the second ones, and so on."""
    return [tf.add_n(list(of_all)) for of_all in zip(*lists, strict=True)]


def _sum(gradients):
    """Of several readers of a tensor; `tf.add_n` takes no ragged ones."""
    if isinstance(gradients[0], tf.RaggedTensor):
        return functools.reduce(operator.add, gradients)
    return tf.add_n(gradients)
