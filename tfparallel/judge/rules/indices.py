"""Rules for operations that look up by indices, number the rows, or count."""

import dataclasses

import tensorflow as tf

from tfparallel.judge.placements import Replicate, Shard, Sum
from tfparallel.judge.rules.call import (
    Call,
    are_numbered,
    are_numbers,
    first_mixed,
    power_of,
    without_numbers,
)
from tfparallel.judge.size import ROWS, depends_on_rows
from tfparallel.judge.values import SEVERAL_ROWS


def gathered(call: Call):
    """Judges `Gather`: entries of a table for each row, or of each row's own table."""
    axis = call.ints(2) if len(call.inputs) > 2 else [0]
    batch = call.op.get_attr("batch_dims") if call.op.type in ("GatherV2", "ResourceGather") else 0
    params, indices = call.placement(0), call.placement(1)
    rank, rank_of_indices = call.rank(0), call.rank(1)
    if call.op.type == "ResourceGather":
        rank = tf.TensorShape(call.op.outputs[0].shape).rank
        rank = None if rank is None or rank_of_indices is None else rank - rank_of_indices + 1
    if axis is None or rank is None or rank_of_indices is None:
        return call.mixed("looks up along an axis that is unknown at trace time")
    place, batch = axis[0] % rank, batch % max(rank_of_indices, 1) if batch < 0 else batch
    if not isinstance(params, Shard) and indices == Replicate():
        return params
    if isinstance(params, Sum) or isinstance(indices, Sum) or power_of(indices):
        return call.mixed("uses a sum over the rows as a table or as indices")
    sizes = None
    if call.dims(0) is not None and call.op.type != "ResourceGather":
        of_params, others = call.dims(0), call.dims(1)
        sizes = (*of_params[:place], *others[batch:], *of_params[place + 1 :])
    elif call.dims(1) is not None:
        sizes = (*call.dims(1), *[None] * (rank - 1))
    if isinstance(params, Shard):
        has_rows = params == Shard(0) and call.dims(0)[0] == ROWS
        if has_rows and place == 0 and are_numbers(indices) and rank_of_indices == 1:
            return params, sizes
        if params.axis == place or are_numbers(indices):
            return call.mixed("selects some of the examples")
        if are_numbers(params):
            return call.mixed("computes with row indices")
        if isinstance(indices, Shard):
            if params.axis == indices.axis < batch:
                return Shard(params.axis, params.power, params.folded), sizes
            return call.mixed("uses one example as an index into the others")
        if params.axis < batch:
            return call.mixed("has indices with their own rows")
        shift = 0 if params.axis < place else rank_of_indices - batch - 1
        return Shard(params.axis + shift, params.power, params.folded), sizes
    if indices.axis < batch or indices.numbers:
        return call.mixed("combines the examples with a constant that has its own rows")
    return Shard(place + indices.axis - batch, power_of(params), indices.folded), sizes


def numbered(call: Call):
    """Judges `Range`: `Range(0, B)` numbers the rows; other ranges are replicated."""
    bounds = [each.value for each in call.inputs]
    if any(value is None for value in bounds):
        placements = [each.placement for each in call.inputs]
        if all(p == Replicate() for p in placements):
            return Replicate()
        return first_mixed(placements) or call.mixed("makes a range that depends on the rows")
    start, limit, delta = (value.item() for value in bounds)
    if not any(map(depends_on_rows, (start, limit, delta))):
        return Replicate(), (None if delta != 1 else limit - start,)
    if (start, limit, delta) == (0, ROWS, 1):
        return Shard(0, numbers="all"), (ROWS,)
    return call.mixed("makes a range that depends on the number of rows")


def numbers_or_zero(call: Call):
    """Judges `where(B > 1, range(B), 0)`, which `vectorized_map` uses: row numbers for any B."""
    bound = call.inputs[2].value
    is_zero = bound is not None and bound.size == 1 and bound.item() == 0
    condition = call.inputs[0].value
    is_asked = condition is not None and condition.size == 1 and condition.item() == SEVERAL_ROWS
    if not is_zero or not is_asked or not are_numbers(call.placement(1)):
        return None
    return call.placement(1), call.dims(1)


