"""What works along axes, gives tensors another shape, looks up, or counts."""

import tensorflow as tf

from tests.judge.operations import B, beside, case, mean, raw, rows, same, total
from tfparallel.judge.placements import Replicate, Shard, Sum

_OF_ENTRIES = "gives entries of ragged rows, which are tried from the rows on"
WITHOUT_CASE = {
    "ResourceGather": "needs a variable that lives in a session",
    **dict.fromkeys(("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"), "runs on GPUs alone"),
    **dict.fromkeys(
        ("StringSplitV2", "DenseCountSparseOutput", "StringNGrams", "UnicodeDecodeWithOffsets"),
        _OF_ENTRIES,
    ),
}
ALWAYS_MIXED: set[str] = set()
INTS = {"dtype": "int32"}
SMALL = {"dtype": "float32"}


def axes(kind, *axis, **attributes):
    """An operation along axes that are constants."""
    return lambda x: raw(kind, **attributes)(x, tf.constant(axis[0] if len(axis) == 1 else axis))


def of(operation, views):
    """An operation of views of the rows, one after the other."""
    return lambda x: operation(views(x))


# --- reductions

for _kind in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm", "All", "Any"):
    _more = {"dtype": "bool"} if _kind in ("All", "Any") else {}
    case(_kind, axes(_kind, 1), rows(B, 3, **_more), Shard(0))
    case(_kind, axes(_kind, 0, keep_dims=True), rows(3, B, axis=1, **_more), Shard(1))
    case(_kind, axes(_kind, 0, 2), rows(3, B, 4, axis=1, **_more), Shard(0))
    case(_kind, axes(_kind, -1), rows(2, B, 4, axis=1, **_more), Shard(1))
    if _kind not in ("Sum", "Mean"):
        case(_kind, axes(_kind, 0), rows(B, 3, **_more))
        case(_kind, axes(_kind, 0), total(3, **_more))
for _kind, _power in (("Sum", 0), ("Mean", -1)):
    case(_kind, axes(_kind, 0), rows(B, 3), Sum(_power))
    case(_kind, axes(_kind, 0, 1), rows(B, 3), Sum(_power))
    case(_kind, axes(_kind, 1), rows(3, B, axis=1, power=-1), Sum(_power - 1))
    case(_kind, of(axes(_kind, 0), lambda x: tf.concat([x, -2 * x], 0)), rows(B, 3), Sum(_power))
    case(_kind, of(axes(_kind, 0), lambda x: tf.reshape(x, (-1, 3))), rows(2, B, 3, axis=1),
         Sum(_power))  # fmt: skip
    case(_kind, axes(_kind, 0), mean(3, 4), Sum(-1))
    case(_kind, axes(_kind, 0), same(3, power=1), Replicate(1))
    case(_kind, beside(_kind, lambda x: tf.shape(x)[0] % 2), rows(B, 3))
case("L2Loss", raw("L2Loss"), rows(B, 3), Sum())
case("L2Loss", raw("L2Loss"), mean(3))
case("L2Loss", raw("L2Loss"), rows(B, 3, power=1))

# --- along axes

for _kind in ("Softmax", "LogSoftmax"):
    case(_kind, raw(_kind), rows(B, 3), Shard(0))
    case(_kind, raw(_kind), rows(3, B, axis=1))
    case(_kind, raw(_kind), mean(4, 3))
for _kind in ("TopKV2", "NthElement"):
    case(_kind, axes(_kind, 2), rows(B, 3), Shard(0))
    case(_kind, axes(_kind, 2), rows(3, B, axis=1))
case("TopKV2", lambda x: tf.raw_ops.TopKV2(input=x, k=tf.shape(x)[0]), rows(B, 9))
for _kind in ("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"):
    _function = axes(_kind, 1)
    if _kind == "ReverseV2":
        _function = lambda x: tf.raw_ops.ReverseV2(tensor=x, axis=[1])  # noqa: E731
    case(_kind, _function, rows(B, 3), Shard(0))
    case(_kind, _function, rows(3, B, axis=1))
    case(_kind, _function, mean(4, 3), *([Sum(-1)] if _kind in ("Cumsum", "ReverseV2") else []))
for _kind in ("ArgMax", "ArgMin"):
    case(_kind, axes(_kind, 1), rows(B, 3), Shard(0))
    case(_kind, axes(_kind, 0), rows(3, B, axis=1), Shard(0))
    case(_kind, axes(_kind, 0), rows(B, 3))
case("Roll", lambda x: tf.roll(x, 1, 1), rows(B, 3), Shard(0))
case("Roll", lambda x: tf.roll(x, 1, 0), rows(B, 3))
case("Roll", lambda x: tf.roll(x, tf.shape(x)[0], 1), rows(B, 3))
for _kind, _inner in (("FFT", 1), ("IFFT", 1), ("FFT2D", 2), ("IFFT2D", 2)):
    case(_kind, raw(_kind), rows(B, 3, 4, dtype="complex128"), Shard(0))
    case(_kind, raw(_kind), rows(3, 4, B, axis=2, dtype="complex128"))
