"""Runs a schedule in one replica: its instructions, each on its device, in order.

```
   F0 ───────► F1 ───────► B0 ───────► F2 …     control dependencies: the order on a device
   │ outputs   │ outputs   ▲ gradients
   ▼           ▼           │                    data: from device to device
   the next stage's F0, F1 …  B0
```

An instruction begins when the previous one on its device has ended and its inputs have arrived. So
the graph's own order, not chance, decides which activations are held at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.compute_context import within
from tfparallel.layout.schedule import Instruction
from tfparallel.piece import Piece
from tfparallel.pipeline.allowed_writes import PassScope
from tfparallel.pipeline.batch_loss import scale_of
from tfparallel.pipeline.device_order import DeviceOrder
from tfparallel.pipeline.gathers import MeshGathers
from tfparallel.pipeline.gradient_sums import OF_LOSS, Added, GradientSums, read_by, summed
from tfparallel.pipeline.loss_call import LossCall
from tfparallel.pipeline.micro_batch_loss import Part
from tfparallel.pipeline.micro_batches import Batch
from tfparallel.pipeline.pass_context import StepMemory
from tfparallel.pipeline.pass_options import PassOptions
from tfparallel.pipeline.stage_call import StageCall
from tfparallel.pipeline.stages import (
    Key,
    LogitsOf,
    PartOf,
    Values,
    symbol_of,
    values_of,
    with_mask_of,
)
from tfparallel.pipeline.traced_once import MustTraceEach
from tfparallel.placement.gradients import gradients_of_a_part
from tfparallel.replication.dummy_rows import zeros_without_rows
from tfparallel.strategies.replica_trace import MeshTrace
from tfparallel.strategies.variables import copies
from tfparallel.tracing.custom_gradient import is_differentiable
from tfparallel.tracing.graphs import operations_here
from tfparallel.tracing.replay import DrawnApart
from tfparallel.variables.mesh_replica import device_at_work


class PassOutputs(NamedTuple):
    """The results of a replica's passes, by micro-batch.

    Attributes:
        step: The step that made them; for replicas that are traced once, the first's.
        outputs: The model's outputs, and the logits behind them, by `step.output_keys`.
        added: The losses that layers added.
        parts: The parts of the loss.
        growth: The increments of the metrics' states.
        moments: The moments of batch normalization, by `step.moment_keys`, then by micro-batch.
        gradients: The sum of each weight's gradients.
    """

    step: "ReplicaStep"
    outputs: list[list[tf.Tensor]]
    added: list[list[tf.Tensor]]
    parts: list[Part]
    growth: list[list[tf.Tensor]]
    moments: list[list[tuple]]
    gradients: list[Added]


class _Recorded(NamedTuple):
    """The results of a forward pass that its backward pass needs."""

    tape: tf.GradientTape
    values: Values  # Outputs and inputs.
    added: list[tuple[tf.Tensor, tf.Tensor]]  # Losses that layers added, and their shares.
    moments: dict[Any, tuple]  # The moments of batch normalization.
    loss: tuple[tf.GradientTape, Part] | None  # After the last stage.
    grown: list[tf.Tensor]  # The increments of the metrics' states.


class ReplicaStep:
    """The passes of one replica, while they are traced (or run eagerly).

    Args:
        options: How to make the passes.
        memory: The state that all passes of the step share.
        batch: The whole batch.
        trace: Traces the replica, and replays it for the others.
        inputs: The inputs of each of the replica's micro-batches.
        targets: The targets and weights of each.
        pieces: The rows of each.

    Attributes:
        order: The ends and times of the instructions.
        loss: Computes the compiled loss and metrics of a micro-batch.
        output_keys: The keys of the model's outputs, and of the logits behind them.
        moment_keys: The keys of the calls of batch normalization.
    """

    def __init__(
        self,
        options: PassOptions,
        memory: StepMemory,
        batch: Batch,
        trace: MeshTrace,
        inputs: Sequence[Values],
        targets: Sequence[Any],
        pieces: Sequence[Piece],
    ):
        self._options = options
        self._batch = batch
        self._pieces = pieces
        self._trained, each = options.model._trained(), options.traces_each
        self._calls = [
            StageCall(stage, batch, memory, self._scope, self._trained, each=each)
            for stage in options.stages
        ]
        if options.metrics is not None:  # Otherwise, the loss needs the joined outputs.
            self._calls[-1].parts_of = options.parts_of
        self.loss = LossCall(options.model, batch, metrics=options.metrics, each=each)
        self._sums = GradientSums()
        self._gathers = MeshGathers(trace, self._sums)
        # For TensorFlow's own seeds; smaller numbers distinguish the replicas.
        self._apart = [DrawnApart(m << 16) for m in range(len(pieces))]
        # By micro-batch: the tensors between stages, and the losses that layers added.
        self._values = [dict(of_one) for of_one in inputs]
        self._targets = targets
        self._added: list[list[tf.Tensor]] = [[] for _ in pieces]
        self._place_of_added: dict[tuple, int] = {}  # By stage and micro-batch, the first.
        self._of_added: Sequence[tf.Tensor | None] | None = None  # None where the loss adds them.
        self._inputs_of: dict[tuple, Values] = {}  # The stage's inputs, by stage and micro-batch.
        self._recorded: dict[tuple, _Recorded] = {}  # By stage and micro-batch.
        self._upstream: dict[tuple, list] = {}  # Gradients from readers, by tensor.
        self._parts: list[Part] = []  # Of the loss, by micro-batch.
        self._growth: list[list[tf.Tensor]] = []  # Of the metrics' states, by micro-batch.
        self._moments: dict[Any, list[tuple]] = {}
        self._read: list[set[int]] = [set() for _ in options.stages]  # The weights read, by stage.
        self._instructions = list(options.schedule.in_order())
        self.order = DeviceOrder(list(map(device_at_work, options.devices)), options.timed)
        self.output_keys: list[Key] = []
        self.moment_keys: list[Any] = []

    def run(self) -> PassOutputs:
        """Runs the passes; if the loss is that of the joined outputs, only the forward passes."""
        while self._instructions:
            _, instruction = self._instructions[0]
            if self._options.begins_joined and instruction.kind == "backward":
                break
            self._execute(*self._instructions.pop(0))
        return self._pass_outputs()

    def run_back(
        self,
        gradients: Sequence[Sequence[tf.Tensor | None]],
        of_added: Sequence[tf.Tensor | None],
    ) -> PassOutputs:
        """Runs the backward passes.

        Args:
            gradients: The gradients of the loss, by micro-batch and by `output_keys`.
            of_added: Those by the losses that layers added.
        """
        self._of_added = of_added
        for m, of_one in enumerate(gradients):
            for key, gradient in zip(self.output_keys, of_one, strict=True):
                if gradient is not None:
                    self._upstream.setdefault((self._maker(key), m, key), []).append(gradient)
        while self._instructions:
            self._execute(*self._instructions.pop(0))
        return self._pass_outputs()

    def _pass_outputs(self) -> PassOutputs:
        for drawn in self._apart:
            drawn.change()
        outputs = {*self._batch.output_keys}
        outputs |= {*map(LogitsOf, outputs)}
        self.output_keys = [key for key in self._values[0] if key in outputs]
        self.moment_keys = [*self._moments]
        return PassOutputs(
            self,
            [[values[key] for key in self.output_keys] for values in self._values],
            self._added,
            self._parts,
            self._growth,
            [*self._moments.values()],
            self._sums.of(self._trained),
        )

    def _execute(self, device: int, instruction: Instruction):
        """Executes one instruction of a device."""
        with self.order.next(device, instruction) as done:
            act = self._forward if instruction.kind == "forward" else self._backward
            done += act(instruction.stage, instruction.micro_batch)

    def _forward(self, index, m):
        stage, values = self._options.stages[index], self._values[m]
        inputs = self._received(values_of(values, stage.inputs))
        self._inputs_of[index, m] = inputs
        record = self._run_stage(stage, m, inputs)
        outputs = values_of(record.values, stage.outputs)
        values.update(record.values if self._is_last(index) else outputs)
        self._place_of_added[index, m] = len(self._added[m])
        self._added[m] += [term for term, _ in record.added]
        for key, moments in record.moments.items():
            self._moments.setdefault(key, []).append(moments)
        # Whole outputs are joined only if something reads them.
        done = [tensor for key, tensor in outputs.items() if PartOf(key, 0) not in outputs]
        done += [term for term, _ in record.added]
        if record.loss is not None:
            _, part = record.loss
            self._parts.append(part)
            done.append(part.loss)
        if self._is_last(index):
            self._growth.append(record.grown)
        if not self._is_recomputed(m):
            self._recorded[index, m] = record
        return done or [tensor for tensor in inputs.values() if tensor is not None]

    def _backward(self, index, m):
        stage = self._options.stages[index]
        inputs = self._inputs_of.pop((index, m))
        is_repeated = self._is_recomputed(m)
        if is_repeated:
            # After the previous instruction; otherwise the recompute would run too early.
            inputs = self._received(inputs)
            record = self._run_stage(stage, m, inputs)
        else:
            record = self._recorded.pop((index, m))
        begins = not is_repeated
        of_loss = []
        if record.loss is not None:
            of_loss = self._loss_backward(index, m, record, noted=begins)
            begins = False
        keys, targets, seeds = self._seeds(index, m, record)
        self._calls[index].check_seeded(keys)
        if not targets:
            return of_loss
        if begins:
            seeds = self.order.begun(seeds)
        sent, variables = self._with_gradient(inputs), self._variables_of(stage)
        # A user's own function keeps the copies that it was traced with.
        read = [(variable, copy) for variable in variables for copy in copies(variable)]
        sources = [*sent.values(), *(copy for _, copy in read)]
        self._gathers.begin_backward(index, self._pieces[m])
        gradients = self._gradients(record.tape, targets, sources, seeds)
        done = of_loss + self._gathers.take_added()
        for source, gradient in zip(sent, gradients, strict=False):
            if gradient is None:
                continue
            if not isinstance(gradient, tf.RaggedTensor):
                gradient = tf.convert_to_tensor(gradient)
            done += tf.nest.flatten(gradient, expand_composites=True)
            self._upstream.setdefault((self._maker(source), m, source), []).append(gradient)
        variables = [variable for variable, _ in read]
        return done + self._add(variables, gradients[len(sent) :], m, index) or seeds

    def _add(self, variables, gradients, m, reader) -> list[Any]:
        """Adds a micro-batch's gradients of weights; returns what exists once they are added."""
        added, gradients = [], zeros_without_rows(self._pieces[m], gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            added += self._gathers.add(variable, gradient, reader)
        return added

    def _run_stage(self, stage, m, inputs) -> _Recorded:
        """Calls the stage's layers, and after the last stage the loss, under a tape."""
        piece, loss, grown, before = self._pieces[m], None, [], len(operations_here())
        self._gathers.begin()
        with within(gathers=self._gathers), tf.GradientTape() as tape:
            tape.watch(list(self._with_gradient(inputs).values()))
            tape.watch([copy for v in self._variables_of(stage) for copy in copies(v)])
            out = self._calls[stage.index](inputs, piece)
            self._read[stage.index] |= {id(value) for value in tape.watched_variables()}
            added = [(loss, tf.ones_like(loss) * piece.weight(loss.dtype)) for loss in out.losses]
        values = out.values | inputs
        if self._is_last(stage.index) and not self._options.begins_joined:
            with within(gathers=self._gathers), tf.GradientTape() as tape_of_loss:
                tape_of_loss.watch([t for t in values.values() if is_differentiable(t)])
                part, grown = self.loss(values, self._targets[m], piece)
            loss = None if part is None else (tape_of_loss, part)
        self._apart[m].change(operations_here()[before:])
        return _Recorded(tape, values, added, out.moments, loss, grown)

    def _loss_backward(self, index, m, record: _Recorded, noted: bool) -> list[Any]:
        """Sends the gradient of the loss to the outputs, and adds it for the weights it reads.

        Returns tensors that exist once it has been added.
        """
        tape, part = record.loss
        seed = tf.cast(scale_of(self._options.model), part.loss.dtype)
        if noted:
            (seed,) = self.order.begun([seed])
        sources = self._with_gradient(record.values)
        read = read_by(tape, self._trained)
        values = [*sources.values(), *(copy for _, copy in read)]
        self._gathers.begin_backward(OF_LOSS, self._pieces[m])
        gradients = self._gradients(tape, part.loss, values, seed)
        done = self._gathers.take_added()
        for key, gradient in zip(sources, gradients, strict=False):
            if gradient is not None:
                gradient = tf.convert_to_tensor(gradient)
                self._upstream.setdefault((self._maker(key), m, key), []).append(gradient)
        variables = [variable for variable, _ in read]
        return done + self._add(variables, gradients[len(sources) :], m, OF_LOSS)

    def _seeds(self, index, m, record: _Recorded) -> tuple[list[Key], list, list]:
        """Returns the upstream gradients of the stage's outputs, to begin the backward pass.

        Returns:
            The keys of the outputs, the outputs and the losses, their gradients.
        """
        scale = scale_of(self._options.model)
        keys, targets, seeds = [], [], []
        for key, tensor in record.values.items():
            gradients = self._upstream.pop((index, m, key), None)
            if gradients and is_differentiable(tensor):
                keys.append(key)
                targets.append(tensor)
                seeds.append(summed(gradients, tensor))
        for place, (term, share) in enumerate(record.added, self._place_of_added[index, m]):
            upstream = scale if self._of_added is None else self._of_added[place]
            if upstream is not None:
                targets.append(term)
                seeds.append(share * tf.cast(upstream, share.dtype))
        return keys, targets, seeds

    def _gradients(self, tape, targets, sources, seeds):
        try:
            if self._options.has_parts and not tf.executing_eagerly():
                return gradients_of_a_part(*map(tf.nest.flatten, (targets, sources, seeds)))
            return tape.gradient(targets, sources, output_gradients=seeds)
        except Exception as error:
            if self._options.traces_each or tf.executing_eagerly():
                raise
            # TensorFlow differentiates a function by every argument, even if a user's operation
            # has no gradient and none is requested.
            raise MustTraceEach from error

    def _scope(self) -> PassScope:
        return PassScope(self._options.writable, self._options.recompute != "never")

    def _received(self, sent: Values) -> Values:
        """Copies the inputs to this device, once the instruction may begin."""
        keys = [key for key, tensor in sent.items() if tensor is not None]
        arrived = self.order.begun([tf.identity(sent[key]) for key in keys])
        received = dict.fromkeys(sent) | dict(zip(keys, arrived, strict=True))
        for key in keys:
            with_mask_of(received[key], sent[key])
        return received

    def _with_gradient(self, inputs: Values) -> Values:
        """Returns the inputs whose gradients are sent back: not the model's inputs."""
        return {
            key: tensor
            for key, tensor in inputs.items()
            if is_differentiable(tensor) and self._maker(key) >= 0
        }

    def _maker(self, key) -> int:
        """Returns the stage that made a tensor; -1 for the model's inputs."""
        symbol = symbol_of(key)
        return next((stage.index for stage in self._options.stages if symbol in stage.outputs), -1)

    def _is_last(self, index) -> bool:
        return index == len(self._options.stages) - 1

    def _is_recomputed(self, m) -> bool:
        is_last = m + 1 == self._options.schedule.num_micro_batches
        recompute = self._options.recompute
        return recompute == "always" or (recompute == "except_last" and not is_last)

    def _variables_of(self, stage):
        """Returns the trained variables of a stage's layers, and those they read in closures."""
        # A frozen layer lists none, but its variables may be trained in another layer.
        variables = [v for layer in stage.layers for v in layer.variables]
        variables = self._options.model._parts(variables)
        ids, read = {*map(id, variables)}, self._read
        return [
            variable
            for variable in self._trained
            if copies(variable)[0].trainable  # A tape watches no other, even if it was unfrozen.
            if id(variable) in ids or read[stage.index].intersection(map(id, copies(variable)))
        ]
