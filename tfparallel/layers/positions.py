"""Tensors `(batch, positions, …)` whose positions are divided over devices, in order.

        CPU:0   x₀ … x₃    CPU:1   x₄ … x₇          of 8 positions on 2 devices

Between two layers, such a tensor is an operation that joins the parts, with the parts attached; so
layers, operations and a user's own `call` can use it like any tensor. `positions_of` returns the
attached parts; for an elementwise operation on such tensors, it applies the operation to the parts.
If nothing reads the whole, TensorFlow prunes it.
"""

import inspect
from collections.abc import Sequence

import tensorflow as tf

from tfparallel.data.partition import row_ranges
from tfparallel.judge.positions import AXIS
from tfparallel.layers.parts import Parts, on_devices, on_each
from tfparallel.seams.tensorflow import not_recording, record_operation
from tfparallel.tracing.custom_gradient import is_differentiable

# Operations that compute each element from the same element of their inputs, with broadcasting.
# `Identity` is excluded: a step differentiates by one, at a stage's inputs, and must find it.
_ELEMENTWISE = {
    "Abs", "AddV2", "Cast", "Elu", "Erf", "Exp", "LeakyRelu", "Maximum", "Minimum",
    "Mul", "Neg", "RealDiv", "Relu", "Relu6", "Rsqrt", "Selu", "Sigmoid", "Softplus", "Sqrt",
    "Square", "SquaredDifference", "StopGradient", "Sub", "Tanh",
}  # fmt: skip


def joined(tensors: Sequence[tf.Tensor], devices: Sequence[str], mask=None) -> tf.Tensor:
    """Joins a tensor that is divided by positions, and attaches its parts."""
    parts = Parts(tensors, AXIS, devices, mask)
    tensor = parts.whole()
    tensor._tfparallel_parts = parts
    return tensor


def positions_of(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns each device's positions of a tensor.

    In a graph, the operations bypass the whole, and so does the gradient of a step, which follows
    them back. For a tape, the parts are cut from the whole: it may be asked for that gradient.
    """
    with not_recording():
        known = known_parts(tensor, devices)
        parts = None if known is None else on_devices(devices, tf.identity, known)
    if parts is None:
        return cut(tensor, devices)
    if is_differentiable(tensor):
        with tf.device(devices[0]):
            record_operation("positions", parts, [tensor], lambda *parts: [tf.concat(parts, AXIS)])
    return parts


def known_parts(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor] | None:
    """Returns each device's positions of a tensor, as they were computed; None if it is whole."""
    return _known_parts(tensor, devices, set())


def is_long_enough(tensor: tf.Tensor, devices: Sequence[str]) -> bool:
    """Returns whether each device gets a position; True if only the step knows the length."""
    return tensor.shape[AXIS] is None or tensor.shape[AXIS] >= len(devices)


def check_lengths(tensors: Sequence[tf.Tensor]) -> None:
    """Makes the step raise if lengths that only it knows differ; 1 would broadcast."""
    if len(tensors) > 1 and tensors[0].shape[AXIS] is None:
        first, *others = (tf.shape(tensor)[AXIS] for tensor in tensors)
        tf.debugging.assert_equal(
            tf.stack(others),
            first,
            "Sequences that a layer combines are split in the same way, so they must have the same "
            "length. Pad them to one length, or leave the layer whole with `split={name: None}`.",
        )


def cut(tensor: tf.Tensor, devices: Sequence[str], axis: int = AXIS) -> list[tf.Tensor]:
    """Cuts a whole tensor along an axis: sizes differ by at most one, and may be 0."""
    sizes = [rows.size for rows in row_ranges(_length(tensor, axis), len(devices))]
    with tf.device(devices[0]):
        parts = tf.split(tensor, sizes, axis, num=len(devices))
    return on_devices(devices, tf.identity, parts)


def ends_of(tensor: tf.Tensor, devices: Sequence[str]) -> list:
    """Returns the index of the first position on each device, and the length."""
    ranges = row_ranges(_length(tensor, AXIS), len(devices))
    return [*(rows.start for rows in ranges), ranges[-1].start + ranges[-1].size]


def _length(tensor, axis):
    length = tensor.shape[axis]
    return tf.shape(tensor)[axis] if length is None else length


def _known_parts(tensor, devices, without: set[int]) -> list[tf.Tensor] | None:
    """Returns a tensor's attached parts, or those computed from its inputs; None if none."""
    parts = getattr(tensor, "_tfparallel_parts", None)
    if parts is not None:
        return parts.tensors if parts.axis == AXIS else None
    is_in_graph = tf.is_symbolic_tensor(tensor) and tensor.graph is tf.compat.v1.get_default_graph()
    if not is_in_graph or id(tensor) in without:
        return None
    without.add(id(tensor))
    op, ranks = tensor.op, [each.shape.rank for each in (tensor, *tensor.op.inputs)]
    if op.type not in _ELEMENTWISE or None in ranks or ranks[0] <= AXIS:
        return None
    input_parts = [_known_parts(each, devices, without) for each in op.inputs]
    if not any(input_parts):
        return None
    operands = [
        _operand_parts(each, parts_, tensor, devices)
        for each, parts_ in zip(op.inputs, input_parts, strict=True)
    ]
    if any(parts_ is None for parts_ in operands):
        return None
    check_lengths([each for each, parts_ in zip(op.inputs, input_parts, strict=True) if parts_])
    outputs = on_devices(devices, lambda *parts_: _on_parts(op, parts_), *operands)
    tensor._tfparallel_parts = Parts(outputs, AXIS, devices)
    return outputs


def _operand_parts(each, parts, result, devices) -> list[tf.Tensor] | None:
    """Returns what each device needs of an operand; None if the graph does not show it."""
    axis = AXIS - (len(result.shape) - len(each.shape))
    if axis < 0:
        return on_each(each, devices)
    size, length = each.shape[axis], result.shape[AXIS]
    if parts is not None and axis == AXIS and size == length:
        return parts
    if size == 1 and length != 1:
        return on_each(each, devices)
    return cut(each, devices, axis) if size is not None and size == length else None


def _on_parts(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    function = getattr(tf.raw_ops, op.type)
    parameters = inspect.signature(function).parameters
    attributes = {a.name: op.get_attr(a.name) for a in op.op_def.attr if a.name in parameters}
    names = [argument.name for argument in op.op_def.input_arg]
    return function(**dict(zip(names, inputs, strict=True)), **attributes)
