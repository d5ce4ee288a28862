"""Rules for operations that change a tensor's shape: reshape, transpose, repeat, pad."""

import dataclasses

import numpy as np

from tfparallel.judge.placements import Replicate, Shard
from tfparallel.judge.rules.call import Call, folded_by, spread
from tfparallel.judge.size import ROWS, Size, depends_on_rows, is_whole, power_of_rows


def reshaped(call: Call):
    """Judges `Reshape`, which must keep the rows in order and apart."""
    placement, dims, shape = call.placement(), call.dims(), call.inputs[1].value
    if not isinstance(placement, Shard):
        return placement
    if shape is None or dims is None:
        return call.mixed("reshapes to sizes that are unknown at trace time")
    new = shape.ravel().tolist()
    axis = placement.axis
    before = _times(dims[:axis])
    if placement.folded:
        return _reshaped_views(call, placement, dims, new)
    if axis and before != 1 and -1 not in new[1:]:
        is_alike = _times(new[1:]) == _times(dims[axis + 1 :])
        if is_alike and new[0] in (-1, before * dims[axis]):
            # `tensordot` folds the axes before the rows in this way.
            folded = (f"behind {before}",)
            return Shard(0, placement.power, folded), (before * dims[axis], *new[1:])
    place, prefix = 0, 1
    while prefix != before and place < len(new):
        prefix, place = prefix * new[place], place + 1
    while place < len(new) - 1 and new[place] == 1 and prefix == before:
        place += 1
    if prefix != before or place >= len(new):
        return call.mixed("reshapes across the batch axis")
    row_size = _times(dims[axis:]) / ROWS if isinstance(_times(dims[axis:]), Size) else None
    after = new[place + 1 :]
    size = new[place]
    if isinstance(size, int) and size == -1:
        if row_size is None or any(isinstance(each, int) and each < 0 for each in after):
            return call.mixed("reshapes to sizes that are unknown at trace time")
        size = row_size / _times(after) * ROWS
        if not is_whole(size) or power_of_rows(size) != 1:
            return call.mixed("groups several examples into one row")
    if power_of_rows(size) != 1 or not is_whole(size):
        return call.mixed("merges several examples into one row, or splits rows")
    if after.count(-1) and row_size is not None:
        rest = row_size * ROWS / (size * _times(each for each in after if each != -1))
        after = [rest if each == -1 else each for each in after]
    after = [None if isinstance(each, int) and each < 0 else each for each in after]
    return Shard(place, placement.power, placement.folded), (*new[:place], size, *after)


def _reshaped_views(call, placement, dims, new):
    """Judges reshapes of folded rows: of other axes, or one that undoes the folding."""
    undone = (f"behind {new[0]}",)
    if placement.axis == 0 and placement.folded[-1:] == undone and -1 not in new:
        if _times(new[:2]) == dims[0]:
            return Shard(1, placement.power, placement.folded[:-1]), tuple(new)
    is_alike = -1 not in new[1:] and _times(new[1:]) == _times(dims[1:])
    if placement.axis == 0 and (new[0] == dims[0] or (new[0] == -1 and is_alike)):
        sizes = tuple(None if size == -1 else size for size in new[1:])
        return placement, (dims[0], *sizes)
    return call.mixed("works on rows that are not contiguous")


def _times(sizes):
    return np.prod(np.array([*sizes, 1], object))


def transposed(call: Call):
    """Judges `Transpose`."""
    placement, order = call.placement(), call.ints(1)
    if not isinstance(placement, Shard):
        return placement
    if order is None:
        return call.mixed("transposes in an order that is unknown at trace time")
    dims = call.dims()
    sizes = None if dims is None else tuple(dims[axis] for axis in order)
    return Shard(order.index(placement.axis), placement.power, placement.folded), sizes


def expanded(call: Call):
    """Judges `ExpandDims`."""
    placement, axis = call.placement(), call.ints(1)
    if not isinstance(placement, Shard):
        return placement
    rank = call.rank()
    if axis is None or rank is None:
        return call.mixed("inserts an axis at a place that is unknown at trace time")
    place = axis[0] % (rank + 1)
    sizes = list(call.dims())
    sizes.insert(place, 1)
    shifted = placement.axis + (place <= placement.axis)
    shard = dataclasses.replace(placement, axis=shifted)
    return shard, tuple(sizes)