for _kind, _size in (("RFFT", [4]), ("RFFT2D", [4, 4])):
    _function = raw(_kind, fft_length=_size, Tcomplex=tf.complex128)
    case(_kind, _function, rows(B, 4, 4), Shard(0))
    case(_kind, _function, rows(4, 4, B, axis=2))
for _kind, _size in (("IRFFT", [4]), ("IRFFT2D", [4, 4])):
    _function = raw(_kind, fft_length=_size, Treal=tf.float64)
    case(_kind, _function, rows(B, 4, 3, dtype="complex128"), Shard(0))
    case(_kind, _function, rows(4, 3, B, axis=2, dtype="complex128"))
case("BiasAdd", raw("BiasAdd"), [rows(B, 3), same(3)], Shard(0))
case("BiasAdd", raw("BiasAdd"), [rows(B, 3), mean(3)])
case("BiasAdd", raw("BiasAdd", data_format="NCHW"), [rows(B, 3, 2, 2), same(3)], Shard(0))
case("BiasAdd", raw("BiasAdd", data_format="NCHW"), [rows(2, B, 2, 3, axis=1), same(B)])

# --- images

_WINDOW = {"ksize": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "padding": "SAME"}
_CUBE = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 1, 1, 1, 1], "padding": "SAME"}
_STEPS = {"strides": [1, 1, 1, 1], "padding": "SAME"}
_IMAGES = {
    **dict.fromkeys(("MaxPool", "AvgPool"), _WINDOW),
    **dict.fromkeys(("MaxPool3D", "AvgPool3D"), _CUBE),
    "MaxPoolV2": {"ksize": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "padding": "SAME"},
    **dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
                    {"size": [8, 6]}),
    "ScaleAndTranslate": {"size": [8, 6], "scale": [2.0, 2.0], "translation": [0.0, 1.0]},
    "ExtractImagePatches": {"ksizes": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1],
                            "padding": "SAME"},
    "SpaceToDepth": {"block_size": 2},
    "LRN": {},
    "MaxPoolWithArgmax": _WINDOW,
    "AdjustContrastv2": {"contrast_factor": 0.5},
    "AdjustHue": {"delta": 0.1},
    "AdjustSaturation": {"scale": 0.5},
}  # fmt: skip
for _kind, _attributes in _IMAGES.items():
    _shape = (B, 4, 4, 4, 2) if "3D" in _kind else (B, 4, 4, 3)
    case(_kind, raw(_kind, **_attributes), rows(*_shape, **SMALL), Shard(0))
    case(_kind, raw(_kind, **_attributes), rows(3, B, *_shape[2:], axis=1, **SMALL))
    case(_kind, raw(_kind, **_attributes), rows(*_shape, power=1, **SMALL))
case("MaxPoolWithArgmax", raw("MaxPoolWithArgmax", **_WINDOW, include_batch_in_index=True),
     rows(B, 4, 4, 3, **SMALL))  # fmt: skip
case("AdjustContrastv2", raw("AdjustContrastv2", contrast_factor=0.5), rows(B, 4, 3, **SMALL))
case("DepthToSpace", raw("DepthToSpace", block_size=2), rows(B, 2, 3, 4), Shard(0))
case("DepthToSpace", raw("DepthToSpace", block_size=2), rows(2, B, 3, 4, axis=1))
_WEIGHTED = {
    "Conv2D": ((B, 4, 4, 3), (2, 2, 3, 2), _STEPS),
    "DepthwiseConv2dNative": ((B, 4, 4, 3), (2, 2, 3, 2), _STEPS),
    "Conv3D": ((B, 4, 4, 4, 3), (2, 2, 2, 3, 2), {"strides": [1] * 5, "padding": "SAME"}),
    "Conv": ((B, 4, 4, 3), (2, 2, 3, 2), _STEPS),
    "Dilation2D": ((B, 4, 4, 3), (2, 2, 3), {**_STEPS, "rates": [1, 1, 1, 1]}),
}
for _kind, (_shape, _weights, _attributes) in _WEIGHTED.items():
    _function = raw(_kind, **_attributes)
    case(_kind, _function, [rows(*_shape, **SMALL), same(*_weights, **SMALL)], Shard(0))
    case(_kind, _function, [rows(*_shape, **SMALL), mean(*_weights, **SMALL)])
    case(_kind, _function,
         [rows(_shape[1], B, *_shape[2:], axis=1, **SMALL), same(*_weights, **SMALL)])  # fmt: skip
case("Conv", lambda x, w: tf.raw_ops.Conv(input=x, filter=w, strides=[1, 1, 1, 1], padding="SAME",
     batch_dims=0), [rows(B, 4, 3, **SMALL), same(2, 2, 3, 2, **SMALL)])  # fmt: skip
case("Conv2DBackpropInput",
     lambda w, x: tf.nn.conv2d_transpose(x, w, (tf.shape(x)[0], 4, 4, 3), 1),
     [same(2, 2, 3, 2, **SMALL), rows(B, 4, 4, 2, **SMALL)], Shard(0))  # fmt: skip
