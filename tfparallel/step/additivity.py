"""Judges on their graphs whether losses and metrics of pieces add up to those of the batch.

The loss and the metrics are traced with targets, outputs and weights of any number of rows. The
terms of each loss (`piece_sums.py`) and the increments of a metric's states must be sums over the
rows. This works for the user's own losses and metrics as well as for Keras's.

The user's Python code may ask for the number of rows, which pieces do not know. If one device knows
it, such losses and metrics are traced with this number, too, and must compute the same. In an eager
step, pieces know their own numbers.

Parts of sequences are judged in the same way, with the positions in place of the rows. The divisor
of a loss is that of whole sequences, and an increment may also be a mean over the positions.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.extend import has_users_code, is_own
from tfparallel.judge.host_random import differs_in_each_trace
from tfparallel.judge.kept_attributes import kept_as_they_were, kept_tensors
from tfparallel.judge.metric_sums import SUMS, growth_of
from tfparallel.judge.placements import Mixed, Placement, Replicate, Shard, Sum
from tfparallel.judge.positions import computed_in, is_divided
from tfparallel.judge.propagation import Judge, Judged, exchanges_of
from tfparallel.judge.rules.draws import draws
from tfparallel.judge.size import ROWS
from tfparallel.judge.source_line import line_of
from tfparallel.judge.static_rows import Computation
from tfparallel.judge.variable_updates import Writes
from tfparallel.seams.compiled import (
    CompileMetrics,
    compiled_loss,
    compiled_metrics,
    loss_terms,
)
from tfparallel.seams.keras import layers_in, weights_held_by
from tfparallel.step.loss_terms import REDUCTIONS, ExampleLosses
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.piece_sums import example_losses, states, terms_of
from tfparallel.step.placeholders import placeholders
from tfparallel.tracing.graphs import with_inner, writes_state
from tfparallel.tracing.trial_trace import traced_apart

_METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics")
# How the increments of parts of sequences add up to those of the whole: as a sum, as the same
# number for all, or as a mean over the positions.
_OVER_POSITIONS = (SUMS, (Replicate(),), (Replicate(), Sum(-1)))


class OverPositions(NamedTuple):
    """How the losses and metrics of parts of sequences add up.

    Attributes:
        why_not: Why the loss is no sum over the positions; None if it is.
        by_position: Whether axis 1 of each loss's values holds positions.
        growth: For the increment of each state of the metrics: `Sum()`, `Replicate()`, or `Sum(-1)`
            for a mean. None if some metric has no such increments.
    """

    why_not: str | None
    by_position: bool
    growth: list[Placement] | None


class AddsUp(NamedTuple):
    """The losses and metrics that do not add up.

    Attributes:
        why_not: Why the loss does not add up; None if it does.
        metrics: The reasons of metrics that do not add up, by id.
        drawing: A loss or metric whose Python code draws numbers, which cannot be those of one
            device; None if there is none.
    """

    why_not: str | None
    metrics: dict[int, str]
    drawing: str | None = None


def why_not_by_rows(model: keras.Model) -> str | None:
    """Why a model's loss has no terms, whatever the data; None if it has.

    Args:
        model: A compiled model.
    """
    for method in _METHODS:
        if is_own(model, method):
            return f"`{method}` is overridden"
    loss, metrics = compiled_loss(model), compiled_metrics(model)
    if any(compiled is not None and not compiled.built for compiled in (loss, metrics)):
        return "the loss and the metrics are not built"
    if loss is None or not loss_terms(loss):
        return "there is no loss"
    for term in loss_terms(loss):
        if type(term.loss).__call__ is not keras.losses.Loss.__call__:
            return f"loss '{term.loss.name}' overrides `__call__`"
        if term.loss.reduction not in REDUCTIONS:
            return f"loss '{term.loss.name}' has reduction={term.loss.reduction!r}"
    return None


def adds_up(
    model: keras.Model, y, outputs, sample_weight, masks=(), row_counts: Collection[int] = ()
) -> AddsUp:
    """Judges whether a loss and metrics add up over pieces.

    Args:
        model: A compiled model with built loss and metrics.
        y: The targets of a batch, or their types.
        outputs: The types of the outputs, in their structure.
        sample_weight: The weights of a batch, or their types, or None.
        masks: A flat list of the types of the outputs' masks; None for an output without one.
        row_counts: The numbers of rows that Python knows, of the batch or of pieces.
    """
    types = y, outputs, sample_weight, list(masks)
    try:
        why_not = next(_faults_of_loss(model, types, row_counts), None)
    except Exception as error:  # If the program is wrong, Keras raises later.
        why_not = f"the loss cannot be computed for a part of the batch: {str(error)[:200]}"
    try:
        drawing = next(_drawing(model, types), None)
    except Exception:  # Neither can it be traced in the step.
        drawing = None
    return AddsUp(why_not, metrics_of_rows_together(model, *types, row_counts), drawing)


def metrics_of_rows_together(
    model: keras.Model, y, outputs, sample_weight, masks=(), row_counts: Collection[int] = ()
) -> dict[int, str]:
    """The reasons of compiled metrics that do not add up, by id; arguments as for `adds_up`."""
    compiled = compiled_metrics(model)
    reasons = {}
    for metric, alone in _each_alone(compiled):
        try:
            why_not = _fault_of_metric(alone, (y, outputs, sample_weight, list(masks)), row_counts)
        except Exception as error:
            why_not = f"it cannot be computed for a part of the batch: {str(error)[:200]}"
        if why_not is not None:
            name = f"metric '{metric.name}'"
            reasons[id(metric)] = f"{name} might not be a sum over the examples: {why_not}"
    return reasons


def _each_alone(compiled: CompileMetrics | None) -> Iterator[tuple[Any, CompileMetrics]]:
    """Yields each metric, and the compiled metrics with this one alone."""
    for metric in () if compiled is None else compiled.metrics:
        others = {id(each) for each in compiled.metrics} - {id(metric)}
        yield metric, StepMetrics.divided(compiled, others).summed


def adds_up_over_positions(
    model: keras.Model,
    metrics: CompileMetrics | None,
    y,
    outputs,
    sample_weight,
    masks: Sequence,
    lengths: Sequence[int],
) -> OverPositions:
    """Judges whether a loss and metrics that add up over rows also do so over positions.

    Args:
        model: A compiled model with a built loss.
        metrics: Its metrics, built, or None.
        y: The targets of some rows.
        outputs: The outputs of these rows.
        sample_weight: The weights of these rows, or None.
        masks: A flat list of the outputs' masks; None for an output without one.
        lengths: The lengths of the outputs and of their parts, if known when the step is traced.
    """
    types, losses = (y, outputs, sample_weight, list(masks)), loss_terms(compiled_loss(model))

    def terms(y, outputs, sample_weight):
        of_examples = example_losses(compiled_loss(model), y, outputs, sample_weight)
        return [each.numerator() for each in of_examples], [each.values for each in of_examples]

    def update(y, outputs, sample_weight):
        before = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in states(metrics)]
        by_id = dict(zip(map(id, states(metrics)), before, strict=True))
        old = [by_id[id(variable)] for variable in metrics.variables]
        after = metrics.stateless_update_state(old, y, outputs, sample_weight=sample_weight)
        by_id = dict(zip(map(id, metrics.variables), after, strict=True))
        return before, list(map(tf.convert_to_tensor, by_id.values()))

    try:
        objects = [each.loss for each in losses]
        judge, (numerators, values) = _of_any_length(terms, objects, types, lengths)
        faults = [_no_sum(judge.of(numerator)) for numerator in numerators]
        why_not = next((fault for fault in faults if fault is not None), None)
        by_position = all(is_divided(judge.of(each)) for each in values)
    except Exception as error:  # What cannot be proved is computed from whole sequences.
        why_not, by_position = str(error)[:200], False
    if not states(metrics):
        return OverPositions(why_not, by_position, [])
    try:
        judge, (before, after) = _of_any_length(update, metrics.metrics, types, lengths)
        growth = [_growth(judge, new, old, before) for new, old in zip(after, before, strict=True)]
    except Exception:
        growth = [None]
    return OverPositions(why_not, by_position, None if None in growth else growth)


def _of_any_length(function, objects, types, lengths: Sequence[int]) -> tuple[Judge, Any]:
    """Traces a function of targets, outputs and weights; returns a judge, and its results.

    Raises:
        ValueError: If it computes something else for one of the lengths.
    """

    def traced(length):
        whole = lengths[0] if lengths else None
        graph, judged, arguments = placeholders(function.__name__, types, (whole, length))
        with graph.as_default(), traced_apart(), kept_as_they_were(objects):
            return graph, judged, function(*arguments)

    graph, judged, results = traced(None)
    computed = computed_in(graph)
    for length in dict.fromkeys(lengths):
        other, _, _ = traced(length)
        if computed_in(other) != computed:
            raise ValueError(f"it computes something else for {length} positions")
    return Judge(graph, judged), results


def _growth(judge: Judge, new, old, states: Sequence) -> Placement | None:
    """Returns how a state's increments of parts of sequences add up; None if it is not known."""
    allowed = _OVER_POSITIONS if new.dtype.is_floating else (SUMS,)
    for each in allowed:
        if growth_of(judge, new, old, states, each) == each[-1]:
            return each[-1]
    return None


