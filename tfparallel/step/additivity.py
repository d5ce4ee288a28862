"""Whether losses and metrics of pieces add up to those of the batch: judged on their graphs.

The loss and the metrics are traced with targets, outputs and weights of any number of rows. The
terms of each loss (`terms.py`) must be sums over the rows, and so must what the states of a metric
grow by. That holds for losses and metrics of the user's own as for Keras's.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.extend import is_own
from tfparallel.judge.growth import SUMS, growth_of
from tfparallel.judge.kept_attributes import kept_as_they_were
from tfparallel.judge.placements import Mixed, Placement, Replicate, Shard, Sum
from tfparallel.judge.propagation import Judge, Judged, exchanges_of, judged_graph
from tfparallel.judge.rules.draws import draws
from tfparallel.judge.size import ROWS
from tfparallel.judge.where import line_of
from tfparallel.seams.compiled import compiled_loss, compiled_metrics, loss_terms
from tfparallel.seams.keras import set_mask
from tfparallel.step.loss_terms import REDUCTIONS
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.terms import example_losses, terms_of
from tfparallel.tracing.apart import traced_apart
from tfparallel.tracing.graphs import with_inner, writes_state

__all__ = ["AddsUp", "adds_up", "metrics_of_rows_together", "why_not_by_rows"]

_METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics")


class AddsUp(NamedTuple):
    """What does not add up.

    Attributes:
        why_not: Why the loss does not; None where it does.
        metrics: The metrics that do not, by id, with the reason.
    """

    why_not: str | None
    metrics: dict[int, str]


def why_not_by_rows(model: keras.Model) -> str | None:
    """Why a model's loss has no terms, whatever the data are; None where it has.

    Args:
        model: A compiled model.
    """
    for method in _METHODS:
        if is_own(model, method):
            return f"`{method}` is the user's own"
    loss, metrics = compiled_loss(model), compiled_metrics(model)
    if any(compiled is not None and not compiled.built for compiled in (loss, metrics)):
        return "the loss and the metrics are not built"
    if loss is None or not loss_terms(loss):
        return "there is no loss"
    for term in loss_terms(loss):
        if type(term.loss).__call__ is not keras.losses.Loss.__call__:
            return f"loss '{term.loss.name}' reduces in its own way"
        if term.loss.reduction not in REDUCTIONS:
            return f"loss '{term.loss.name}' has reduction={term.loss.reduction!r}"
    return None


def adds_up(model: keras.Model, y, outputs, sample_weight, masks=()) -> AddsUp:
    """Judges a loss and metrics.

    Args:
        model: A compiled model, its loss and metrics built.
        y: The targets of a batch, or their types.
        outputs: The types of the outputs, in their structure.
        sample_weight: The weights of a batch, or their types, or None.
        masks: The types of the masks that the outputs carry, flat, None for an output without.
    """
    given = y, outputs, sample_weight, list(masks)
    try:
        why_not = next(_faults_of_loss(model, given), None)
    except Exception as error:  # Keras's own error follows, if it is one of the program.
        why_not = f"rows apart from each other have no loss: {str(error)[:200]}"
    return AddsUp(why_not, metrics_of_rows_together(model, *given))


def metrics_of_rows_together(
    model: keras.Model, y, outputs, sample_weight, masks=()
) -> dict[int, str]:
    """The compiled metrics that do not add up, by id, with the reason; arguments as `adds_up`."""
    compiled = compiled_metrics(model)
    found = {}
    for metric in () if compiled is None else compiled.metrics:
        others = {id(each) for each in compiled.metrics} - {id(metric)}
        alone = StepMetrics.divided(compiled, others).summed
        try:
            why_not = _fault_of_metric(alone, (y, outputs, sample_weight, list(masks)))
        except Exception as error:
            why_not = f"rows apart from each other have none: {str(error)[:200]}"
        if why_not is not None:
            name = f"metric '{metric.name}'"
            found[id(metric)] = f"{name} may not be a sum over the examples: {why_not}"
    return found


def _faults_of_loss(model, given) -> Iterator[str]:
    compiled = compiled_loss(model)
    graph, known, (y, outputs, sample_weight) = _placeholders("loss", given)
    losses_given = [each.loss for each in loss_terms(compiled)]
    with graph.as_default(), traced_apart(), kept_as_they_were(losses_given):
        num_rows = tf.compat.v1.placeholder(tf.int32, [])  # Of the whole batch: known to all.
        found = example_losses(compiled, y, outputs, sample_weight)
        of_all = [terms_of(losses, num_rows) for losses in found]
    if any(map(draws, with_inner(graph.get_operations()))):
        yield "a loss draws random numbers, which one device draws for the whole batch"
    if exchanges_of(graph):
        yield "a loss calls a collective, which is for the whole batch"
    if _writes(graph):
        yield "a loss writes a variable, which one device does once a step"
    judge = Judge(graph, known)
    for loss, losses, of_loss in zip(loss_terms(compiled), found, of_all, strict=True):
        for term in of_loss:
            why_not = _no_sum(judge.of(term))
            if why_not is not None:
                yield f"loss '{loss.loss.name}' may look at several examples: {why_not}"
        values = judge.of(losses.values)
        if values.placement != Shard(0) or values.dims is None or values.dims[0] != ROWS:
            yield f"loss '{loss.loss.name}' does not have a row of values for each example"


def _fault_of_metric(alone, given) -> str | None:
    graph, known, (y, outputs, sample_weight) = _placeholders("metric", given)
    with graph.as_default(), traced_apart(), kept_as_they_were(alone.metrics):
        states = {id(v): tf.compat.v1.placeholder(v.dtype, v.shape) for v in alone.variables}
        before = [states[id(v)] for v in alone.variables]  # Two outputs may share a metric.
        after = alone.stateless_update_state(before, y, outputs, sample_weight=sample_weight)
    if any(map(draws, with_inner(graph.get_operations()))):
        return "it draws random numbers"
    if exchanges_of(graph):
        return "it calls a collective"
    if _writes(graph):
        return "it writes a variable that is none of its states"
    if any(outer.dtype == tf.resource for outer, _ in graph.captures):
        return "it reads a variable, which on one device has been updated by then"
    judge = Judge(graph, known)
    for new, old in itertools.zip_longest(map(tf.convert_to_tensor, after), before):
        # One that the first update makes, as that of a number of classes, begins at zero.
        judged = judge.of(new)
        is_new = old is None and (judged.placement in SUMS or judged.is_zero)
        placement = Sum() if is_new else judged.placement
        if old is not None:
            placement = growth_of(judge, new, old, before)
        if placement not in SUMS:
            return _in_words(placement)
    return None


def _writes(graph) -> bool:
    """Whether a variable is written, or a table filled."""
    return any(map(writes_state, with_inner(graph.get_operations())))


def _no_sum(judged: Judged) -> str | None:
    """Why a tensor is no sum over the rows."""
    return None if judged.placement in SUMS or judged.is_zero else _in_words(judged.placement)


def _in_words(placement: Placement) -> str:
    if not isinstance(placement, Mixed):
        return f"it is {placement}, and no sum over the rows"
    return f"operation {placement.operation.type}{line_of(placement.operation)} {placement.why}"


def _placeholders(name, given) -> tuple[tf.Graph, dict[str, Judged], Any]:
    """A graph with targets, outputs with their masks, and weights, of any number of rows."""
    graph, rows, fixed = judged_graph(name), [], {}
    with graph.as_default():

        def placeholder(leaf):
            if leaf is None:
                return None
            shape = tf.TensorShape(leaf.shape)
            if shape.rank == 0:
                tensor = tf.compat.v1.placeholder(leaf.dtype, [])
                fixed[tensor.name] = Judged(Replicate(), ())
                return tensor
            tensor = tf.compat.v1.placeholder(leaf.dtype, [None, *shape[1:]])
            rows.append(tensor)
            return tensor

        y, outputs, sample_weight, masks = keras.tree.map_structure(placeholder, given)
        for output, mask in zip(keras.tree.flatten(outputs), masks, strict=False):
            if mask is not None:
                set_mask(output, mask)
    return graph, fixed | Judge.of_rows(graph, rows).judged, (y, outputs, sample_weight)
