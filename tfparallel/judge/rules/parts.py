"""Rules for operations that join tensors or take parts of them."""

import dataclasses

from tfparallel.judge.placements import Replicate, Shard
from tfparallel.judge.rules.along_axes import along
from tfparallel.judge.rules.by_element import aligned, sum_of
from tfparallel.judge.rules.call import (
    Call,
    Rule,
    are_numbered,
    are_numbers,
    folded_by,
    is_uniform,
    without_numbers,
)
from tfparallel.judge.size import ROWS, Size, depends_on_rows, size_named
from tfparallel.judge.values import slices_of


def packed(call: Call):
    """Judges `Pack`: a new axis, of tensors whose rows are on the same axis."""
    placements = [each.placement for each in call.inputs]
    ranks = [call.rank(i) for i in range(len(placements))]
    if not any(isinstance(p, Shard) for p in placements):
        return sum_of(call, placements, call.inputs)
    in_output = aligned(call, placements, ranks)
    if not isinstance(in_output, list):
        return in_output
    axis = call.op.get_attr("axis") % (ranks[0] + 1)
    if len({without_numbers(p) for p in in_output}) > 1:
        return call.mixed("stacks examples with values that belong to no example")
    placement = in_output[0]
    is_first = placement.numbers == "all" and axis == ranks[0]
    if any(map(are_numbers, in_output[1:])) or (are_numbers(placement) and not is_first):
        return call.mixed("computes with row indices")
    sizes = list(call.dims())
    sizes.insert(axis, len(placements))
    shifted = placement.axis + (axis <= placement.axis)
    numbers = "first" if is_first else ""
    return Shard(shifted, placement.power, placement.folded, numbers), tuple(sizes)


def unpacked(call: Call):
    """Judges `Unpack`, along another axis than that of the rows."""
    axis = call.op.get_attr("axis")
    return [along([axis], removes=True)(call)] * len(call.op.outputs)


def concatenated(call: Call):
    """Judges `ConcatV2`: along another axis, or copies of the rows one after the other."""
    *parts, last = range(len(call.inputs))
    placements = [call.placement(i) for i in parts]
    if not any(isinstance(p, Shard) for p in placements):
        return sum_of(call, placements, call.inputs[:-1])
    axis, rank = call.ints(last), call.rank(0)
    if axis is None or rank is None:
        return call.mixed("concatenates along an axis that is unknown at trace time")
    place = axis[0] % rank
    shards = {without_numbers(p) for p in placements if isinstance(p, Shard)}
    if len(shards) > 1:
        return call.mixed("concatenates tensors whose rows are on different axes")
    (placement,) = shards
    if any(map(are_numbers, placements)):
        is_first = are_numbered(call, 0) and not any(map(are_numbers, placements[1:]))
        if not is_first or place != rank - 1 or place == placement.axis:
            return call.mixed("computes with row indices")
        placement = dataclasses.replace(placements[0], numbers="first")
    filled = [i for i in parts if not isinstance(call.placement(i), Shard)]
    if placement.axis == place:
        if any(call.dims(i)[place] != 0 for i in filled):
            return call.mixed("appends rows to the batch")
        if len(parts) - len(filled) > 1:
            sizes = [call.dims(i) for i in parts if i not in filled]
            if place or any(each[0] != sizes[0][0] for each in sizes):
                return call.mixed("appends rows to the batch")
            return folded_by(placement, len(sizes)), (sizes[0][0] * len(sizes), *sizes[0][1:])
    elif any(not is_uniform(call, i) for i in filled):
        return call.mixed("concatenates examples with values that belong to no example")
    sizes = list(call.dims(next(i for i in parts if i not in filled)))
    if place != placement.axis:
        sizes[place] = sum(call.dims(i)[place] for i in parts)
    return placement, tuple(sizes)


def split_by(axis_at: int, of: int) -> Rule:
    """Returns a rule for `Split`, given the indices of its axis and its tensor."""

    def rule(call: Call):
        placement = call.placement(of)
        if not isinstance(placement, Shard):
            return placement
        axis, dims = call.ints(axis_at), call.dims(of)
        others = [each.placement for i, each in enumerate(call.inputs) if i != of]
        if axis is None or dims is None or any(p != Replicate() for p in others):
            return call.mixed("splits an axis that is unknown at trace time")
        place = axis[0] % len(dims)
        if place == placement.axis:
            number = len(call.op.outputs)
            if place or placement.folded[-1:] != (f"{number} views",) or call.op.type != "Split":
                return call.mixed("splits the batch axis")
            each = Shard(0, placement.power, placement.folded[:-1])
            return [(each, (dims[0] / number, *dims[1:]))] * number
        sizes = tuple(None if a == place else size for a, size in enumerate(dims))
        return [(placement, sizes)] * len(call.op.outputs)

    return rule