def _drawing(model, types) -> Iterator[str]:
    """Yields the losses and metrics of the user's that differ in each trace."""
    users = _users_losses(model)
    if users and differs_in_each_trace(lambda: _traced_loss(model, types).graph):
        yield f"loss {users}"
    for metric, alone in _each_alone(compiled_metrics(model)):
        if has_users_code(metric) and differs_in_each_trace(
            lambda alone=alone: _traced_metric(alone, types)[0]
        ):
            yield f"metric '{metric.name}'"


def _users_losses(model) -> str:
    """The names of losses with the user's code; an empty text if there are none."""
    terms = loss_terms(compiled_loss(model))
    return " or ".join(f"'{each.loss.name}'" for each in terms if has_users_code(each.loss))


class _OfLoss(NamedTuple):
    """The traced losses of a model.

    Attributes:
        graph: Their graph.
        placements: The judgements of its inputs, by name.
        states: The states that the model may change, with their placeholders.
        written: The states that the losses write.
        of_examples: The losses of the examples, by loss.
        terms: The terms of each loss.
    """

    graph: tf.Graph
    placements: dict[str, Judged]
    states: list[tuple[keras.Variable, tf.Tensor]]
    written: Any
    of_examples: list[ExampleLosses]
    terms: list[list[tf.Tensor]]


