"""The rule of each operation: the placements of its outputs, given those of its inputs.

A rule takes a `Call` and returns a placement, or one for each output, alone or with the sizes of
the output's axes. An operation without a rule is tried (`trial_of_operation.py`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.judge import trial_of_operation
from tfparallel.judge.placements import Entries, Listed, Placement, Replicate, Row, Shard
from tfparallel.judge.rules.along_axes import (
    IMAGES,
    REDUCTIONS,
    added_up,
    along,
    along_last,
    batch_norm,
    batched,
    biased,
    images,
    recurrent,
    reduced,
    transposed_convolution,
)
from tfparallel.judge.rules.by_element import BY_ELEMENT, by_element, like
from tfparallel.judge.rules.call import Call, Rule, are_numbers, first_mixed, numbers_a_row
from tfparallel.judge.rules.draws import drawn, draws, shape_argument
from tfparallel.judge.rules.indices import (
    bincount,
    cross_entropy,
    gathered,
    gathered_nd,
    in_top_k,
    numbered,
    numbers_or_zero,
    one_hot,
    scattered,
    segments,
)
from tfparallel.judge.rules.parts import (
    concatenated,
    packed,
    sliced,
    split_by,
    strided,
    strided_gradient,
    unpacked,
)
from tfparallel.judge.rules.products import einsum, matmul
from tfparallel.judge.rules.shapes import (
    batch_to_space,
    broadcast,
    expanded,
    filled,
    padded,
    reshaped,
    space_to_batch,
    squeezed,
    tiled,
    transposed,
)
from tfparallel.judge.rules.sparse_and_ragged import of_entries
from tfparallel.judge.size import depends_on_rows, power_of_rows


def apply(
    op: tf.Operation, inputs: Sequence, judged: Mapping[str, Any]
) -> tuple[list[Placement], list[tuple | None]]:
    """Returns the placement of each output of an operation, and the sizes of its axes if known.

    Args:
        op: The operation.
        inputs: The judgements of its inputs.
        judged: The judgements of tensors before it, by name.
    """
    number = len(op.outputs)
    sizes = (shape_argument(op),) if draws(op) else _SIZES.get(op.type, ())
    inputs = [
        each._replace(placement=Replicate()) if i in sizes and each.value is not None else each
        for i, each in enumerate(inputs)
    ]
    call = Call(op, inputs, judged)
    placements = [each.placement for each in inputs]
    rule = RULES.get(op.type)
    moves = op.type in _MOVE_NUMBERS and getattr(placements[0], "numbers", "") == "all"
    known_sizes = [inputs[i].value for i in sizes if i is not None and i < len(inputs)]
    has_sizes = any(
        depends_on_rows(n) for value in known_sizes if value is not None for n in value.ravel()
    )
    if op.type == "RngReadAndSkip":
        result: Any = Replicate()
    elif any(map(numbers_a_row, inputs)) and (draws(op) or op.type == "Range"):
        result = call.mixed("computes with a row index")
    elif draws(op):
        result = drawn(call)
    elif op.type == "Range":
        result = numbered(call)
    elif op.type == "SelectV2" and (numbers := numbers_or_zero(call)):
        result = numbers
    elif (mixed := first_mixed(placements)) is not None:
        result = mixed
    elif any(map(numbers_a_row, inputs)):
        result = call.mixed("computes with a row index")
    elif has_sizes and op.type not in _SPREAD and not any(isinstance(p, Shard) for p in placements):
        result = call.mixed("has a size that depends on the number of rows")
    elif op.type in _ALONE and any(
        p != Replicate() for i, p in enumerate(placements) if i != _ALONE[op.type]
    ):
        result = call.mixed("has an argument that depends on the rows")
    elif any(placements[i] != Replicate() for i in sizes if i is not None and i < len(inputs)):
        result = call.mixed("has a size that depends on the data")
    elif op.type not in _KNOW_FOLDS and any(getattr(p, "folded", ()) for p in placements):
        result = call.mixed("works on rows that are not contiguous")
    elif op.type not in _KNOW_LENGTHS and any(map(_has_longest, inputs)):
        result = call.mixed("reads rows that are padded to the longest row of the piece")
    elif any(map(are_numbers, placements)) and not (moves or op.type in _KNOW_NUMBERS):
        result = call.mixed("computes with row indices")
    elif op.type in _CALL_PYTHON and all(p == Replicate() for p in placements):
        result = call.mixed(_CALLED_BY_EACH)
    elif all(p == Replicate() for p in placements) and not has_sizes:
        result = Replicate()
    elif any(isinstance(p, Entries) for p in placements):
        result = of_entries(call)
    elif not has_sizes and (row := _of_one_row(placements)) is not None:
        result = row
    elif op.type != "Identity" and any(isinstance(p, Row | Listed) for p in placements):
        result = call.mixed("pairs one row with others")
    elif rule is not None:
        result = rule(call)
    elif has_sizes:
        result = call.mixed("has no rule, and a size that depends on the rows")
    else:
        result = trial_of_operation.tried(op, inputs)
    result = result if isinstance(result, list) else [result] * number
    if moves:
        result = list(map(_still_numbers, result))
    pairs = [each if isinstance(each, tuple) else (each, _dims(call, each)) for each in result]
    return [placement for placement, _ in pairs], [dims for _, dims in pairs]


def _still_numbers(result) -> Any:
    """Returns the result of an operation that moved row numbers, which are with their rows."""
    if isinstance(result, tuple):
        return _still_numbers(result[0]), result[1]
    return dataclasses.replace(result, numbers="all") if isinstance(result, Shard) else result


def _has_longest(judged) -> bool:
    """Returns whether the length of another axis than that of the rows depends on the rows."""
    if judged.dims is None or not isinstance(judged.placement, Shard):
        return False
    axis = judged.placement.axis
    return any(depends_on_rows(size) for a, size in enumerate(judged.dims) if a != axis)


def _of_one_row(placements) -> Row | None:
    """Returns the row if inputs are of one row and replicated values; then outputs are, too."""
    rows = {p for p in placements if isinstance(p, Row)}
    others = [p for p in placements if not isinstance(p, Row)]
    return rows.pop() if len(rows) == 1 and all(p == Replicate() for p in others) else None


def _dims(call, placement) -> tuple | None:
    """Returns the sizes of an output with the inputs' shape, or a broadcast one."""
    out = call.op.outputs[0] if call.op.outputs else None
    if out is None or out.shape.rank is None:
        return None
    sizes: list = [None] * out.shape.rank
    for each in call.inputs:
        if each.dims is None or len(each.dims) > len(sizes) or not each.dims:
            continue
        if call.op.type == "Select" and len(each.dims) < len(sizes):
            continue  # Its condition has one element per row.
        shift = len(sizes) - len(each.dims)
        is_by_element = call.op.type in BY_ELEMENT or call.op.type in _LIKE_INPUT
        for axis, size in enumerate(each.dims, shift):
            holds = isinstance(placement, Shard) and axis == placement.axis
            if (is_by_element and size != 1) or (holds and power_of_rows(size) == 1):
                if sizes[axis] is None or depends_on_rows(size):
                    sizes[axis] = size
    return tuple(sizes)


