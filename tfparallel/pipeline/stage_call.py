"""Calls a stage's layers on a micro-batch.

They are traced with the first micro-batch and called for all (`traced_once.py`).
"""

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.piece import Piece
from tfparallel.pipeline.allowed_writes import PassScope
from tfparallel.pipeline.divided_outputs import note_parts
from tfparallel.pipeline.micro_batches import Batch
from tfparallel.pipeline.pass_context import Pass, StepMemory, computing
from tfparallel.pipeline.stages import Key, Stage, Values, with_mask_of
from tfparallel.pipeline.traced_once import MustTraceEach, TracedOnce
from tfparallel.seams.keras import storage_of
from tfparallel.tracing.custom_gradient import is_differentiable


class StageOutputs(NamedTuple):
    """The results of a stage for a micro-batch.

    Attributes:
        values: Tensors, and the logits behind them.
        losses: The losses that its layers add.
        moments: The moments of batch normalization: `(n, mean, M)` by layer and call.
    """

    values: Values
    losses: list[tf.Tensor]
    moments: dict[Any, tuple]


class StageCall:
    """The layers of a stage, in training.

    Args:
        stage: The stage.
        batch: The whole batch.
        memory: The state that the step's passes share.
        scope: Returns the scope that checks the layers' writes.
        weights: The stage's trainable weights.
        each: Whether to trace each micro-batch.

    Attributes:
        parts_of: Returns the parts of an output that is divided by positions; None if it is whole.
            Set for the last stage, if the loss may read them.
    """

    parts_of: Callable[[tf.Tensor], list[tf.Tensor] | None] | None = None

    def __init__(
        self,
        stage: Stage,
        batch: Batch,
        memory: StepMemory,
        scope: Callable[[], PassScope],
        weights: Iterable[keras.Variable],
        *,
        each: bool,
    ):
        self._stage = stage
        self._batch = batch
        self._memory = memory
        self._scope = scope
        self._call = TracedOnce(self._run, batch.pieces, map(storage_of, weights), each=each)
        self._input_keys: list[Key] = []
        # The results of `_run`: values by these keys, losses, and the moments of batch norms.
        self._output_keys: list[Key] = []
        self._num_losses = 0
        self._moments: dict[Any, int] = {}  # The number of tensors of each layer.

    def __call__(self, inputs: Values, piece: Piece) -> StageOutputs:
        """Calls the layers on the tensors of the stage's `inputs`."""
        self._input_keys = [*inputs]
        results = iter(self._call([*inputs.values()], piece))
        values = {key: next(results) for key in self._output_keys}
        losses = [next(results) for _ in range(self._num_losses)]
        moments = {
            key: tuple(itertools.islice(results, number)) for key, number in self._moments.items()
        }
        return StageOutputs(values, losses, moments)

    def _run(self, tensors: list[Any], piece: Piece) -> tuple[list[Any], list[int]]:
        inputs = dict(zip(self._input_keys, tensors, strict=True))
        self._batch.attach_logits(inputs)
        stage_pass, scope = Pass(self._memory, self._stage.index, piece), self._scope()
        with computing(stage_pass), scope, scope.refusing_operations():
            outputs = self._stage.run(inputs, self._batch.masks)
        if self.parts_of is not None:
            note_parts(outputs, self._batch.output_keys, self.parts_of)
        self._batch.note_logits(outputs)
        outputs = _distinct(outputs, inputs)
        self._output_keys = [key for key in outputs if key not in inputs]
        self._num_losses = len(scope.losses)
        self._moments = {key: len(moments) for key, moments in stage_pass.moments.items()}
        results = [*(outputs[key] for key in self._output_keys), *scope.losses]
        # A tensor that its readers recompute from logits has no gradient of its own.
        remade = {key for key, logits in self._batch.behind.items() if logits.operation is not None}
        targets = [place for place, key in enumerate(self._output_keys) if key not in remade]
        targets += range(len(self._output_keys), len(results))
        moments = itertools.chain.from_iterable(stage_pass.moments.values())
        return [*results, *moments], targets

    def check_seeded(self, keys: Collection[Key]) -> None:
        """Raises unless each target of the stage has a gradient.

        Args:
            keys: The tensors that have one.

        Raises:
            MustTraceEach: If another target has none, since no loss depends on it. If each
                micro-batch is traced, nothing is required.
        """
        targets = {key for k, key in enumerate(self._output_keys) if k in self._call.targets}
        if targets - {*keys}:
            raise MustTraceEach


def _distinct(outputs: Values, inputs: Values) -> Values:
    """Gives each key its own tensor: one under two keys would count its gradient twice.

    A layer may return its input, and the logits behind one output may be another output.
    """
    seen, distinct = {id(tensor) for tensor in inputs.values()}, dict(outputs)
    for key, tensor in outputs.items():
        if key in inputs or tensor is None:
            continue
        if id(tensor) in seen and is_differentiable(tensor):
            with tf.device(tensor.device):
                distinct[key] = with_mask_of(tf.identity(tensor), tensor)
        seen.add(id(distinct[key]))
    return distinct
