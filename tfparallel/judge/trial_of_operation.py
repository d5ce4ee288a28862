"""Finds the placements of an operation without a rule by running it alone.

It runs on synthetic inputs, whole and cut in two where the rows are; the results for the parts are
compared with those for the whole.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfparallel.judge.placements import Mixed, Placement, Replicate, Shard, Sum
from tfparallel.judge.size import Size, depends_on_rows
from tfparallel.judge.values import constant
from tfparallel.seams.tensorflow import run_alone

# Operations that make dense tensors of sparse or ragged entries: tried from those rows on.
ENDS = frozenset(
    (
        *("RaggedTensorToTensor", "SparseToDense", "SparseTensorDenseMatMul", "SegmentSum"),
        *("SegmentSumV2", "SegmentMean", "SegmentMax", "SegmentMin", "UnsortedSegmentSum"),
        *("UnsortedSegmentMax", "UnsortedSegmentMin", "SparseSegmentSum", "SparseSegmentMean"),
        *("SparseSegmentSqrtN", "SparseReduceSum", "SparseReduceMax", "ScatterNd"),
        *("DenseBincount", "RaggedBincount", "SparseBincount"),
    )
)
# Stateful in name only: computed by Python or another library.
_FUNCTIONS = ("EagerPyFunc", "PyFunc", "PyFuncStateless", "XlaCallModule")
_LENGTH = 6

_NUM_ROWS, _CUT = 5, 2
_SEEDS, _ALIKE = range(4), 3  # With the last seed, all numbers are equal.
_TOLERANCE = 1e-4


def tried(op: tf.Operation, inputs: Sequence) -> list[Placement]:
    """Returns the placements of an operation's outputs.

    Args:
        op: The operation.
        inputs: The judgements of its inputs.
    """
    number = len(op.outputs)
    placements = [each.placement for each in inputs]
    if not all(isinstance(p, Shard) and not p.power and not p.folded or p == Replicate()
               for p in placements):  # fmt: skip
        return [Mixed(op, "has no rule for sums over the rows")] * number
    values = [n for each in inputs if each.value is not None for n in each.value.ravel().tolist()]
    if any(map(depends_on_rows, values)):
        return [Mixed(op, "has an argument that depends on the number of rows")] * number
    if op.op_def.is_stateful and op.type not in _FUNCTIONS:
        return [Mixed(op, "is stateful, and has no rule")] * number
    agreed: list[Placement] | None = None
    for seed in _SEEDS:
        try:
            with tf.init_scope():
                placed = _compared(op, inputs, seed)
        except Exception as error:
            if seed == _ALIKE:
                continue
            return [Mixed(op, f"has no rule, and cannot be tried alone: {error}"[:200])] * number
        if placed is None:
            continue
        agreed = (
            placed
            if agreed is None
            else [one if one == other else None for one, other in zip(agreed, placed, strict=True)]
        )
    if agreed is None:
        return [Mixed(op, "has no rule, and no finite result on synthetic inputs")] * number
    return [p or Mixed(op, "mixes the examples") for p in agreed]


def tried_with_rows(op: tf.Operation, judge) -> list[Placement]:
    """Returns the placements of an operation's outputs; runs all operations from the rows to it.

    Args:
        op: The operation; some of its inputs are entries of sparse or ragged rows.
        judge: The judge of its graph.
    """
    agreed: list[Placement] | None = None
    for seed in _SEEDS:
        try:
            with tf.init_scope():
                examples = [_synthetic_rows(root, seed) for root in judge.roots]
                runs = []
                for rows in (slice(None), slice(0, _CUT), slice(_CUT, None)):
                    values = {}
                    for root, example in zip(judge.roots, examples, strict=True):
                        pairs = zip(_parts(root), _parts(_rows_of(example, rows)), strict=True)
                        values |= {tensor.name: value for tensor, value in pairs}
                    runs.append(_Run(judge, values, seed, rows).outputs(op))
        except Exception as error:
            return [Mixed(op, f"fails on synthetic rows: {error}"[:200])] * len(op.outputs)
        placed = [_placed(*map(np.asarray, each)) for each in zip(*runs, strict=True)]
        agreed = (
            placed
            if agreed is None
            else [one if one == other else None for one, other in zip(agreed, placed, strict=True)]
        )
    return [p or Mixed(op, "mixes the examples") for p in agreed]


class _Run:
    """Runs operations of a graph one by one, on synthetic rows."""

    def __init__(self, judge, values, seed, rows):
        self._judge = judge
        self._values = dict(values)
        self._seed, self._rows = seed, rows
        self._captured = {inner.name: outer for outer, inner in judge.graph.captures}

    def outputs(self, op) -> list:
        """Returns the outputs of an operation."""
        return run_alone(op, [self._of(each) for each in op.inputs])

    def _of(self, tensor):
        if tensor.name in self._values:
            return self._values[tensor.name]
        if tensor.name in self._captured:
            return self._captured[tensor.name]
        if tensor.op.type == "Const":
            return tf.constant(tf.make_ndarray(tensor.op.get_attr("value")))
        judged = self._judge.of(tensor)
        if isinstance(judged.placement, Shard):
            whole = _synthetic(tensor, judged, (self._seed, len(tensor.name)))
            outputs = [whole[(slice(None),) * judged.placement.axis + (self._rows,)]]
        else:
            outputs = run_alone(tensor.op, [self._of(each) for each in tensor.op.inputs])
        for out, value in zip(tensor.op.outputs, outputs, strict=False):
            self._values[out.name] = value
        return self._values[tensor.name]


def _parts(rows) -> list[tf.Tensor]:
    return tf.nest.flatten(rows, expand_composites=True)


def _rows_of(example, rows: slice):
    if isinstance(example, tf.SparseTensor):
        dense = tf.sparse.to_dense(example)[rows]
        return tf.sparse.from_dense(dense)
    return example[rows]


def _synthetic_rows(root, seed):
    """Returns synthetic sparse or ragged rows; ragged rows have different lengths."""
    random = np.random.default_rng(seed)
    if isinstance(root, tf.SparseTensor):
        shape = [_NUM_ROWS, *(size or _LENGTH for size in root.shape[1:])]
        drawn = random.uniform(0.1, 3, shape) * (random.uniform(size=shape) > 0.3)
        drawn[:, ..., -1] = 1
        return tf.sparse.from_dense(tf.constant(drawn.astype(root.dtype.as_numpy_dtype)))
    if root.ragged_rank != 1:
        raise ValueError("rows are ragged on several axes")
    lengths = [1 + row % 2 for row in range(_NUM_ROWS - 1)] + [_LENGTH]
    shape = [sum(lengths), *(size or _LENGTH for size in root.shape[2:])]
    if root.dtype == tf.string:
        flat = random.choice(["a", "b a", "c b a"], shape).astype(object)
    else:
        flat = random.uniform(0, 3, shape).astype(root.dtype.as_numpy_dtype)
    splits = tf.constant(lengths, root.row_splits.dtype)
    return tf.RaggedTensor.from_row_lengths(tf.constant(flat), splits)


def _compared(op, inputs, seed):
    """Returns the placement of each output, None for mixed; None if values are not finite."""
    arrays = [_synthetic(tensor, each, (seed, i)) for i, (tensor, each) in
            enumerate(zip(op.inputs, inputs, strict=True))]  # fmt: skip
    whole = _run(op, arrays)
    parts = []
    for rows in (slice(0, _CUT), slice(_CUT, None)):
        cut = [
            array[(slice(None),) * each.placement.axis + (rows,)]
            if isinstance(each.placement, Shard)
            else array
            for array, each in zip(arrays, inputs, strict=True)
        ]
        parts.append(_run(op, cut))
    pairs = list(zip(whole, *parts, strict=True))
    if not all(_is_finite(each) for pair in pairs for each in pair):
        return None
    return [_placed(*pair) for pair in pairs]


def _placed(whole, one, other) -> Placement | None:
    if whole.shape == one.shape == other.shape:
        if _same(whole, one) and _same(whole, other):
            return Replicate()
        if whole.dtype.kind in "iuf" and _same(whole, one + other):
            return Sum()
        return None
    for axis in range(whole.ndim):
        shapes = [each.shape[:axis] + each.shape[axis + 1 :] for each in (whole, one, other)]
        if shapes[0] == shapes[1] == shapes[2] and one.shape[axis] == _CUT:
            if _same(whole, np.concatenate([one, other], axis)):
                return Shard(axis)
    return None


def _same(one, other) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind in "OSU b":
        return bool(np.array_equal(one, other))
    return bool(np.allclose(one, other, _TOLERANCE, _TOLERANCE))


def _is_finite(array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _synthetic(tensor, judged, seed):
    value = constant(judged.value)
    if value is not None:
        return np.reshape(np.array(value, tensor.dtype.as_numpy_dtype), judged.value.shape)
    if judged.value is not None and not any(
        isinstance(n, Size) for n in judged.value.ravel().tolist()
    ):
        return judged.value.astype(tensor.dtype.as_numpy_dtype)
    static = tf.get_static_value(tensor)
    if static is not None:
        return static
    if tensor.shape.rank is None:
        raise ValueError("an input has unknown rank")
    axis = judged.placement.axis if isinstance(judged.placement, Shard) else None
    shape = [_NUM_ROWS if a == axis else size or 4 for a, size in enumerate(tensor.shape)]
    random = np.random.default_rng(seed)
    dtype = tensor.dtype
    if dtype == tf.string:
        return random.choice(["a", "b a", "c b a"], shape).astype(object)
    if seed[0] == _ALIKE:
        return np.ones(shape, dtype.as_numpy_dtype)
    if dtype.is_bool:
        return random.uniform(size=shape) > 0.5
    if dtype.is_complex:
        return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(
            dtype.as_numpy_dtype
        )
    if dtype.is_integer:
        return random.integers(0, 3, shape).astype(dtype.as_numpy_dtype)
    if not dtype.is_floating:
        raise ValueError(f"an input has the type {dtype.name}")
    drawn = random.normal(size=shape) if seed[0] else random.uniform(0.1, 1, shape)
    if len(shape) >= 2 and shape[-1] == shape[-2] and axis not in (len(shape) - 1, len(shape) - 2):
        drawn = drawn @ np.swapaxes(drawn, -1, -2) + np.eye(shape[-1])  # As factorizations take it.
    return drawn.astype(dtype.as_numpy_dtype)


def _run(op, arrays) -> list[np.ndarray]:
    return [np.asarray(each) for each in run_alone(op, list(map(tf.constant, arrays)))]