_LIKE_INPUT = frozenset(
    ("Softmax", "LogSoftmax", "Cumsum", "Cumprod", "BiasAdd", "LRN", "ReverseV2")
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(BY_ELEMENT, by_element),
    **dict.fromkeys(REDUCTIONS, reduced),
    **dict.fromkeys(IMAGES, images),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), transposed_convolution),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2", "NthElement"), along_last),
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT"), batched(1)),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"), batched(2)),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"), matmul),
    **dict.fromkeys(("GatherV2", "Gather", "ResourceGather"), gathered),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), padded),
    **dict.fromkeys(
        ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), cross_entropy
    ),
    "UnsortedSegmentSum": segments,
    "ScatterNd": scattered,
    **dict.fromkeys(("Cumsum", "ReverseV2"), along(lambda call: call.axes(1), is_linear=True)),
    **dict.fromkeys(("Cumprod", "CumulativeLogsumexp"), along(lambda call: call.axes(1))),
    **dict.fromkeys(("ArgMax", "ArgMin"), along(lambda call: call.axes(1), removes=True)),
    **dict.fromkeys(("Bincount", "DenseBincount"), bincount),
    "InTopKV2": in_top_k,
    "Roll": along(lambda call: call.axes(2), is_linear=True),
    "BiasAdd": biased,
    "FusedBatchNormV3": batch_norm,
    **dict.fromkeys(("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"), recurrent),
    "Einsum": einsum,
    "Reshape": reshaped,
    "Transpose": transposed,
    "ExpandDims": expanded,
    "Squeeze": squeezed,
    "Pack": packed,
    "Unpack": unpacked,
    "ConcatV2": concatenated,
    "Split": split_by(0, 1),
    "SplitV": split_by(2, 0),
    "StridedSlice": strided,
    "StridedSliceGrad": strided_gradient,
    "Slice": sliced,
    "Tile": tiled,
    "Fill": filled,
    "BroadcastTo": broadcast,
    "GatherNd": gathered_nd,
    "OneHot": one_hot,
    "L2Loss": added_up,
    **dict.fromkeys(("ZerosLike", "OnesLike"), like),
    "SpaceToBatchND": space_to_batch,
    "BatchToSpaceND": batch_to_space,
    **dict.fromkeys(
        ("StringSplitV2", "DenseCountSparseOutput", "StringNGrams", "UnicodeDecodeWithOffsets"),
        lambda call: [Entries("computed")] * len(call.op.outputs),
    ),
}  # fmt: skip
# Operations that call Python, which may count or draw.
_CALL_PYTHON = frozenset(("EagerPyFunc", "PyFunc"))
_CALLED_BY_EACH = (
    "calls Python without any rows: once for each piece of the batch, not once per step, and a "
    "count or a draw would differ (if the result is always the same, write "
    "`tf.numpy_function(…, stateful=False)`, or compute it before the call)"
)
# Operations of which only one input may have rows, and which.
_ALONE = {
    **dict.fromkeys(
        (*REDUCTIONS, "Reshape", "Transpose", "ExpandDims", "Pad", "PadV2", "MirrorPad", "Tile",
         "BroadcastTo", "StridedSlice", "Slice", "SplitV", "OneHot", "Cumsum", "Cumprod", "ArgMax",
         "ArgMin", "ReverseV2", "Roll", "TopKV2", "SpaceToBatchND", "BatchToSpaceND",
         "CumulativeLogsumexp", "NthElement"),
        0,
    ),
    "Split": 1,
    "StridedSliceGrad": 4,
}  # fmt: skip
# Operations that accept row numbers, and others that move all elements with their rows.
_KNOW_NUMBERS = frozenset(
    ("Range", "Identity", "Cast", "Pack", "ConcatV2", "GatherV2", "GatherNd", "ScatterNd", "Shape")
)
_MOVE_NUMBERS = frozenset(
    ("BroadcastTo", "ExpandDims", "Reshape", "Slice", "Squeeze", "StridedSlice", "Tile",
     "Transpose")
)  # fmt: skip
# Operations that are right for folded rows, and work on each of them.
_KNOW_FOLDS = frozenset(
    (*BY_ELEMENT, *IMAGES, *REDUCTIONS, "ZerosLike", "OnesLike", "BatchToSpaceND", "SpaceToBatchND",
     "Split", "ExpandDims", "Squeeze", "Reshape", "MatMul", "BiasAdd", "Pad", "PadV2", "MirrorPad",
     "Shape", "Softmax", "FusedBatchNormV3", "SoftmaxCrossEntropyWithLogits",
     "SparseSoftmaxCrossEntropyWithLogits")
)  # fmt: skip
# Operations that are right for rows padded to the longest of a piece, and track the padding.
_KNOW_LENGTHS = frozenset(
    (*BY_ELEMENT, *REDUCTIONS, "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul", "Einsum",
     "Transpose", "ExpandDims", "Shape", "Reshape", "StridedSlice", "BiasAdd", "GatherV2",
     "ResourceGather", "ZerosLike", "OnesLike")
)  # fmt: skip
# Operations that may turn a replicated value into a row for each row of the piece.
_SPREAD = frozenset(("Fill", "BroadcastTo", "Tile"))
# Arguments that are sizes, by operation: their values matter.
_SIZES = {
    "Reshape": (1,), "Fill": (0,), "BroadcastTo": (1,), "StridedSlice": (1, 2, 3), "Slice": (1, 2),
    "Tile": (1,), "Pad": (1,), "PadV2": (1,), "MirrorPad": (1,), "Conv2DBackpropInput": (0,),
    "Conv3DBackpropInputV2": (0,), "ScatterNd": (2,), "StridedSliceGrad": (0, 1, 2, 3),
}  # fmt: skip
