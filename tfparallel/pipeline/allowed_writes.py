"""What a layer may write while it computes a micro-batch: seeds and metrics.

Any other state that a layer changes in each call (a counter, a running average) raises an error: it
would change M times per step, from parts of the batch, where one device changes it once.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.compute_context import context
from tfparallel.extend import original_class
from tfparallel.keras_compat import renormalizes
from tfparallel.piece import current
from tfparallel.pipeline.batch_norm import batch_norms
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.problems import PlacementError
from tfparallel.replication.refusals import check_activity, check_scales
from tfparallel.seams.functional import Functional
from tfparallel.seams.keras import (
    GLOBAL_SEED_GENERATOR,
    get_global,
    layers_in,
    seed_generators_of,
    storage_of,
)
from tfparallel.strategies.variables import copies
from tfparallel.tracing.graphs import draws_anew, with_inner, writes_variable


class PassScope(keras.StatelessScope):
    """Collects the losses that layers add in `losses`; checks each write.

    Args:
        allowed: The variables that may be written, by id.
        is_recomputed: Whether the pass is recomputed.
    """

    def __init__(self, allowed: Mapping[int, keras.Variable], is_recomputed: bool):
        super().__init__(collect_losses=True)
        self._allowed = allowed
        self._is_recomputed = is_recomputed

    def add_update(self, update) -> None:
        """Writes the value at once; Keras would keep it for later.

        Raises:
            ValueError: If the variable's value would depend on the micro-batches.
        """
        variable, value = update
        if _is_global_seed(variable):
            self._refuse_recompute("Keras's global seed generator")
        elif id(variable) not in self._allowed:
            raise PlacementError(_changes_state(f"a write to '{variable.path}'"))
        value = keras.ops.cast(value, variable.dtype)
        piece = current()
        if piece is not None and piece.may_be_idle and not _is_seed(variable):
            # Ignore a dummy row.
            value = tf.where(piece.num_rows > 0, value, storage_of(variable))
        storage_of(variable).assign(value)

    @contextlib.contextmanager
    def refusing_operations(self) -> Iterator[None]:
        """Checks the operations that the block makes.

        Raises:
            ValueError: If one of them writes a variable that Keras does not know, or draws
                different numbers in a recompute.
        """
        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        allowed = list(map(storage_of, self._allowed.values()))
        generator = get_global(GLOBAL_SEED_GENERATOR)
        allowed += [] if generator is None else [storage_of(generator.state)]
        of_exchanges = getattr(context().gathers, "writes", ())
        for op in other_writes(graph, before, allowed):
            if op.name not in of_exchanges:
                raise PlacementError(_changes_state(f"{op.type} '{op.name}'"))
        operations = graph.get_operations()[before:] if self._is_recomputed else ()
        for op in filter(draws_anew, with_inner(operations)):
            self._refuse_recompute(f"{op.type} '{op.name}'")

    def _refuse_recompute(self, source: str) -> None:
        if self._is_recomputed:
            raise PlacementError(
                "A layer that is recomputed must draw the same random numbers again. It needs its "
                "own `keras.random.SeedGenerator` (`seed=self.seed_generator`). Received: a draw "
                f"from {source}. Or pass recompute='never'."
            )


def other_writes(
    graph: tf.Graph, first: int, allowed: Iterable[tf.Variable] = ()
) -> Iterator[tf.Operation]:
    """Yields the operations of a graph, from index `first` on, that write other variables."""
    handles = {id(variable.handle) for variable in allowed}
    captured = {id(inside) for outside, inside in graph.captures if id(outside) in handles}
    known_handles = captured | handles
    for op in graph.get_operations()[first:]:
        if writes_variable(op) and id(op.inputs[0]) not in known_handles:
            yield op


def _changes_state(received: str) -> str:
    return (
        "A layer that changes its state in each call would do so for each micro-batch and each "
        "recompute, but only once per step on one device. Layers must have no such state. "
        f"Received: {received}. Train this model with `tfparallel.model_parallel`."
    )


def writable(model: keras.Model, recompute: str) -> dict[int, keras.Variable]:
    """Returns the variables that may be written in a pass, by id.

    Metrics inside layers sum over micro-batches as over the batch; a recompute would add twice.
    """
    variables = [seeds.state for layer in layers_in(model) for seeds in seed_generators_of(layer)]
    if recompute == "never":
        variables += states_in_layers(model)
    return {id(variable): variable for variable in variables}


class SumInLayer(NamedTuple):
    """The state of a metric inside a layer, to which each replica adds its rows.

    Attributes:
        variable: The state.
        before: Its value before the step.
    """

    variable: keras.Variable
    before: tf.Tensor

    def combine(self, others: Others) -> None:
        """Writes the sum over all replicas to all copies."""
        with tf.device(storage_of(self.variable).device):
            increment = tf.add_n([copy - self.before for copy in copies(self.variable)])
            (increment,) = others.summed([increment])
            self.variable.assign(self.before + increment)


def sums_in_layers(model: keras.Model, num_replicas: int) -> list[SumInLayer]:
    """Returns the states of metrics inside layers if several replicas add to them."""
    if num_replicas == 1:
        return []
    return [SumInLayer(v, tf.identity(copies(v)[0])) for v in states_in_layers(model)]


def states_in_layers(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of metrics inside a model's layers, each once."""
    inner = [layer for layer in layers_in(model) if layer is not model]
    variables = [v for layer in inner for metric in layer.metrics for v in metric.variables]
    return list({id(variable): variable for variable in variables}.values())