def squeezed(call: Call):
    """Judges `Squeeze`."""
    placement = call.placement()
    if not isinstance(placement, Shard):
        return placement
    dims = call.dims()
    if dims is None:
        return call.mixed("has an input of unknown rank")
    named = [axis % len(dims) for axis in call.op.get_attr("squeeze_dims")]
    removed = named or [axis for axis, size in enumerate(dims) if size == 1]
    if placement.axis in removed or (not named and any(isinstance(size, Size) for size in dims)
                                  and call.op.outputs[0].shape.rank is None):  # fmt: skip
        return call.mixed("drops the batch axis")
    remaining = tuple(size for axis, size in enumerate(dims) if axis not in removed)
    axis = placement.axis - sum(each < placement.axis for each in removed)
    return Shard(axis, placement.power, placement.folded), remaining


def padded(call: Call):
    """Judges `Pad`, of other axes than that of the rows."""
    placement, pads = call.placement(), call.inputs[1].value
    if not isinstance(placement, Shard) or pads is None:
        return call.mixed("pads a sum over the rows, or by a size that is unknown at trace time")
    if any(each.placement != Replicate() for each in call.inputs[2:]):
        return call.mixed("pads with a value that depends on the rows")
    if any(map(depends_on_rows, pads.ravel().tolist())):
        return call.mixed("pads by a size that depends on the number of rows")
    if list(pads[placement.axis]) != [0, 0]:
        return call.mixed("pads the batch axis")
    dims = call.dims()
    sizes = None if dims is None else tuple(d + a + b for d, (a, b) in zip(dims, pads, strict=True))
    return placement, sizes


def tiled(call: Call):
    """Judges `Tile`: of a replicated value to a row for each; or of other axes."""
    placement, times = call.placement(), call.inputs[1].value
    if times is None:
        return call.mixed("repeats a number of times that is unknown at trace time")
    flat = times.ravel().tolist()
    rows = [axis for axis, number in enumerate(flat) if depends_on_rows(number)]
    dims = call.dims()
    sizes = None if dims is None else tuple(d * n for d, n in zip(dims, flat, strict=True))
    if isinstance(placement, Shard):
        if flat[placement.axis] != 1 or rows:
            if placement.axis or rows:
                return call.mixed("repeats the rows")
            return folded_by(placement, flat[0]), sizes
        return placement, sizes
    if placement != Replicate():
        return call.mixed("repeats a sum over the rows")
    return spread(call, rows, sizes, is_one=lambda a: dims is not None and dims[a] == 1)


def filled(call: Call):
    """Judges `Fill`: a constant, perhaps for each row."""
    sizes, placement = call.inputs[0].value, call.placement(1)
    if sizes is None or placement != Replicate():
        return call.mixed("has a size or a value that depends on the rows")
    sizes = tuple(sizes.ravel().tolist())
    rows = [axis for axis, size in enumerate(sizes) if depends_on_rows(size)]
    return spread(call, rows, sizes, is_one=lambda axis: True)


def broadcast(call: Call):
    """Judges `BroadcastTo`: of a replicated value to a row for each; or of other axes."""
    sizes, placement = call.inputs[1].value, call.placement()
    if sizes is None or call.dims() is None:
        return call.mixed("broadcasts to a shape that is unknown at trace time")
    sizes = tuple(sizes.ravel().tolist())
    dims = (*[1] * (len(sizes) - call.rank()), *call.dims())
    if isinstance(placement, Shard):
        axis = placement.axis + len(sizes) - call.rank()
        rows = [a for a, size in enumerate(sizes) if depends_on_rows(size) and a != axis]
        if sizes[axis] != dims[axis] or rows:
            return call.mixed("repeats the rows")
        return Shard(axis, placement.power, placement.folded), sizes
    if placement != Replicate():
        return call.mixed("repeats a sum over the rows")
    rows = [axis for axis, size in enumerate(sizes) if depends_on_rows(size)]
    return spread(call, rows, sizes, is_one=lambda axis: dims[axis] == 1)


def space_to_batch(call: Call):
    """Judges `SpaceToBatchND`, with which dilated convolutions fold space in before the rows."""
    placement, block = call.placement(), call.ints(1)
    if isinstance(placement, Shard) and placement.axis == 0 and not placement.power and block:
        sizes = (call.dims()[0] * _times(block), *[None] * (call.rank() - 1))
        return Shard(0, 0, (*placement.folded, f"space to batch {block}")), sizes
    return call.mixed("folds spatial axes into the batch axis")


def batch_to_space(call: Call):
    """Judges `BatchToSpaceND`, which undoes that."""
    placement, block = call.placement(), call.ints(1)
    undone = (f"space to batch {block}",)
    if isinstance(placement, Shard) and placement.axis == 0 and placement.folded[-1:] == undone:
        sizes = (call.dims()[0] / _times(block), *[None] * (call.rank() - 1))
        return Shard(0, 0, placement.folded[:-1]), sizes
    return call.mixed("splits the batch axis")