case("Conv2DBackpropInput",
     lambda w, x: tf.nn.conv2d_transpose(x, w, (tf.shape(x)[1], 4, 4, 3), 1),
     [same(2, 2, 3, 2, **SMALL), rows(B, 4, 4, 2, **SMALL)])  # fmt: skip
case("Conv3DBackpropInputV2",
     lambda w, x: tf.nn.conv3d_transpose(x, w, (tf.shape(x)[0], 4, 4, 4, 3), 1),
     [same(2, 2, 2, 3, 2, **SMALL), rows(B, 4, 4, 4, 2, **SMALL)], Shard(0))  # fmt: skip
case("Conv3DBackpropInputV2",
     lambda w, x: tf.nn.conv3d_transpose(x, w, (B, 4, 4, 4, 3), 1),
     [same(2, 2, 2, 3, 2, **SMALL), mean(B, 4, 4, 4, 2, **SMALL)])  # fmt: skip
_NORM = [same(3, **SMALL)] * 4
case("FusedBatchNormV3", lambda *x: tf.raw_ops.FusedBatchNormV3(
    x=x[0], scale=x[1], offset=x[2], mean=x[3], variance=x[4], is_training=False)[:3],
    [rows(B, 2, 2, 3, **SMALL), *_NORM], Shard(0), Replicate(), Replicate())  # fmt: skip
case("FusedBatchNormV3", lambda *x: tf.raw_ops.FusedBatchNormV3(
    x=x[0], scale=x[1], offset=x[2], mean=x[3], variance=x[4], is_training=True),
    [rows(B, 2, 2, 3, **SMALL), *_NORM])  # fmt: skip
for _kind in ("SpaceToBatchND", "BatchToSpaceND"):
    case(_kind, lambda x: tf.batch_to_space(
        tf.tanh(tf.space_to_batch(x, [2], [[0, 0]])), [2], [[0, 0]]),
        rows(B, 4, 3), Shard(0))  # fmt: skip
case("SpaceToBatchND", lambda x: tf.reduce_max(tf.space_to_batch(x, [2], [[0, 0]]), axis=0),
     rows(B, 4, 3))  # fmt: skip
case("BatchToSpaceND", lambda x: tf.batch_to_space(x, [2], [[0, 0]]), rows(2 * B, 4, 3))
case("BatchToSpaceND", lambda x: tf.batch_to_space(
    tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]]), [4], [[0, 0]]), rows(B, 4, 4))  # fmt: skip

# --- products

for _kind in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"):
    _more = {"Tout": tf.float64} if _kind == "BatchMatMulV3" else {}
    _flips = ("transpose_a", "transpose_b") if _kind == "MatMul" else ("adj_x", "adj_y")
    _product, _left = raw(_kind, **_more), raw(_kind, **_more, **{_flips[0]: True})
    _right = raw(_kind, **_more, **{_flips[1]: True})
    case(_kind, _product, [rows(B, 3), same(3, 4)], Shard(0))
    case(_kind, _product, [same(4, 3), rows(3, B, axis=1)], Shard(1))
    case(_kind, _product, [rows(4, B, axis=1), rows(B, 3)], Sum())
    case(_kind, _product, [rows(B, 3, power=-1), same(3, 4, power=1)], Shard(0))
    case(_kind, _left, [rows(3, B, axis=1), same(3, 4)], Shard(0))
    case(_kind, _left, [rows(3, B, axis=1), same(3, 4, power=1)], Shard(0, 1))
    case(_kind, _left, [rows(B, 3), rows(B, 4)], Sum())
    case(_kind, _right, [same(4, 3), rows(B, 3)], Shard(1))
    case(_kind, _product, [mean(4, 3), same(3, 2)], Sum(-1))
    case(_kind, _right, [rows(B, 3), rows(B, 3)])
    case(_kind, _product, [rows(B, 3), mean(3, 3)])
    case(_kind, _left, [rows(B, 3), same(B, 4)])
    case(_kind, _product, [total(2, 3), total(3, 4)])
    if _kind != "MatMul":
        case(_kind, _product, [rows(B, 2, 3), rows(B, 3, 4)], Shard(0))
        case(_kind, _product, [rows(B, 2, 3), same(B, 3, 4)])
for _kind in ("BatchMatMulV2", "BatchMatMulV3"):
    _more = {"Tout": tf.float64} if _kind == "BatchMatMulV3" else {}
    case(_kind, raw(_kind, **_more), [rows(B, 2, 3), same(3, 4)], Shard(0))
    case(_kind, raw(_kind, **_more), [rows(B, 2, 3), same(1, 3, 4)], Shard(0))
    case(_kind, raw(_kind, **_more), [same(4, 1, 2, 3), rows(B, 3, 2)], Shard(1))


def einsum(equation):
    return lambda *xs: tf.raw_ops.Einsum(inputs=xs, equation=equation)