def strided(call: Call):
    """Judges `StridedSlice`, which must keep the axis of the rows whole."""
    placement = call.placement()
    if not isinstance(placement, Shard):
        return placement
    rank, dims = call.rank(), call.dims()
    bounds = [call.inputs[i].value for i in (1, 2, 3)]
    if rank is None or any(value is None for value in bounds):
        return call.mixed("slices with bounds that are unknown at trace time")
    number = call.op.inputs[1].shape[0]
    bounds = [value.ravel().tolist() for value in bounds]
    slices = slices_of(call.op, *bounds, rank)
    axis, out, sizes, place = 0, 0, [], None
    masks = [call.op.get_attr("begin_mask"), call.op.get_attr("end_mask")]
    at = _spec_places(call.op, slices, number)
    for index, each in enumerate(slices):
        if each is None:
            sizes.append(1)
            out += 1
            continue
        is_int = not isinstance(each, slice)
        if axis == placement.axis:
            whole = not is_int and each.step is None and _is_all(each, dims[axis], masks, at[index])
            if not whole:
                return call.mixed("selects some of the examples")
            place = out
            sizes.append(dims[axis])
            out += 1
        elif depends_on_rows(dims[axis]) and not _ignores_padding(each):
            return call.mixed("reads the end of rows, which is that of the piece's longest row")
        elif _depends_on_rows(each):
            return call.mixed("takes a slice that depends on the number of rows")
        elif not is_int:
            size = _length(each, dims[axis], masks, at[index])
            if size is None and depends_on_rows(dims[axis]):
                size = size_named((call.op.name, axis, ROWS))
            sizes.append(size)
            out += 1
        axis += 1
    return dataclasses.replace(placement, axis=place), tuple(sizes)


def strided_gradient(call: Call):
    """Judges `StridedSliceGrad`, which puts a slice back among zeros, with all of the rows."""
    placement, dims = call.placement(4), call.dims(4)
    if not isinstance(placement, Shard):
        return placement
    known = [call.inputs[i].value for i in range(4)]
    if dims is None or any(value is None for value in known):
        return call.mixed("slices with bounds that are unknown at trace time")
    sizes, *bounds = (value.ravel().tolist() for value in known)
    slices = slices_of(call.op, *bounds, len(sizes))
    masks = [call.op.get_attr("begin_mask"), call.op.get_attr("end_mask")]
    at = _spec_places(call.op, slices, len(bounds[0]))
    axis = place = 0  # In the result, and in the slice.
    rows_axis = None
    for index, each in enumerate(slices):
        if each is not None:
            if isinstance(each, slice) and place == placement.axis:
                whole = each.step is None and _is_all(each, sizes[axis], masks, at[index])
                rows_axis = axis if whole and sizes[axis] == dims[place] else None
            elif depends_on_rows(sizes[axis]) or _depends_on_rows(each):
                return call.mixed("takes a slice that depends on the number of rows")
            axis += 1
        place += each is None or isinstance(each, slice)
    if rows_axis is None:
        return call.mixed("puts the examples among others")
    return dataclasses.replace(placement, axis=rows_axis), tuple(sizes)


def _ignores_padding(each) -> bool:
    """Returns whether a slice or index selects the same entries of rows that are padded longer."""
    if isinstance(each, int):
        return each >= 0
    return (
        isinstance(each, slice)
        and each.step is None
        and each.stop is None
        and (each.start is None or (isinstance(each.start, int) and each.start >= 0))
    )


def _depends_on_rows(each) -> bool:
    bounds = [each.start, each.stop, each.step] if isinstance(each, slice) else [each]
    return any(map(depends_on_rows, bounds))


def _spec_places(op, slices, number) -> list[int | None]:
    """Returns the bound index of each slice; None for those of an ellipsis, or without bound."""
    ellipsis = op.get_attr("ellipsis_mask")
    places: list[int | None] = []
    for i in range(number):
        if ellipsis >> i & 1:
            places += [None] * (len(slices) - (number - 1))
        else:
            places.append(i)
    return places + [None] * (len(slices) - len(places))


def _is_all(each, size, masks, place) -> bool:
    begins = each.start == 0 or (each.start is None and (place is None or masks[0] >> place & 1))
    ends = each.stop == size or (each.stop is None and (place is None or masks[1] >> place & 1))
    return bool(begins and ends)


def _length(each, size, masks, place):
    if _is_all(each, size, masks, place) and each.step is None:
        return size
    if all(isinstance(bound, int) for bound in (each.start or 0, each.stop or 0, size)):
        return len(range(*each.indices(size)))
    if depends_on_rows(size):
        return size - (each.start or 0)
    if each.step is None and each.start in (0, None) and isinstance(each.stop, Size):
        return each.stop
    return None


def sliced(call: Call):
    """Judges `Slice`, which must keep the axis of the rows whole."""
    placement = call.placement()
    if not isinstance(placement, Shard):
        return placement
    begin, size = call.inputs[1].value, call.inputs[2].value
    if begin is None or size is None or call.dims() is None:
        return call.mixed("slices with bounds that are unknown at trace time")
    axis = placement.axis
    if any(depends_on_rows(n) for each in (begin, size) for a, n in enumerate(each) if a != axis):
        return call.mixed("takes a slice that depends on the number of rows")
    if begin[axis] != 0 or (size[axis] != -1 and size[axis] != call.dims()[axis]):
        return call.mixed("selects some of the examples")
    dims = call.dims()
    sizes = tuple(dims[a] if a == axis else (n if n != -1 else None) for a, n in enumerate(size))
    return placement, sizes
