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
once. The loss, the metrics and the terms that layers add are those of the whole batch:

* "gpipe": the loss is computed once, of the joined outputs, between the forward and the backward
  passes; it may be any.
* "1f1b", "interleaved": of each micro-batch with the divisor of the whole batch (`loss.py`).
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.data import shard as shards
from tfparallel.data.partition import row_ranges
from tfparallel.pipeline.batch_norm import write_averages
from tfparallel.pipeline.cut import Stage, Values, functional_of, with_mask_of
from tfparallel.pipeline.gradient_sums import GradientSums
from tfparallel.pipeline.loss import MicroBatchLoss, check_equal
from tfparallel.pipeline.micro_batch import Pass, StepMemory, computing
from tfparallel.pipeline.pass_scope import PassScope, writable
from tfparallel.pipeline.schedule import Instruction, Schedule

__all__ = ["Step"]


class Step:
    """One step, while it is traced (or run eagerly).

    Args:
        model: The pipelined model.
        stages: Its stages.
        schedule: What each device does.
        devices: Their names.
        recompute: "never", "always" or "except_last".
        timed: Whether to note when each instruction begins and ends.

    Attributes:
        stamps: If timed, the begin and end of each instruction, scalars in seconds.
        ends: The last operation of each instruction, in a graph.
        checked: What must be done before the weights may change.
    """

    def __init__(
        self,
        model: keras.Model,
        stages: Sequence[Stage],
        schedule: Schedule,
        devices: Sequence[str],
        *,
        recompute: str = "never",
        timed: bool = False,
    ):
        self._model = model
        self._stages = stages
        self._schedule = schedule
        self._devices = devices
        self._recompute = recompute
        self._timed = timed
        self._memory = StepMemory()
        self._writable = writable(model, recompute)
        self._sums = GradientSums(model.trainable_variables)
        self._last: dict[int, list] = {device: [] for device in range(len(devices))}
        self._values: list[Values] = []  # By micro-batch: what stages made for others.
        self._taken: dict[tuple, Values] = {}  # By stage and micro-batch: what was sent.
        self._recorded: dict[tuple, tuple] = {}  # Likewise: tape, outputs, added losses, loss.
        self._upstream: dict[tuple, list] = {}  # Gradients that have come back, by tensor.
        self._added: list[list] = []  # By micro-batch: the losses that layers added.
        self._parts: list[tf.Tensor] = []  # Of the loss, by micro-batch.
        self._loss: MicroBatchLoss | None = None
        self.stamps: dict[Instruction, tuple[tf.Tensor, tf.Tensor]] = {}
        self.ends: dict[Instruction, Any] = {}
        self.checked: list[tf.Operation] = []

    @property
    def _is_joined(self) -> bool:
        """Whether the loss is one of the joined outputs."""
        return self._schedule.name == "gpipe"

    def run(self, x, y, sample_weight) -> tuple[Any, tf.Tensor, list]:
        """Runs the passes.

        Returns:
            The outputs of the whole batch, the loss, and the gradient of each trainable weight,
            scaled as the optimizer asks.
        """
        self._x, self._y, self._weights = x, y, sample_weight
        self._cut_inputs(x)
        joined = None
        for device, instruction in self._schedule.in_order():
            if instruction.kind == "backward" and joined is None and self._is_joined:
                joined = self._whole_loss()
            with tf.device(self._devices[device]), self._ordered(device, instruction):
                act = self._forward if instruction.kind == "forward" else self._backward
                done = act(instruction.stage, instruction.micro_batch)
            self._end(device, instruction, done)
        outputs, loss = joined or self._whole_loss()
        write_averages(self._memory)
        return outputs, loss, self._sums.of(self._model.trainable_variables)

    # Micro-batches.

    def _cut_inputs(self, x):
        functional, model = functional_of(self._model), self._model
        x = model.dtype_policy.convert_input(x, model.autocast, model.input_dtype)
        flat = functional._standardize_inputs(x)
        first = next(tensor for tensor in flat if tensor is not None)
        self._num_rows = first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
        number = self._schedule.num_micro_batches
        ranges = row_ranges(self._num_rows, number)
        self._shards = [
            shards.Shard(m, number, start, size, self._num_rows)
            for m, (start, size) in enumerate(ranges)
        ]
        for shard in self._shards:
            start = shard.first_row_used
            rows = slice(start, start + shard.num_rows_used)
            own = {}
            for symbol, tensor in zip(functional.inputs, flat, strict=True):
                own[id(symbol)] = None if tensor is None else tensor[rows]
            self._values.append(own)
            self._added.append([])

    def _rows(self, structure, shard):
        return keras.tree.map_structure(
            lambda t: t if t is None else shard.rows(tf.convert_to_tensor(t)), structure
        )

    # Passes.

    def _forward(self, index, m):
        stage = self._stages[index]
        taken = {
            key: None
            if self._values[m][key] is None
            else with_mask_of(tf.identity(self._values[m][key]), self._values[m][key])
            for key in stage.inputs
        }
        taken = self._stamped(taken)
        self._taken[index, m] = taken
        found = self._run_stage(stage, m, taken, is_repeated=False)
        _, made, added, part = found
        self._values[m].update({key: made[key] for key in stage.outputs})
        self._added[m] += [term for term, _ in added]
        done = [*(made[key] for key in stage.outputs), *(term for term, _ in added)]
        if part is not None:
            self._parts.append(part)
            done.append(part)
        if index == len(self._stages) - 1:
            self._values[m].update(made)
        self._recorded[index, m] = None if self._is_recomputed(m) else found
        return done or list(taken.values())

    def _run_stage(self, stage, m, taken, is_repeated):
        """Calls the stage's layers under a tape; returns tape, outputs, added losses, its loss."""
        shard, part = self._shards[m], None
        is_last = stage.index == len(self._stages) - 1
        own = Pass(self._memory, stage.index, shard, is_repeated)
        with tf.GradientTape() as tape:
            tape.watch(list(self._returned(taken).values()))
            tape.watch([variable._value for variable in self._variables_of(stage)])
            with computing(own), PassScope(self._writable) as scope:
                made = stage.run(taken)
            added = [(loss, tf.ones_like(loss) * shard.weight(loss.dtype)) for loss in scope.losses]
            if is_last and not self._is_joined:
                part = self._part_of_loss(m, self._packed(made, shard))
        return tape, made, added, part

    def _part_of_loss(self, m, predictions):
        if self._loss is None:
            self._loss = self._prepared_loss(predictions)
        shard = self._shards[m]
        return self._loss(
            self._rows(self._y, shard), self._rows(self._weights, shard), predictions
        )

    def _backward(self, index, m):
        stage = self._stages[index]
        if self._is_recomputed(m):
            taken = {
                key: t if t is None else with_mask_of(tf.identity(t), t)
                for key, t in self._taken[index, m].items()
            }
            taken = self._stamped(taken)
            tape, made, added, part = self._run_stage(stage, m, taken, is_repeated=True)
        else:
            taken = self._taken[index, m]
            tape, made, added, part = self._recorded[index, m]
        del self._recorded[index, m]
        scale = self._scale
        targets, seeds = [], []
        for key, tensor in made.items():
            found = self._upstream.pop((index, m, key), None)
            if found and _is_differentiable(tensor):
                targets.append(tensor)
                seeds.append(tf.add_n(found) if len(found) > 1 else tf.identity(found[0]))
        for term, seed in added:
            targets.append(term)
            seeds.append(seed * tf.cast(scale, seed.dtype))
        if part is not None:
            targets.append(part)
            seeds.append(tf.cast(scale, part.dtype))
        if not self._is_recomputed(m):
            targets, seeds = self._stamped_seeds(targets, seeds)
        sent = self._returned(taken)
        variables = self._variables_of(stage)
        if not targets:
            return list(self._sums.latest(variables))
        gradients = tape.gradient(
            targets, [*sent.values(), *(v._value for v in variables)], output_gradients=seeds
        )
        done = []
        for key, gradient in zip(sent, gradients, strict=False):
            if gradient is not None:
                gradient = tf.convert_to_tensor(gradient)
                done.append(gradient)
                self._upstream.setdefault((self._maker(key), m, key), []).append(gradient)
        for variable, gradient in zip(variables, gradients[len(sent) :], strict=True):
            done += self._sums.add(variable, gradient)
        return done or seeds

    def _is_recomputed(self, m) -> bool:
        last = self._schedule.num_micro_batches - 1
        return self._recompute == "always" or (self._recompute == "except_last" and m != last)

    def _returned(self, taken: Values) -> Values:
        """Of what was sent, that whose gradient goes back: not the model's inputs."""
        return {
            key: tensor
            for key, tensor in taken.items()
            if _is_differentiable(tensor) and self._maker(key) >= 0
        }

    def _maker(self, key) -> int:
        """The stage that made a tensor; -1 for the model's inputs."""
        for stage in self._stages:
            if key in stage.outputs:
                return stage.index
        return -1

    def _variables_of(self, stage):
        trained = {id(variable) for variable in self._model.trainable_variables}
        found = {id(v): v for layer in stage.layers for v in layer.trainable_variables}
        return [variable for key, variable in found.items() if key in trained]

    # The whole batch.

    def _whole_loss(self):
        """Joins the outputs; returns them with the loss, whose gradients go on their way back."""
        symbols = [id(symbol) for symbol in functional_of(self._model).outputs]
        # Behind the last forward pass, and not before what is still to be done there.
        with tf.device(self._devices[self._schedule.device_of(len(self._stages) - 1)]):
            flat = [self._joined(key) for key in symbols]
            predictions = self._pack(flat)
            added = [
                tf.add_n([
                    loss * shard.weight(loss.dtype)
                    for shard, loss in zip(self._shards, terms, strict=True)
                ])
                for terms in zip(*self._added, strict=True)
            ]  # fmt: skip
            weights = self._regularized()
            regularizers = [loss for loss, _, _ in weights]
            with tf.GradientTape() as tape:
                watched = [t for t in (*flat, *added, *regularizers) if _is_differentiable(t)]
                tape.watch(watched)
                loss = self._compute_loss(predictions, added + regularizers)
                scaled = self._model.optimizer.scale_loss(loss)
            if self._is_joined:
                found = dict(zip(map(id, watched), tape.gradient(scaled, watched), strict=True))
                self._send_back(symbols, [found.get(id(tensor)) for tensor in flat])
            else:
                self._check(loss, added + regularizers)
        for loss_of_weight, own_tape, variable in weights:
            with tf.device(variable._value.device):
                seed = found.get(id(loss_of_weight)) if self._is_joined else self._scale
                if seed is not None:
                    seed = tf.cast(seed, loss_of_weight.dtype)
                    gradient = own_tape.gradient(
                        loss_of_weight, variable._value, output_gradients=seed
                    )
                    self._sums.add(variable, gradient)
        return predictions, loss

    def _compute_loss(self, predictions, added):
        """Keras's own loss of the whole batch, with the losses that the layers added."""
        model = self._model
        object.__setattr__(model, "_losses_override", added)
        try:
            return model._compute_loss(
                x=self._x,
                y=self._y,
                y_pred=predictions,
                sample_weight=self._weights,
                training=True,
            )
        finally:
            object.__setattr__(model, "_losses_override", [])

    def _check(self, loss, added):
        """The parts must add up, or no weight may change."""
        if not self._parts:
            return
        others = [tf.cast(tf.reduce_sum(term), loss.dtype) for term in added]
        parts = tf.add_n([tf.cast(part, loss.dtype) for part in self._parts] + others)
        check = check_equal(parts, loss, self._model.compute_dtype)
        self.checked = [] if check is None else [check]

    def _send_back(self, symbols, gradients):
        for key, gradient in zip(symbols, gradients, strict=True):
            if gradient is None:
                continue
            gradient = tf.convert_to_tensor(gradient)
            for m, shard in enumerate(self._shards):
                rows = shard.rows(gradient)
                if shard.may_be_idle:
                    # The dummy row has no part in the loss.
                    missing = shard.num_rows_used - shard.num_rows
                    padding = [[0, missing]] + [[0, 0]] * (gradient.shape.rank - 1)
                    rows = tf.pad(rows, padding)
                self._upstream.setdefault((self._maker(key), m, key), []).append(rows)

    def _regularized(self):
        """Each weight's regularization loss, once a step, where the weight is."""
        found = []
        for variable in self._model.trainable_weights:
            if variable.regularizer is not None:
                with tf.device(variable._value.device), tf.GradientTape() as tape:
                    tape.watch(variable._value)
                    loss = variable.regularizer(variable)
                found.append((loss, tape, variable))
        return found

    @property
    def _scale(self):
        """By how much the optimizer scales the loss, for half precision."""
        if self._is_joined:
            return self._model.optimizer.scale_loss(tf.ones([]))
        return self._model.optimizer.scale_loss(tf.ones([], keras.backend.floatx()))

    def _prepared_loss(self, predictions) -> MicroBatchLoss:
        """Finds the loss's divisors, from shapes and masks of the whole batch's outputs."""
        flat = keras.tree.flatten(predictions)
        with tf.control_dependencies(None):
            whole = [
                tf.zeros(tf.concat([[self._num_rows], tf.shape(t)[1:]], 0), t.dtype) for t in flat
            ]
            for tensor, part in zip(whole, flat, strict=True):
                tensor.set_shape([tensor.shape[0], *part.shape[1:]])
            if any(getattr(part, "_keras_mask", None) is not None for part in flat):
                # Masks come from the inputs; of this call nothing else is used, or computed.
                shown = keras.tree.flatten(self._model(self._x, training=False))
                self._model._clear_losses()
                for tensor, like in zip(whole, shown, strict=True):
                    with_mask_of(tensor, like)
            compiled = self._model._compile_loss
            return MicroBatchLoss(compiled, self._y, self._weights, self._pack(whole))

    def _joined(self, key):
        parts, masks = [], []
        for shard, values in zip(self._shards, self._values, strict=True):
            part = values[key]
            if part.shape.rank == 0:
                raise ValueError(
                    "An output of shape () cannot be joined from micro-batches: a mean, a sum or a "
                    "maximum over the examples would each be joined in another way. Outputs of "
                    "shape (batch, …) are required. Received: a scalar. Return a value for each "
                    "example, or add a scalar with `self.add_loss`."
                )
            parts.append(shard.without_dummy_row(part))
            mask = getattr(part, "_keras_mask", None)
            masks.append(mask if mask is None else shard.without_dummy_row(mask))
        joined = tf.concat(parts, 0)
        if masks[0] is not None:
            joined._keras_mask = tf.concat(masks, 0)
        return joined

    def _packed(self, made, shard):
        flat = []
        for symbol in functional_of(self._model).outputs:
            tensor = made[id(symbol)]
            part = shard.without_dummy_row(tensor)
            mask = getattr(tensor, "_keras_mask", None)
            if mask is not None:
                part._keras_mask = shard.without_dummy_row(mask)
            flat.append(part)
        return self._pack(flat)

    def _pack(self, flat):
        packed = keras.tree.pack_sequence_as(functional_of(self._model)._outputs_struct, flat)
        is_single = isinstance(packed, list | tuple) and len(packed) == 1
        return packed[0] if is_single else packed

    # Order, and time.

    def _ordered(self, device, instruction):
        self._instruction = instruction
        return tf.control_dependencies(self._last[device])

    def _stamped(self, taken: Values) -> Values:
        """Notes the begin, once all that was sent is there; what follows waits for that."""
        if not self._timed:
            return taken
        keys = [key for key, tensor in taken.items() if tensor is not None]
        kept = self._after_begin([taken[key] for key in keys])
        return taken | {
            key: with_mask_of(tensor, taken[key]) for key, tensor in zip(keys, kept, strict=True)
        }

    def _stamped_seeds(self, targets, seeds):
        return targets, self._after_begin(seeds) if self._timed else seeds

    def _after_begin(self, tensors):
        with tf.control_dependencies(tensors):
            begin = tf.timestamp()
        self.stamps[self._instruction] = (begin, begin)
        with tf.control_dependencies([begin]):
            return [tf.identity(tensor) for tensor in tensors]

    def _end(self, device, instruction, done):
        done = [t for t in done if t is not None]
        if self._timed and instruction in self.stamps:
            with tf.device(self._devices[device]), tf.control_dependencies(done):
                end = tf.timestamp()
            self.stamps[instruction] = (self.stamps[instruction][0], end)
            done = [end]
        if tf.executing_eagerly() or not done:
            return
        with tf.device(self._devices[device]), tf.control_dependencies(done):
            end = tf.no_op(name=f"end_of_{instruction}_of_stage_{instruction.stage}")
        self._last[device] = [end]
        self.ends[instruction] = end


def _is_differentiable(tensor) -> bool:
    return tensor is not None and tensor.dtype.is_floating