def check_state(model: keras.Model, batch_normalization: str | None) -> None:
    """Raises an error if stages would compute micro-batches differently from the model.

    Raises:
        ValueError: For a `call` of the model's own, for batch normalization without
            `batch_normalization`, and for stateful recurrent layers.
    """
    cls = original_class(model)
    if "call" in vars(model) or cls.call not in (Functional.call, keras.Sequential.call):
        raise PlacementError(
            "A pipeline calls the layers of a model's graph, and would skip a custom `call`. The "
            "model must be functional or Sequential, with Keras's `call`. "
            f"Received: `call` of model '{model.name}' of class {cls.__name__}. Move its code "
            "into layers of the graph, or use `tfparallel.model_parallel`."
        )
    norms = [layer for layer in batch_norms(model) if layer.trainable]
    if norms and batch_normalization is None:
        raise PlacementError(
            "Batch normalization takes the statistics of the whole batch, which no stage sees at "
            "once. batch_normalization='deferred' normalizes each micro-batch with its own "
            "statistics, and updates the moving averages with the whole batch's. The weights then "
            "differ from one device's, unless its layers group the batch in the same way. "
            f"Received: batch_normalization=None with {[layer.name for layer in norms]}. Opt in "
            "(--batch_normalization=deferred), freeze the layers, or use layer or group "
            "normalization."
        )
    renorm = [layer.name for layer in norms if renormalizes(layer)]
    if renorm:
        raise PlacementError(
            "Batch renormalization corrects with moving averages that change in each call. Layers "
            f"that process micro-batches must not have `renorm=True`. Received: {renorm}."
        )
    check_scales(model)
    check_activity(model)
    stateful = [
        layer.name for layer in layers_in(model) if getattr(layer, "stateful", False)
    ]
    if stateful:
        raise PlacementError(
            "Stateful recurrent layers keep a state for each row of the batch, but each "
            "micro-batch has different rows. Layers must not have `stateful=True`. Received: "
            f"{stateful}. Use `tfparallel.model_parallel`, or pass the state as an input."
        )


def _is_seed(variable) -> bool:
    return variable.path.endswith("seed_generator_state")


def _is_global_seed(variable) -> bool:
    generator = get_global(GLOBAL_SEED_GENERATOR)
    return generator is not None and variable is generator.state