case("Einsum", einsum("bi,io->bo"), [rows(B, 3), same(3, 4)], Shard(0))
case("Einsum", einsum("bi,bo->io"), [rows(B, 3), rows(B, 4)], Sum())
case("Einsum", einsum("bi,bo->io"), [rows(B, 3, power=-1), rows(B, 4)], Sum(-1))
case("Einsum", einsum("bi,bo->bio"), [rows(B, 3), rows(B, 4)], Shard(0))
case("Einsum", einsum("ib,io->ob"), [rows(3, B, axis=1), same(3, 4, power=2)], Shard(1, 2))
case("Einsum", einsum("...i,io->...o"), [rows(2, B, 3, axis=1), same(3, 4)], Shard(1))
case("Einsum", einsum("ij,jk->ik"), [mean(2, 3), same(3, 4)], Sum(-1))
case("Einsum", einsum("bi,ci->bc"), [rows(B, 3), rows(B, 3)])
case("Einsum", einsum("bi,bo->io"), [rows(B, 3), same(B, 4)])
case("Einsum", einsum("bi,bi->i"), [rows(B, 3), mean(B, 3)])
case("Einsum", einsum("bb->b"), rows(B, B))

# --- shapes


def num_rows(x):
    return tf.shape(x)[0]


case("Reshape", lambda x: tf.reshape(x, (-1, 12)), rows(B, 3, 4), Shard(0))
case("Reshape", lambda x: tf.reshape(x, (-1, 4)), rows(B, 3, 4), Shard(0))
case("Reshape", lambda x: tf.reshape(x, (num_rows(x) * 3, 4)), rows(B, 3, 4), Shard(0))
case("Reshape", lambda x: tf.reshape(x, (num_rows(x), -1)), rows(B, 3, 4), Shard(0))
case("Reshape", lambda x: tf.reshape(x, (3, -1)), rows(3, B, 4, axis=1), Shard(1))
case("Reshape", lambda x: tf.reshape(x, (1, 3, -1, 2)), rows(3, B, 4, axis=1), Shard(2))
case("Reshape", lambda x: tf.reshape(x, (1, num_rows(x), 3)), rows(B, 3), Shard(1))
case("Reshape", lambda x: tf.reshape(x, (4, 3)), mean(3, 4), Sum(-1))
case("Reshape", lambda x: tf.reshape(x, (-1, 12)), rows(B, 4))
case("Reshape", lambda x: tf.reshape(x, (3, -1)), rows(B, 3))
case("Reshape", lambda x: tf.reshape(tf.tanh(tf.reshape(x, (-1,))), (3, tf.shape(x)[1])),
     rows(3, B, axis=1), Shard(1))  # fmt: skip
case("Reshape", lambda x: tf.reshape(tf.tanh(tf.reshape(x, (-1, 4))), (3, tf.shape(x)[1], 4)),
     rows(3, B, 4, axis=1), Shard(1))  # fmt: skip
case("Reshape", lambda x: tf.reshape(tf.tanh(tf.reshape(x, (-1,))), (tf.shape(x)[1], 3)),
     rows(3, B, axis=1))  # fmt: skip