def _traced_loss(model, types, static_rows=None) -> _OfLoss:
    compiled = compiled_loss(model)
    graph, placements, arguments = placeholders("loss", types, static_rows=static_rows)
    losses = [each.loss for each in loss_terms(compiled)]
    with graph.as_default(), traced_apart(), kept_as_they_were(losses):
        num_rows = tf.compat.v1.placeholder(tf.int32, [])  # Of the whole batch.
        weights = {id(v) for part in layers_in(model) for v in weights_held_by(part)}
        states = [
            (v, tf.compat.v1.placeholder(v.dtype, v.shape))
            for v in (*model.variables, *model.metrics_variables)
            if id(v) not in weights
        ]
        with Writes(states) as scope:
            of_examples = example_losses(compiled, *arguments)
            terms = [terms_of(each, num_rows) for each in of_examples]
    return _OfLoss(graph, placements, states, scope.written, of_examples, terms)


def _faults_of_loss(model, types, row_counts) -> Iterator[str]:
    compiled = compiled_loss(model)
    graph, placements, states, written, of_examples, terms = _traced_loss(model, types)
    computation = Computation.of(graph)
    if any(map(draws, with_inner(graph.get_operations()))):
        yield "a loss draws random numbers, which one device would draw for the whole batch"
    if exchanges_of(graph):
        yield "a loss calls a collective, which needs the whole batch"
    if written or _writes(graph):
        yield "a loss writes a variable, which one device would do once per step"
    # In a piece, the model's call has changed only its own copy by then.
    for variable, state in states:
        why = f"is the state '{variable.path}', which the model may have changed in this step"
        placements[state.name] = Judged(Mixed(state.op, why), None)
    judge = Judge(graph, placements)
    for loss, losses, of_loss in zip(loss_terms(compiled), of_examples, terms, strict=True):
        for term in of_loss:
            why_not = _no_sum(judge.of(term))
            if why_not is not None:
                yield f"loss '{loss.loss.name}' might mix examples: {why_not}"
        values = judge.of(losses.values)
        if values.placement != Shard(0) or values.dims is None or values.dims[0] != ROWS:
            yield f"loss '{loss.loss.name}' does not have one row of values per example"
    users = _users_losses(model)
    for number in row_counts if users else ():
        other = computation.otherwise(Computation.of(_traced_loss(model, types, number).graph))
        if other is not None:
            yield f"loss {users} {_of_number(other)}"