def gathered_nd(call: Call):
    """Judges `GatherNd` of a replicated table, or by row numbers."""
    params, indices = call.placement(0), call.placement(1)
    rank = call.rank(1)
    if are_numbered(call, 1) and without_numbers(indices) == params == Shard(0) and rank > 1:
        of_params, others = call.dims(0), call.dims(1)
        if of_params is not None and of_params[0] == ROWS:
            depth = others[-1]
            return Shard(0), (*others[:-1], *of_params[depth:]) if isinstance(depth, int) else None
    if are_numbers(indices):
        return call.mixed("computes with row indices")
    if params == Replicate() and isinstance(indices, Shard) and indices.axis < rank - 1:
        return Shard(indices.axis, 0, indices.folded), None
    return call.mixed("selects some of the examples")


def one_hot(call: Call):
    """Judges `OneHot` of each row's indices."""
    placement, axis = call.placement(), call.op.get_attr("axis")
    if not isinstance(placement, Shard) or placement.power:
        return call.mixed("one-hot encodes a sum over the rows")
    if any(p.placement != Replicate() for p in call.inputs[1:]):
        return call.mixed("has values or a depth that depend on the rows")
    rank = call.rank()
    place = rank if axis == -1 else axis
    dims, depth = list(call.dims()), call.inputs[1].value
    dims.insert(place, None if depth is None else depth.item())
    return Shard(placement.axis + (place <= placement.axis), 0, placement.folded), tuple(dims)


def cross_entropy(call: Call):
    """Judges losses (rows,) of logits (rows, classes), and their gradients."""
    rows = call.placement()
    if rows != Shard(0, folded=getattr(rows, "folded", ())) or any(
        each.placement != rows for each in call.inputs
    ):
        return call.mixed("pairs examples with values that belong to no example")
    return [(rows, (call.dims()[0],)), (rows, call.dims())]


def in_top_k(call: Call):
    """Judges `InTopKV2(predictions, targets, k)`."""
    predictions, targets, k = [each.placement for each in call.inputs]
    if predictions == targets == Shard(0) and k == Replicate():
        return Shard(0), (call.dims()[0],)
    return call.mixed("pairs examples with values that belong to no example")


def segments(call: Call):
    """Judges `UnsortedSegmentSum` of rows, or of each row; as many segments for any rows."""
    rows, ids, number = (each.placement for each in call.inputs)
    if isinstance(rows, Shard) and number == Replicate() and ids == Shard(rows.axis):
        return Sum(rows.power)
    rank, sizes = call.rank(1), call.dims()  # The first axes, of the ids, become one.
    if isinstance(rows, Shard) and number == ids == Replicate() and rank is not None:
        if rank <= rows.axis and sizes is not None:
            return dataclasses.replace(rows, axis=rows.axis - rank + 1), (None, *sizes[rank:])
    return call.mixed("sums rows into segments that depend on the data")


def scattered(call: Call):
    """Judges `ScatterNd` of rows: into a shape without them, or by row numbers."""
    indices, rows = call.placement(0), call.placement(1)
    sizes = None if call.inputs[2].value is None else tuple(call.inputs[2].value.ravel().tolist())
    if sizes is not None and not any(map(depends_on_rows, sizes)):
        if indices == Shard(0) and isinstance(rows, Shard) and rows.axis == 0:
            return Sum(rows.power)
    if sizes is not None and sizes[0] == ROWS and not any(map(depends_on_rows, sizes[1:])):
        if are_numbered(call, 0) and without_numbers(indices) == rows == Shard(0):
            return rows, sizes
    return call.mixed("scatters rows to places that depend on the data")


def bincount(call: Call):
    """Judges counts, of each row or of all."""
    placement = call.placement()
    size, weights = call.placement(1), call.inputs[2]
    has_none = weights.placement == Replicate() and weights.dims == (0,)
    if (
        placement != Shard(0)
        or size != Replicate()
        or not (has_none or weights.placement == placement)
    ):
        return call.mixed("counts values that belong to no example")
    is_dense = call.op.type == "DenseBincount"
    if is_dense and call.rank() == 2:
        return Shard(0)
    if call.rank() == 1 and not (is_dense and call.op.get_attr("binary_output")):
        return Sum()
    return call.mixed("counts across examples")
