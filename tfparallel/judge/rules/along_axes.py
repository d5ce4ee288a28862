"""Rules for operations along some axes: reductions, sorts, transforms, convolutions."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.judge.placements import Replicate, Shard, Sum
from tfparallel.judge.rules.call import Call, Rule
from tfparallel.judge.size import depends_on_rows

REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")


IMAGES = (
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "MaxPoolV2", "MaxPool3D", "AvgPool"),
    *("AvgPool3D", "ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
    *("ScaleAndTranslate", "ExtractImagePatches", "Dilation2D", "SpaceToDepth"),
    *("DepthToSpace",),
    *("AdjustContrastv2", "AdjustHue", "AdjustSaturation", "MaxPoolWithArgmax", "LRN"),
)

# Operations that keep zeros zero.
_KEEP_ZEROS = ("Identity", "Cast", "Neg", "Abs", "Square", "Sqrt", "Relu", "Tanh", "StopGradient")


def reduced(call: Call):
    """Judges reductions: along the rows, a sum is a sum over them, a mean their mean."""
    placement, kind = call.placement(), call.op.type
    keeps = call.op.get_attr("keep_dims")
    axes, dims = call.axes(1), call.dims()
    if axes is None:
        return call.mixed("reduces over axes that are unknown at trace time")
    if not isinstance(placement, Shard):
        if kind not in ("Sum", "Mean"):
            return call.mixed("reduces sums over the rows, and is not a sum")
        if kind == "Mean" and any(depends_on_rows(dims[axis]) for axis in axes):
            return call.mixed("averages over an axis whose size depends on the rows")
        return placement
    lengths = {a for a, n in enumerate(dims) if a != placement.axis and depends_on_rows(n)}
    padded = [axis for axis in axes if axis in lengths]
    if kind == "Sum" and not all(_is_zero_in_pads(call, call.op.inputs[0], a) for a in padded):
        return call.mixed("sums over padding, which reaches to the longest row of the piece")
    remaining = [1 if a in axes else d for a, d in enumerate(dims) if keeps or a not in axes]
    if placement.axis in axes:
        if lengths - set(axes):
            return call.mixed("sums rows that are padded to the longest row of the piece")
        if kind == "Sum":
            return Sum(placement.power), tuple(remaining)
        if kind == "Mean":
            if lengths:
                return call.mixed("averages over an axis whose size depends on the rows")
            return Sum(placement.power - 1), tuple(remaining)
        return call.mixed("reduces over the batch axis")
    if placement.power and kind not in ("Sum", "Mean", "Max", "Min"):
        return call.mixed("depends on the number of rows")
    if lengths & set(axes) and kind != "Sum":
        return call.mixed("reduces over an axis whose size depends on the rows")
    before = 0 if keeps else sum(axis < placement.axis for axis in axes)
    return Shard(placement.axis - before, placement.power, placement.folded), tuple(remaining)


def _is_zero_in_pads(call, tensor, axis) -> bool:
    """Returns whether the padding of rows along an axis is zero, or was zero and still is."""
    op, judged = tensor.op, call.judged.get(tensor.name)
    default = {"RaggedTensorToTensor": 2, "SparseToDense": 3}.get(op.type)
    if default is not None:
        value = tf.get_static_value(op.inputs[default])
        return value is not None and not value.any()
    if op.type in _KEEP_ZEROS:
        return _is_zero_in_pads(call, op.inputs[0], axis)
    if judged is None or judged.dims is None:
        return False
    size = judged.dims[axis]
    inputs = [call.judged.get(each.name) for each in op.inputs]
    dims = [() if each is None or each.dims is None else each.dims for each in inputs]
    if op.type == "Mul":
        return any(
            len(sizes) == len(judged.dims)
            and sizes[axis] == size
            and _is_zero_in_pads(call, one, axis)
            for sizes, one in zip(dims, op.inputs, strict=True)
        )
    if op.type in ("Greater", "NotEqual"):
        zero = tf.get_static_value(op.inputs[1])
        return zero is not None and not zero.any() and _is_zero_in_pads(call, op.inputs[0], axis)
    if op.type in ("ExpandDims", "StridedSlice") and dims[0].count(size) == 1:
        return _is_zero_in_pads(call, op.inputs[0], dims[0].index(size))
    return False


def added_up(call: Call):
    """Judges `L2Loss`: a sum over all elements."""
    placement = call.placement()
    if isinstance(placement, Shard) and not placement.power:
        return Sum()
    return call.mixed("is a nonlinear function of a sum over the rows")


def along(
    axes: Sequence[int] | Callable[[Call], Any], removes: bool = False, is_linear: bool = False
) -> Rule:
    """Returns a rule for operations along some axes of the first input."""

    def rule(call: Call):
        placement, rank = call.placement(), call.rank()
        if is_linear and isinstance(placement, Sum | Replicate):
            return placement
        if not isinstance(placement, Shard):
            return call.mixed("is a nonlinear function of a sum over the rows")
        used_axes = axes(call) if callable(axes) else axes
        if used_axes is None or rank is None:
            return call.mixed("works along axes that are unknown at trace time")
        used_axes = {axis % rank for axis in used_axes}
        if placement.axis in used_axes:
            return call.mixed("works along the batch axis")
        if placement.power:
            return call.mixed("depends on the number of rows")
        others = [each.placement for each in call.inputs[1:]]
        if any(p != Replicate() and not isinstance(p, Shard) for p in others):
            return call.mixed("has sums over the rows as arguments")
        if any(isinstance(p, Shard) and p.axis != placement.axis for p in others):
            return call.mixed("pairs each example with the others")
        if not removes:
            return Shard(placement.axis, 0, placement.folded)
        removed = sum(axis < placement.axis for axis in used_axes)
        remaining = tuple(size for axis, size in enumerate(call.dims()) if axis not in used_axes)
        return Shard(placement.axis - removed, 0, placement.folded), remaining

    return rule


def along_last(call: Call):
    """Judges operations along the last axis, which is kept or removed."""
    return along([-1])(call)


def batched(num_inner: int) -> Rule:
    """Returns a rule for operations on the last axes; the others are a batch."""
    return along(range(-num_inner, 0))


def images(call: Call):
    """Judges convolutions and the like: rows on axis 0 of the first input, shared weights."""
    placement, *others = [each.placement for each in call.inputs]
    if not isinstance(placement, Shard) or placement.axis != 0 or placement.power:
        return call.mixed("has its examples on another axis than axis 0")
    if any(p != Replicate() for p in others):
        return call.mixed("has weights or an argument that depend on the rows")
    if (call.rank() or 0) < 4:
        return call.mixed("treats the batch as a single image")
    if call.op.type == "MaxPoolWithArgmax" and call.op.get_attr("include_batch_in_index"):
        return call.mixed("returns indices into the whole batch")
    dims = call.dims()
    rank = call.op.outputs[0].shape.rank
    sizes = None if dims is None or rank is None else (dims[0], *[None] * (rank - 1))
    return [(Shard(0, 0, placement.folded), sizes)] * len(call.op.outputs)


def biased(call: Call):
    """Judges `BiasAdd`: along the channel axis."""
    has_channels_first = call.op.get_attr("data_format") == b"NCHW"
    return along([1 if has_channels_first else -1])(call)


def batch_norm(call: Call):
    """Judges a fused batch normalization that reads its moments."""
    if call.op.get_attr("is_training"):
        return call.mixed("computes statistics over all examples")
    first = images(call)
    return (
        [first[0], *[Replicate()] * (len(call.op.outputs) - 1)]
        if isinstance(first, list)
        else first
    )


def transposed_convolution(call: Call):
    """Judges `Conv2DBackpropInput(sizes, weights, rows)`."""
    placement = call.placement(2)
    if placement != Shard(0) or call.placement(1) != Replicate():
        return call.mixed("has its examples on another axis than axis 0")
    sizes = call.inputs[0].value
    rows = call.dims(2)[0]
    if sizes is None or sizes.ravel().tolist()[0] != rows:
        return call.mixed("returns another number of rows")
    return Shard(0), tuple(sizes.ravel().tolist())


def recurrent(call: Call):
    """Judges CuDNN's recurrent layers: `(rows, states, states, weights[, lengths])`."""
    is_v3 = call.op.type == "CudnnRNNV3"
    axis = int(not is_v3 or call.op.get_attr("time_major"))
    rows, h, c, weights, *lengths = [each.placement for each in call.inputs]
    states = {p for p in (h, c) if p != Replicate()}
    if rows != Shard(axis) or states - {Shard(axis)} or weights != Replicate():
        return call.mixed("has its examples on another axis than the batch axis")
    if any(p not in (Shard(0), Replicate()) for p in lengths):
        return call.mixed("has sequence lengths that are not one per example")
    mixed = call.mixed("saves a value of all rows for its gradient")
    return [Shard(axis), Shard(axis), Shard(axis), *[mixed] * (len(call.op.outputs) - 3)]