def _of_number(operation: tf.Operation) -> str:
    return (
        "computes something else where Python knows the number of rows: see operation "
        f"{operation.type}{line_of(operation)}"
    )


def _traced_metric(alone, types, static_rows=None):
    graph, placements, (y, outputs, sample_weight) = placeholders(
        "metric", types, static_rows=static_rows
    )
    with graph.as_default(), traced_apart(), kept_as_they_were(alone.metrics):
        states = {id(v): tf.compat.v1.placeholder(v.dtype, v.shape) for v in alone.variables}
        before = [states[id(v)] for v in alone.variables]  # Two outputs may share a metric.
        after = alone.stateless_update_state(before, y, outputs, sample_weight=sample_weight)
        keeps_rows = any(kept_tensors(alone.metrics))
    return graph, placements, before, after, keeps_rows


def _fault_of_metric(alone, types, row_counts) -> str | None:
    graph, placements, before, after, keeps_rows = _traced_metric(alone, types)
    computation = Computation.of(graph)
    if keeps_rows or not after:
        return "its state is not in its variables"
    if any(map(draws, with_inner(graph.get_operations()))):
        return "it draws random numbers"
    if exchanges_of(graph):
        return "it calls a collective"
    if _writes(graph):
        return "it writes a variable that is not part of its state"
    if any(outer.dtype == tf.resource for outer, _ in graph.captures):
        return "it reads a variable, which one device would have updated by then"
    judge = Judge(graph, placements)
    for new, old in itertools.zip_longest(map(tf.convert_to_tensor, after), before):
        # A state that the first update creates, such as for a number of classes, starts at zero.
        judged = judge.of(new)
        is_new = old is None and (judged.placement in SUMS or judged.is_zero)
        placement = Sum() if is_new else judged.placement
        if old is not None:
            placement = growth_of(judge, new, old, before)
        if placement not in SUMS:
            return _in_words(placement)
    for number in row_counts if any(map(has_users_code, alone.metrics)) else ():
        other = computation.otherwise(Computation.of(_traced_metric(alone, types, number)[0]))
        if other is not None:
            return f"it {_of_number(other)}"
    return None


def _writes(graph) -> bool:
    """Whether the graph writes a variable or a table."""
    return any(map(writes_state, with_inner(graph.get_operations())))


def _no_sum(judged: Judged) -> str | None:
    """Why a tensor is not a sum over the rows; None if it is."""
    return None if judged.placement in SUMS or judged.is_zero else _in_words(judged.placement)


def _in_words(placement: Placement) -> str:
    if not isinstance(placement, Mixed):
        return f"it is {placement}, not a sum over the rows"
    return f"operation {placement.operation.type}{line_of(placement.operation)} {placement.why}"