case("Reshape", lambda x: tf.reshape(tf.reshape(x, (-1, 4)), (-1, 12)), rows(3, B, 4, axis=1))
case("Reshape", lambda x: tf.reshape(x, (num_rows(x) // 2, 8)), rows(B, 4))
case("Reshape", lambda x: tf.reshape(x, (tf.cast(num_rows(x) / 2, "int32"), 8)), rows(B, 4))
case("Reshape", lambda x, c: tf.reshape(c, (num_rows(x), -1)), [rows(B, 4), same(12)])
case("Transpose", lambda x: tf.transpose(x, (1, 2, 0)), rows(B, 3, 4), Shard(2))
case("Transpose", lambda x: tf.transpose(x), mean(3, 4), Sum(-1))
case("Transpose", lambda x: tf.transpose(x, [num_rows(x) % 2, 1 - num_rows(x) % 2]), rows(B, 4))
for _axis, _place in ((0, 1), (1, 0), (-1, 0)):
    case("ExpandDims", axes("ExpandDims", _axis), rows(B, 3), Shard(_place))
case("ExpandDims", axes("ExpandDims", 0), mean(3), Sum(-1))
case("ExpandDims", lambda x: tf.expand_dims(x, num_rows(x) % 2), rows(B, 3))
case("Squeeze", raw("Squeeze", axis=[1]), rows(B, 1, 3), Shard(0))
case("Squeeze", raw("Squeeze", axis=[0]), rows(1, B, axis=1), Shard(0))
case("Squeeze", raw("Squeeze", axis=[-1]), mean(3, 1), Sum(-1))
case("Squeeze", raw("Squeeze"), rows(B, 1, 3))
case("Squeeze", raw("Squeeze", axis=[0]), rows(B, 3))
for _kind, _more in (("Pad", {}), ("PadV2", {"constant_values": 2.0})):
    case(_kind, raw(_kind, paddings=[[0, 0], [1, 2]], **_more), rows(B, 3, **SMALL), Shard(0))
    case(_kind, raw(_kind, paddings=[[0, 1], [0, 0]], **_more), rows(B, 3, **SMALL))
    case(_kind, raw(_kind, paddings=[[0, 1], [0, 0]], **_more), mean(4, 3, **SMALL))
    case(_kind, beside(_kind, lambda x: [[0, 0], [0, num_rows(x)]], **_more), rows(B, 3, **SMALL))
case("PadV2", lambda x, c: tf.raw_ops.PadV2(input=x, paddings=[[0, 0], [0, 1]], constant_values=c),
     [rows(B, 3), mean()])  # fmt: skip
case("MirrorPad", raw("MirrorPad", paddings=[[0, 0], [1, 1]], mode="REFLECT"), rows(B, 3), Shard(0))
case("MirrorPad", raw("MirrorPad", paddings=[[1, 1], [0, 0]], mode="REFLECT"), rows(B, 3))
case("Tile", lambda x: tf.tile(x, (1, 2)), rows(B, 3), Shard(0))
case("Tile", lambda x, c: tf.tile(c[None], (num_rows(x), 2)), [rows(B, 3), same(3)], Shard(0))
case("Tile", lambda x: tf.reduce_max(tf.tile(x, (2, 1)), axis=0), rows(B, 3))
case("Tile", lambda x: tf.tile(x, (1, num_rows(x))), rows(B, 3))
case("Tile", lambda x, c: tf.tile(c, (num_rows(x), 1)), [rows(B, 3), same(2, 3)])
case("Tile", lambda x: tf.tile(x, (2,)), mean(3))
case("Fill", lambda x: tf.fill((num_rows(x), 3), 2.0), rows(B, 3), Shard(0))
case("Fill", lambda x: tf.fill((4, num_rows(x)), 2.0), rows(B, 3), Shard(1))
case("Fill", lambda x, c: tf.fill((num_rows(x), 3), c), [rows(B, 3), mean()])
case("Fill", lambda x: tf.fill((num_rows(x), num_rows(x)), 2.0), rows(B, 3))
case("Fill", lambda x: tf.fill((num_rows(x) // 2,), 2.0), rows(B, 3))
case("BroadcastTo", lambda x, c: tf.broadcast_to(c, tf.shape(x)), [rows(B, 3), same(3)], Shard(0))
case("BroadcastTo", lambda x: tf.broadcast_to(x, (4, num_rows(x), 3)), rows(B, 3), Shard(1))
case("BroadcastTo", lambda x: tf.broadcast_to(x[:, :1], (num_rows(x), 4)), rows(B, 3), Shard(0))
case("BroadcastTo", lambda x: tf.broadcast_to(x, (num_rows(x), num_rows(x))), rows(B, 1))
case("BroadcastTo", lambda x, c: tf.broadcast_to(c, tf.shape(x)), [rows(B, 3), mean(3)])
case("BroadcastTo", lambda x, c: tf.broadcast_to(c, tf.shape(x)), [rows(B, 3), same(B, 3)])

# --- parts


def stack(*xs, axis=0):
    return tf.raw_ops.Pack(values=xs, axis=axis)


case("Pack", stack, [rows(B, 3), rows(B, 3)], Shard(1))
case("Pack", lambda *xs: stack(*xs, axis=-1), [rows(B, 3), rows(B, 3)], Shard(0))
case("Pack", stack, [mean(3), mean(3)], Sum(-1))
case("Pack", stack, [mean(3), same(3)], Sum(-1))
case("Pack", stack, [mean(3), total(3)])
case("Pack", stack, [rows(B, 3), same(B, 3)])
case("Pack", stack, [rows(B, 3), rows(3, B, axis=1)])
case("Unpack", raw("Unpack", num=3, axis=1), rows(B, 3), Shard(0))
case("Unpack", raw("Unpack", num=3, axis=0), rows(3, B, axis=1), Shard(0))
case("Unpack", raw("Unpack", num=B, axis=0), rows(B, 3))


def concat(axis):
    return lambda *xs: tf.raw_ops.ConcatV2(values=xs, axis=axis)


case("ConcatV2", concat(1), [rows(B, 3), rows(B, 2)], Shard(0))
case("ConcatV2", concat(-2), [rows(3, B, axis=1), rows(2, B, axis=1)], Shard(1))
case("ConcatV2", lambda x: tf.concat([x, tf.ones((num_rows(x), 1), x.dtype)], 1), rows(B, 3),
     Shard(0))  # fmt: skip
case("ConcatV2", concat(0), [mean(3), same(2)], Sum(-1))
case("ConcatV2", concat(0), [total(3), mean(2)])
case("ConcatV2", lambda x: tf.concat([x, tf.ones((1, 3), x.dtype)], 0), rows(B, 3))
case("ConcatV2", concat(1), [rows(B, 3), same(B, 2)])
case("ConcatV2", concat(1), [rows(B, 3), mean(B, 2)])
case("ConcatV2", concat(0), [rows(3, B, axis=1), rows(B, B)])
case("ConcatV2", lambda x: tf.reduce_max(tf.concat([x, x], 0), 0), rows(B, 3))
case("ConcatV2", lambda x: tf.split(tf.concat([tf.range(num_rows(x)), x], 0), 2, 0),
     rows(B, **INTS))  # fmt: skip
case("Split", lambda x: tf.split(x, 2, axis=1), rows(B, 4), Shard(0))
case("Split", lambda x: tf.split(tf.tanh(tf.concat([x, -x], 0)), 2, 0), rows(B, 4), Shard(0))
case("Unpack", lambda x: tf.reshape(x, tf.unstack(tf.shape(x))), rows(B, 3), Shard(0))
case("Split", lambda x: tf.reshape(x, tf.concat(tf.split(tf.shape(x), 2), 0)), rows(B, 3), Shard(0))
case("SplitV", lambda x: tf.reshape(x, tf.concat(tf.split(tf.shape(x), [1, 1]), 0)), rows(B, 3),
     Shard(0))  # fmt: skip
case("SplitV", lambda x: tf.reshape(x, tf.concat(tf.split(tf.shape(x), [1, 1])[::-1], 0)),
     rows(B, 3))  # fmt: skip
case("Split", lambda x: tf.split(x, 2, axis=0), mean(4), Sum(-1))
case("Split", lambda x: tf.split(x, 2, axis=0), rows(B + 1, 4))
case("Split", lambda x: tf.split(tf.concat([x, -x, x, x], 0), 2, 0), rows(B, 4))
case("SplitV", lambda x: tf.split(x, [1, 3], axis=1), rows(B, 4), Shard(0))
case("SplitV", lambda x: tf.split(x, [1, 3], axis=0), mean(4), Sum(-1))
case("SplitV", lambda x: tf.split(x, [1, -1], axis=0, num=2), rows(B, 4))
case("SplitV", lambda x: tf.split(x, [num_rows(x), 9 - num_rows(x)], axis=1), rows(B, 9))
case("StridedSlice", lambda x: x[:, 1:3], rows(B, 4), Shard(0))
case("StridedSlice", lambda x: x[:, None, ::2], rows(B, 4), Shard(0))
case("StridedSlice", lambda x: x[None, ..., -1], rows(B, 3, 4), Shard(1))
case("StridedSlice", lambda x: x[1], rows(3, B, axis=1), Shard(0))
case("StridedSlice", lambda x: x[: num_rows(x), 1], rows(B, 4), Shard(0))
case("StridedSlice", lambda x: x[..., 1:], rows(3, B, 4, axis=1), Shard(1))
case("StridedSlice", lambda x: x[1:], mean(4), Sum(-1))
case("StridedSlice", lambda x: x[0], rows(B, 4))
case("StridedSlice", lambda x: x[1:], rows(B, 4))
case("StridedSlice", lambda x: x[::-1], rows(B, 4))
case("StridedSlice", lambda x: x[: num_rows(x) // 2], rows(B, 4))
case("StridedSlice", lambda x: x[:, num_rows(x) % 3], rows(B, 4))
case("StridedSlice", lambda x: x[:, : num_rows(x)], rows(B, 9))
case("StridedSlice", lambda x: x[:, :: num_rows(x)], rows(B, 9))
case("StridedSlice", lambda x, i: x[:, i:], [rows(B, 4), total(**INTS)])
case("StridedSlice", lambda x, i: x[:, i], [rows(B, 4), total(**INTS)])
case("StridedSlice", lambda x, c: tf.reduce_sum(c[: num_rows(x)]), [rows(B, 4), same(9)])
case("StridedSlice", lambda x, c: c[num_rows(x) % 2], [rows(B, 4), mean(9)])


def put_back(sizes, **options):
    """The gradient of a slice, of a tensor of these sizes; None is the number of rows."""
    masks = {name: options.pop(name, 0) for name in ("begin_mask", "end_mask", "ellipsis_mask",
                                                      "new_axis_mask", "shrink_axis_mask")}

    def gradient(x):
        shape = [num_rows(x) if size is None else size for size in sizes]
        return tf.raw_ops.StridedSliceGrad(shape=shape, dy=x, **options, **masks)

    return gradient


_MIDDLE = {"begin": [0, 1], "end": [0, 3], "strides": [1, 1]}  # [:, 1:3]
_WHOLE = {"begin_mask": 1, "end_mask": 1}
case("StridedSliceGrad", put_back([None, 4], **_MIDDLE, **_WHOLE), rows(B, 2), Shard(0))
case("StridedSliceGrad", put_back([None, 4], begin=[0, 0, 0], end=[0, 0, 0], strides=[1, 1, 2],
     begin_mask=5, end_mask=5, new_axis_mask=2), rows(B, 1, 2), Shard(0))  # fmt: skip
case("StridedSliceGrad", put_back([3, None], begin=[1, 0], end=[2, 0], strides=[1, 1],
     begin_mask=2, end_mask=2, shrink_axis_mask=1), rows(B), Shard(1))  # fmt: skip
case("StridedSliceGrad", put_back([4], begin=[1], end=[3], strides=[1]), mean(2), Sum(-1))
case("StridedSliceGrad", put_back([9, 4], **_MIDDLE | {"end": [B, 3]}), rows(B, 2))
case("StridedSliceGrad", put_back([None, None], **_MIDDLE | {"begin": [0, 0], "end": [0, 2]},
     **_WHOLE), rows(B, 2))  # fmt: skip
case("Slice", lambda x: tf.slice(x, [0, 1], [-1, 2]), rows(B, 4), Shard(0))
case("Slice", lambda x: tf.slice(x, [0, 1], [num_rows(x), 2]), rows(B, 4), Shard(0))
case("Slice", lambda x: tf.slice(x, [1], [2]), mean(4), Sum(-1))
case("Slice", lambda x: tf.slice(x, [1, 0], [-1, 2]), rows(B, 4))
case("Slice", lambda x: tf.slice(x, [0, 0], [-1, num_rows(x)]), rows(B, 9))
case("Slice", lambda x, i: tf.slice(x, [0, i], [-1, 1]), [rows(B, 4), total(**INTS)])
case("Slice", lambda x, c: tf.slice(c, [0], [num_rows(x)]), [rows(B, 4), same(9)])

# --- indices


def row_numbers(x):
    return tf.expand_dims(tf.range(num_rows(x)), 1)


def repeated_numbers(x):
    """For two places of each row, its number."""
    return tf.tile(tf.reshape(tf.range(num_rows(x)), (-1, 1, 1)), (1, 2, 1))


case("GatherV2", lambda t, i: tf.gather(t, i), [same(4, 3), rows(B, 2, **INTS)], Shard(0))
case("GatherV2", lambda t, i: tf.gather(t, i, axis=1), [same(4, 3), rows(B, 2, **INTS)], Shard(1))
case("GatherV2", lambda t, i: tf.gather(t, i, axis=1), [rows(B, 3, 2), same(4, **INTS)], Shard(0))
case("GatherV2", lambda t, i: tf.gather(t, i, axis=0), [rows(3, B, axis=1), same(4, 2, **INTS)],
     Shard(2))  # fmt: skip
case("GatherV2", lambda t, i: tf.gather(t, i, axis=1, batch_dims=1),
     [rows(B, 3, 2), rows(B, 4, **INTS)], Shard(0))  # fmt: skip
case("GatherV2", lambda x: tf.gather(x, tf.range(num_rows(x))), rows(B, 3), Shard(0))
case("GatherV2", lambda x: tf.gather(x, tf.repeat(tf.range(num_rows(x)), 2)), rows(B, 3), Shard(0))
case("GatherV2", lambda x: tf.gather(row_numbers(x), [0], axis=1), rows(B, 3))
case("GatherV2", lambda x, i: tf.gather(row_numbers(x), i, batch_dims=1),
     [rows(B, 3), rows(B, 1, high=1, **INTS)])  # fmt: skip
case("GatherV2", lambda t, i: tf.gather(t, i), [rows(B, 3), same(2, **INTS)])
case("GatherV2", lambda t, i: tf.gather(t, i), [rows(B, 3), rows(B, **INTS)])
case("GatherV2", lambda t, i: tf.gather(t, i), [mean(4, 3), rows(B, **INTS)])
case("GatherV2", lambda t, i: tf.gather(t, i), [same(4, 3), total(2, **INTS)])
case("GatherV2", lambda t, i: tf.gather(t, i, axis=1, batch_dims=1),
     [same(B, 3), rows(B, 2, **INTS)])  # fmt: skip
case("GatherV2", lambda t, i: tf.gather(t, i), [same(4, 3, power=1), rows(B, **INTS)], Shard(0, 1))
case("GatherV2", lambda t, i: tf.gather(t, i), [mean(4, 3), same(2, **INTS)], Sum(-1))
case("GatherV2", lambda x, t: tf.gather(t, tf.range(num_rows(x))), [rows(B, 3), same(9)])
case("GatherV2", lambda x, t: tf.gather(x, num_rows(x) % 3, axis=1), [rows(B, 3), same(9)])
case("Gather", raw("Gather"), [same(4, 3), rows(B, 2, **INTS)], Shard(0))
case("Gather", raw("Gather"), [rows(3, B, axis=1), same(2, **INTS)], Shard(1))
case("Gather", raw("Gather"), [rows(B, 3), same(2, **INTS)])
case("GatherNd", raw("GatherNd"), [same(4, 3), rows(B, 2, **INTS)], Shard(0))
case("GatherNd", raw("GatherNd"), [same(4, 3), rows(2, B, 1, axis=1, **INTS)], Shard(1))
case("GatherNd", lambda x, i: tf.gather_nd(x, tf.stack([tf.range(num_rows(x)), i], 1)),
     [rows(B, 4), rows(B, **INTS)], Shard(0))  # fmt: skip
case("GatherNd", lambda x: tf.gather_nd(x, tf.range(num_rows(x))[:, None]), rows(B, 3), Shard(0))
case("GatherNd", lambda x, i: tf.gather_nd(x, tf.concat([repeated_numbers(x), i[:, :, None]], 2)),
     [rows(B, 4), rows(B, 2, **INTS)], Shard(0))  # fmt: skip
case("GatherNd", lambda x: tf.gather_nd(x, tf.tile(row_numbers(x), (1, 2))), rows(B, 9))
case("GatherNd", lambda x, i: tf.gather_nd(x, tf.concat([tf.tile(row_numbers(x), (1, 2)), i], 1)),
     [rows(B, 9, 4), rows(B, 1, **INTS)])  # fmt: skip
case("GatherNd", lambda x, i: tf.gather_nd(
    x, tf.stack([tf.stack([tf.range(num_rows(x)), i], 1), tf.stack([i, i], 1)], 2)),
     [rows(B, 9), rows(B, **INTS)])  # fmt: skip
case("GatherNd", raw("GatherNd"), [rows(B, 3), rows(B, 2, **INTS)])
case("GatherNd", raw("GatherNd"), [rows(B, 3), same(B, 2, **INTS)])
case("GatherNd", lambda x: tf.gather_nd(x, tf.range(num_rows(x))[None]), rows(B, B))
case("GatherNd", raw("GatherNd"), [same(4, 3), rows(4, B, axis=1, **INTS)])
case("OneHot", lambda x: tf.one_hot(x, 3), rows(B, 4, **INTS), Shard(0))
case("OneHot", lambda x: tf.one_hot(x, 3, axis=0), rows(B, 4, **INTS), Shard(1))
case("OneHot", lambda x: tf.one_hot(x, num_rows(x)), rows(B, 4, **INTS))
case("OneHot", lambda x: tf.one_hot(x, 3), total(4, **INTS))
_LOGITS = "SoftmaxCrossEntropyWithLogits"
case(_LOGITS, raw(_LOGITS), [rows(B, 3), rows(B, 3)], Shard(0))
case(_LOGITS, raw(_LOGITS), [rows(B, 3), same(1, 3)])
case(_LOGITS, raw(_LOGITS), [rows(B, 3), same(B, 3)])
case(_LOGITS, raw(_LOGITS), [rows(3, B, axis=1), rows(3, B, axis=1)])
_SPARSE = "SparseSoftmaxCrossEntropyWithLogits"
case(_SPARSE, raw(_SPARSE), [rows(B, 3), rows(B, **INTS)], Shard(0))
case(_SPARSE, raw(_SPARSE), [rows(B, 3), same(B, **INTS)])
case(_SPARSE, raw(_SPARSE), [rows(3, B, axis=1), same(3, **INTS)])
case("InTopKV2", raw("InTopKV2", k=2), [rows(B, 3, **SMALL), rows(B, **INTS)], Shard(0))
case("InTopKV2", raw("InTopKV2", k=2), [rows(B, 3, **SMALL), same(B, **INTS)])
_SEGMENTS = raw("UnsortedSegmentSum", num_segments=4)
case("UnsortedSegmentSum", _SEGMENTS, [rows(B, 3), rows(B, **INTS)], Sum())
case("UnsortedSegmentSum", _SEGMENTS, [rows(B, 3), same(B, **INTS)])
case("UnsortedSegmentSum", _SEGMENTS, [rows(3, B, axis=1), same(3, **INTS)], Shard(1))
case("UnsortedSegmentSum", _SEGMENTS, [rows(3, 2, B, axis=2), same(3, 2, **INTS)], Shard(1))
case("ScatterNd", lambda i, x: tf.scatter_nd(i[:, None], x, (4, 3)),
     [rows(B, **INTS), rows(B, 3)], Sum())  # fmt: skip
case("ScatterNd", lambda i, x: tf.scatter_nd(
    tf.concat([row_numbers(x), i[:, None]], 1), x, (num_rows(x), 4)),
     [rows(B, **INTS), rows(B)], Shard(0))  # fmt: skip
case("ScatterNd", lambda i, x: tf.scatter_nd(i[:, None], x, (num_rows(x), 3)),
     [rows(B, **INTS), rows(B, 3)])  # fmt: skip
_NONE = {"size": 4, "weights": []}
case("Bincount", lambda x: tf.raw_ops.Bincount(arr=x, size=4, weights=tf.zeros([0])),
     rows(B, **INTS), Sum())  # fmt: skip
case("Bincount", lambda x, w: tf.raw_ops.Bincount(arr=x, size=4, weights=w),
     [rows(B, **INTS), rows(B)], Sum())  # fmt: skip
case("Bincount", lambda x, w: tf.raw_ops.Bincount(arr=x, size=4, weights=w),
     [rows(B, **INTS), mean(B)])  # fmt: skip
case("Bincount", lambda x: tf.raw_ops.Bincount(arr=x, size=num_rows(x), weights=tf.zeros([0])),
     rows(B, **INTS))  # fmt: skip


def dense_bincount(x, *weights, **more):
    weights = weights[0] if weights else tf.zeros([0])
    return tf.raw_ops.DenseBincount(input=x, size=4, weights=weights, **more)


case("DenseBincount", dense_bincount, rows(B, 3, **INTS), Shard(0))
case("DenseBincount", dense_bincount, [rows(B, 3, **INTS), rows(B, 3)], Shard(0))
case("DenseBincount", lambda x: dense_bincount(x, binary_output=True), rows(B, 3, **INTS), Shard(0))
case("DenseBincount", dense_bincount, rows(B, **INTS), Sum())
case("DenseBincount", lambda x: dense_bincount(x, binary_output=True), rows(B, **INTS))
case("DenseBincount", dense_bincount, rows(3, B, axis=1, **INTS))
case("DenseBincount", dense_bincount, [rows(B, **INTS), same(B)])
