"""What a layer writes while it computes a micro-batch: seeds, metrics; anything else is refused.

A state that a layer changes in each call (a counter, a running average) would change M times a step
where one device changes it once, by the part where one device sees the whole.
"""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.data import shard as shards
from tfparallel.pipeline.batch_norm import batch_norms
from tfparallel.placement.stages import PlacementError
from tfparallel.replication.checks import check_scales
from tfparallel.seams.keras import GLOBAL_SEED_GENERATOR, get_global

__all__ = ["STATEFUL_DRAWS", "PassScope", "check_state", "writable"]

STATEFUL_DRAWS = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "TruncatedNormal",
}


class PassScope(keras.StatelessScope):
    """Keeps the losses that layers add in `losses`; looks at each write.

    Args:
        allowed: The ids of the variables that may be written.
        is_recomputed: Whether the pass is done again.
    """

    def __init__(self, allowed: set[int], is_recomputed: bool):
        super().__init__(collect_losses=True)
        self._allowed = allowed
        self._is_recomputed = is_recomputed

    def add_update(self, update) -> None:
        """Writes at once, where Keras would keep the value for later.

        Raises:
            ValueError: If the variable's value would depend on the micro-batches.
        """
        variable, value = update
        if _is_global_seed(variable):
            self._refuse_recompute("Keras's global seed generator")
        elif id(variable) not in self._allowed:
            raise PlacementError(
                "A layer that changes its state in each call would change it once a micro-batch, "
                "where one device does so once a step; and in each recompute. Layers without such "
                f"a state are required. Received: a write to '{variable.path}'. Train this model "
                "with `tfparallel.model_parallel`."
            )
        value = keras.ops.cast(value, variable.dtype)
        shard = shards.current()
        if shard is not None and shard.may_be_idle and not _is_seed(variable):
            value = tf.where(shard.num_rows > 0, value, variable._value)  # A dummy row is none.
        variable._value.assign(value)

    @contextlib.contextmanager
    def refusing_stateful_draws(self) -> Iterator[None]:
        """Looks at the operations that are made, where the pass is done again.

        Raises:
            ValueError: If one of them draws other numbers each time.
        """
        if not self._is_recomputed or tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        for op in graph.get_operations()[before:]:
            if op.type in STATEFUL_DRAWS:
                self._refuse_recompute(f"{op.type} '{op.name}'")

    def _refuse_recompute(self, what: str) -> None:
        if self._is_recomputed:
            raise PlacementError(
                "In a recompute a layer must draw the numbers that it drew the first time. A "
                "`keras.random.SeedGenerator` of the layer's own is required (`seed=self.seed_"
                f"generator`). Received: a draw from {what}. Or take recompute='never'."
            )


def writable(model: keras.Model, recompute: str) -> set[int]:
    """The ids of the variables that may be written in a pass.

    A metric inside a layer sums over the micro-batches as over the batch, but not twice.
    """
    found = set()
    for layer in model._flatten_layers():
        found |= {id(generator.state) for generator in layer._seed_generators}
        if recompute == "never":
            found |= {id(variable) for metric in layer.metrics for variable in metric.variables}
    return found


def check_state(model: keras.Model, batch_normalization: str | None) -> None:
    """Raises if a layer of the model keeps a state that micro-batches change.

    Raises:
        ValueError: For batch normalization without the choice, and stateful recurrent layers.
    """
    own = [layer for layer in batch_norms(model) if layer.trainable]
    if own and batch_normalization is None:
        raise PlacementError(
            "Batch normalization takes the moments of the whole batch, which no stage sees at "
            "once. batch_normalization='deferred' normalizes each micro-batch by its own moments "
            "and moves the averages by the whole batch's: other weights than one device's, unless "
            "its layers group the batch likewise. Received: batch_normalization=None with "
            f"{[layer.name for layer in own]}. Make the choice (--batch_normalization=deferred), "
            "freeze the layers, or take layer or group normalization."
        )
    renorm = [layer.name for layer in own if layer.renorm]
    if renorm:
        raise PlacementError(
            "Batch renormalization corrects by averages that move in each call. Layers without "
            f"`renorm=True` are required of micro-batches. Received: {renorm}."
        )
    check_scales(model)
    stateful = [
        layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)
    ]
    if stateful:
        raise PlacementError(
            "Stateful recurrent layers keep a state for each row of the batch, and each "
            "micro-batch has other rows. Layers without `stateful=True` are required. Received: "
            f"{stateful}. Take `tfparallel.model_parallel`, or pass the state as an input."
        )


def _is_seed(variable) -> bool:
    return variable.path.endswith("seed_generator_state")


def _is_global_seed(variable) -> bool:
    generator = get_global(GLOBAL_SEED_GENERATOR)
    return generator is not None and variable is generator.state
