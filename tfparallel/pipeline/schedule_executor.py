"""What one replica does in a step: the instructions of a schedule, each on its device, in order.

```
   F0 ───────► F1 ───────► B0 ───────► F2 …     control dependencies: the order on a device
   │ outputs   │ outputs   ▲ gradients
   ▼           ▼           │                    data: from device to device
   the next stage's F0, F1 …  B0
```

An instruction begins when the one before it on its device has ended, and what it reads has come. So
which activations are held, and how many, is the graph's own order, and not left to chance.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.custom_gradient import is_differentiable
from tfparallel.data.rows_of_replica import Shard
from tfparallel.layout.schedule import Instruction, Schedule
from tfparallel.pipeline.batch_loss import scale_of
from tfparallel.pipeline.device_order import DeviceOrder
from tfparallel.pipeline.gradient_sums import OF_LOSS, Added, GradientSums, read_by
from tfparallel.pipeline.micro_batch_loss import Part
from tfparallel.pipeline.micro_batches import Batch
from tfparallel.pipeline.pass_context import StepMemory
from tfparallel.pipeline.pass_writes import PassScope
from tfparallel.pipeline.stage_call import LossCall, StageCall
from tfparallel.pipeline.stages import Key, LogitsOf, Stage, Values, with_mask_of
from tfparallel.pipeline.traced_once import MustTraceEach
from tfparallel.placement.gradients import gradients_of_a_part
from tfparallel.step.metrics import StepMetrics
from tfparallel.strategies.variables import copies
from tfparallel.tracing.graphs import operations_here
from tfparallel.tracing.replay import DrawnApart
from tfparallel.variables.replica import device_at_work

__all__ = ["How", "Passed", "ReplicaStep"]


class How(NamedTuple):
    """How the passes of a step are made, the same in each replica.

    Attributes:
        model: The pipelined model.
        stages: Its stages.
        schedule: What each device does.
        devices: The first of each place along the pipeline, in the first replica.
        recompute: "never", "always" or "except_last".
        metrics: The compiled metrics, where the loss is that of the micro-batches, added up; None
            where the outputs meet.
        traces_each: Whether each micro-batch is traced, or only the first.
        has_parts: Whether a stage is on several devices, which its gradients follow.
        timed: Whether to note when each instruction begins and ends.
        writable: The variables that layers may write, by their ids.
    """

    model: keras.Model
    stages: Sequence[Stage]
    schedule: Schedule
    devices: Sequence[str]
    recompute: str
    metrics: StepMetrics | None
    traces_each: bool
    has_parts: bool
    timed: bool
    writable: dict[int, keras.Variable]

    @property
    def begins_joined(self) -> bool:
        """Whether the backward passes begin with the loss of the joined outputs."""
        return self.schedule.name == "gpipe" and self.metrics is None


class Passed(NamedTuple):
    """What a replica's passes leave, by micro-batch.

    Attributes:
        step: What has made them; of replicas that are traced once, the first's.
        outputs: The model's outputs, and the logits behind them, by `step.output_keys`.
        added: The losses that layers added.
        parts: Of the loss.
        growth: Of the metrics' states.
        moments: Of batch normalization, by `step.moment_keys`; of each, by micro-batch.
        gradients: What those of each weight have come to.
    """

    step: "ReplicaStep"
    outputs: list[list[tf.Tensor]]
    added: list[list[tf.Tensor]]
    parts: list[Part]
    growth: list[list[tf.Tensor]]
    moments: list[list[tuple]]
    gradients: list[Added]


class _Recorded(NamedTuple):
    """What a forward pass leaves for its backward pass."""

    tape: tf.GradientTape
    made: Values  # And taken.
    added: list[tuple[tf.Tensor, tf.Tensor]]  # Losses that layers added, and their shares.
    moments: dict[Any, tuple]  # Of batch normalization.
    loss: tuple[tf.GradientTape, Part] | None  # Behind the last stage.
    grown: list[tf.Tensor]  # By what the metrics' states grow.


class ReplicaStep:
    """The passes of one replica, while they are traced (or run eagerly).

    Args:
        how: How they are made.
        memory: What all passes of the step share.
        batch: The whole batch.
        inputs: Of each of the replica's micro-batches, cut.
        targets: Likewise, with weights.
        shards: Which rows they are.

    Attributes:
        order: The instructions' ends, and their times.
        loss: The compiled loss and metrics, of a micro-batch.
        output_keys: Of the model's outputs, and of the logits behind them.
        moment_keys: Of the calls of batch normalization.
    """

    def __init__(
        self,
        how: How,
        memory: StepMemory,
        batch: Batch,
        inputs: Sequence[Values],
        targets: Sequence[Any],
        shards: Sequence[Shard],
    ):
        self._how = how
        self._batch = batch
        self._shards = shards
        self._trained, each = how.model._trained(), how.traces_each
        self._calls = [
            StageCall(stage, batch, memory, self._scope, self._trained, each=each)
            for stage in how.stages
        ]
        self.loss = LossCall(how.model, batch, metrics=how.metrics, each=each)
        self._sums = GradientSums()
        # By seeds of TensorFlow's; replicas are told apart by smaller numbers.
        self._apart = [DrawnApart(m << 16) for m in range(len(shards))]
        # By micro-batch: what stages made for others, and the losses that layers added.
        self._values = [dict(own) for own in inputs]
        self._targets = targets
        self._added: list[list[tf.Tensor]] = [[] for _ in shards]
        self._taken: dict[tuple, Values] = {}  # By stage and micro-batch: what was sent.
        self._recorded: dict[tuple, _Recorded] = {}  # Likewise.
        self._upstream: dict[tuple, list] = {}  # Gradients that have come back, by tensor.
        self._parts: list[Part] = []  # Of the loss, by micro-batch.
        self._growth: list[list[tf.Tensor]] = []  # Of the metrics' states, likewise.
        self._moments: dict[Any, list[tuple]] = {}
        self._read: list[set[int]] = [set() for _ in how.stages]  # Values of weights, by stage.
        self._instructions = list(how.schedule.in_order())
        self.order = DeviceOrder(list(map(device_at_work, how.devices)), how.timed)
        self.output_keys: list[Key] = []
        self.moment_keys: list[Any] = []

    def run(self) -> Passed:
        """Makes the passes; where the loss is that of the joined outputs, the forward ones."""
        while self._instructions:
            _, instruction = self._instructions[0]
            if self._how.begins_joined and instruction.kind == "backward":
                break
            self._follow(*self._instructions.pop(0))
        return self._found()

    def run_back(self, gradients: Sequence[Sequence[tf.Tensor | None]]) -> Passed:
        """Makes the backward passes.

        Args:
            gradients: Of the loss, by micro-batch and by `output_keys`.
        """
        for m, of_one in enumerate(gradients):
            for key, gradient in zip(self.output_keys, of_one, strict=True):
                if gradient is not None:
                    self._upstream.setdefault((self._maker(key), m, key), []).append(gradient)
        while self._instructions:
            self._follow(*self._instructions.pop(0))
        return self._found()

    def _found(self) -> Passed:
        for drawn in self._apart:
            drawn.change()
        outputs = {*self._batch.output_keys}
        outputs |= {*map(LogitsOf, outputs)}
        self.output_keys = [key for key in self._values[0] if key in outputs]
        self.moment_keys = [*self._moments]
        return Passed(
            self,
            [[values[key] for key in self.output_keys] for values in self._values],
            self._added,
            self._parts,
            self._growth,
            [*self._moments.values()],
            self._sums.of(self._trained),
        )

    def _follow(self, device: int, instruction: Instruction):
        """Does what a device is to do."""
        with self.order.next(device, instruction) as done:
            act = self._forward if instruction.kind == "forward" else self._backward
            done += act(instruction.stage, instruction.micro_batch)

    def _forward(self, index, m):
        stage, values = self._how.stages[index], self._values[m]
        taken = self._received(_of(values, stage.inputs))
        self._taken[index, m] = taken
        found = self._run_stage(stage, m, taken)
        values.update(found.made if self._is_last(index) else _of(found.made, stage.outputs))
        self._added[m] += [term for term, _ in found.added]
        for key, moments in found.moments.items():
            self._moments.setdefault(key, []).append(moments)
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
        stage = self._how.stages[index]
        taken = self._taken.pop((index, m))
        is_repeated = self._is_recomputed(m)
        if is_repeated:
            # Behind the instruction before: else it would be computed again too early.
            taken = self._received(taken)
            found = self._run_stage(stage, m, taken)
        else:
            found = self._recorded.pop((index, m))
        begins = not is_repeated
        of_loss = []
        if found.loss is not None:
            of_loss = self._begin_with_loss(index, m, found, noted=begins)
            begins = False
        keys, targets, seeds = self._seeds(index, m, found)
        self._calls[index].check_seeded(keys)
        if not targets:
            return of_loss
        if begins:
            seeds = self.order.begun(seeds)
        sent, variables = self._returned(taken), self._variables_of(stage)
        # A function of the user's own keeps the copies that it was traced with.
        read = [(variable, copy) for variable in variables for copy in copies(variable)]
        sources = [*sent.values(), *(copy for _, copy in read)]
        gradients = self._gradients(found.tape, targets, sources, seeds)
        done: list[Any] = of_loss
        of_whom = [*sent, *(variable for variable, _ in read)]
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

    def _run_stage(self, stage, m, taken) -> _Recorded:
        """Calls the stage's layers, and behind the last the loss, under a tape."""
        shard, loss, grown, before = self._shards[m], None, [], len(operations_here())
        with tf.GradientTape() as tape:
            tape.watch(list(self._returned(taken).values()))
            tape.watch([copy for held in self._variables_of(stage) for copy in copies(held)])
            made = self._calls[stage.index](taken, shard)
            self._read[stage.index] |= {id(value) for value in tape.watched_variables()}
            added = [(loss, tf.ones_like(loss) * shard.weight(loss.dtype)) for loss in made.losses]
        values = made.values | taken
        if self._is_last(stage.index) and not self._how.begins_joined:
            with tf.GradientTape() as tape_of_loss:
                tape_of_loss.watch([t for t in values.values() if is_differentiable(t)])
                part, grown = self.loss(values, self._targets[m], shard)
            loss = None if part is None else (tape_of_loss, part)
        self._apart[m].change(operations_here()[before:])
        return _Recorded(tape, values, added, made.moments, loss, grown)

    def _begin_with_loss(self, index, m, found: _Recorded, noted: bool) -> list[Any]:
        """Sends the gradient of the loss to the outputs, and adds it to the weights that it reads.

        Returns:
            What tells that it has been added.
        """
        tape, part = found.loss
        seed = tf.cast(scale_of(self._how.model), part.loss.dtype)
        if noted:
            (seed,) = self.order.begun([seed])
        sources = self._returned(found.made)
        read, done = read_by(tape, self._trained), []
        values = [*sources.values(), *(copy for _, copy in read)]
        gradients = iter(self._gradients(tape, part.loss, values, seed))
        for key, gradient in zip(sources, gradients, strict=False):
            if gradient is not None:
                gradient = tf.convert_to_tensor(gradient)
                self._upstream.setdefault((self._maker(key), m, key), []).append(gradient)
        for (variable, _), gradient in zip(read, gradients, strict=True):
            done += self._sums.add(variable, gradient, OF_LOSS)
        return done

    def _seeds(self, index, m, found: _Recorded) -> tuple[list[Key], list, list]:
        """What the backward pass begins with: the gradients of what the stage made.

        Returns:
            The keys of what it made for others, the tensors and the losses, their gradients.
        """
        scale = scale_of(self._how.model)
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
            if self._how.has_parts and not tf.executing_eagerly():
                return gradients_of_a_part(*map(tf.nest.flatten, (targets, sources, seeds)))
            return tape.gradient(targets, sources, output_gradients=seeds)
        except Exception as error:
            if self._how.traces_each or tf.executing_eagerly():
                raise
            # Of a function TensorFlow takes the gradient in every argument, also where an
            # operation of the user's has none and nobody asks for it.
            raise MustTraceEach from error

    def _scope(self) -> PassScope:
        return PassScope(self._how.writable, self._how.recompute != "never")

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
        return next((stage.index for stage in self._how.stages if key in stage.outputs), -1)

    def _is_last(self, index) -> bool:
        return index == len(self._how.stages) - 1

    def _is_recomputed(self, m) -> bool:
        is_last = m + 1 == self._how.schedule.num_micro_batches
        how = self._how.recompute
        return how == "always" or (how == "except_last" and not is_last)

    def _variables_of(self, stage):
        """What is trained of a stage's layers, and what they read of others' (in a closure)."""
        # A variable may be trained in a layer that is not: of a frozen one Keras names none.
        held = self._how.model._parts([v for layer in stage.layers for v in layer.variables])
        own, read = {*map(id, held)}, self._read
        return [
            variable
            for variable in self._trained
            if id(variable) in own or read[stage.index].intersection(map(id, copies(variable)))
        ]


def _of(values: Values, keys) -> Values:
    """The values of some keys, with the logits behind them."""
    found = {key: values[key] for key in keys}
    return found | {key: values[key] for key in map(LogitsOf, keys) if key in values}


def _sum(gradients):
    """Of several readers of a tensor; `tf.add_n` takes no ragged ones."""
    if isinstance(gradients[0], tf.RaggedTensor):
        return functools.reduce(operator.add, gradients)
    return tf.add_n(gradients)
