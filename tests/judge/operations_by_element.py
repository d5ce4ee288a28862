"""What works element by element: unary, binary, and the others."""

import tensorflow as tf

from tests.judge.operations import B, beside, case, mean, raw, rows, same, total
from tfparallel.judge.placements import Replicate, Shard, Sum

WITHOUT_CASE = {
    "Copy": "only a debugger makes it",
    "DebugGradientIdentity": "likewise",
}
WITHOUT_CASE |= {"LookupTableFindV2": "needs a table that lives in a session"}
# What is linear, of one input: there is nothing that it mixes.
NEVER_MIXED = {"Neg", "Identity", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape"}
NEVER_MIXED |= {"PlaceholderWithDefault", "CheckNumerics", "Real", "Imag", "Conj", "DeepCopy"}
NEVER_MIXED |= {"Print", "ZerosLike", "OnesLike"}

_LINEAR = {
    **dict.fromkeys(("Neg", "Identity", "StopGradient", "PreventGradient", "Snapshot"), {}),
    "DeepCopy": {},
    "EnsureShape": {"shape": None},
    "PlaceholderWithDefault": {"shape": None},
    "CheckNumerics": {"message": ""},
    "Cast": {"DstT": tf.float32},
}
for _kind, _attributes in _LINEAR.items():
    _function = raw(_kind, **_attributes)
    if "shape" in _attributes:
        _function = (lambda make: lambda x: make(x, x.shape))(raw(_kind))
    case(_kind, _function, rows(B, 3), Shard(0))
    case(_kind, _function, rows(3, B, axis=1, power=-1), Shard(1, -1))
    case(_kind, _function, mean(3), Sum(-1))
    case(_kind, _function, same(3, power=1), Replicate(1))
for _kind in ("Real", "Imag", "Conj"):
    _options = {} if _kind == "Conj" else {"Tout": tf.float64}
    case(_kind, raw(_kind, **_options), rows(B, 3, dtype="complex128"), Shard(0))
    case(_kind, raw(_kind, **_options), mean(3, dtype="complex128"), Sum(-1))
case("Cast", raw("Cast", DstT=tf.int32), rows(B, 3, high=4), Shard(0))
case("Cast", raw("Cast", DstT=tf.int32), mean(3))
case("Cast", raw("Cast", DstT=tf.bool), total(3, dtype="int32"))
case("Cast", raw("Cast", DstT=tf.int32), same(3, power=-1))
case("Cast", raw("Cast", DstT=tf.float64), total(3, dtype="int32"), Sum())
case("Print", lambda x: tf.raw_ops.Print(input=x, data=[x], message="", first_n=0), rows(B, 3),
     Shard(0))  # fmt: skip

_UNARY = {
    **dict.fromkeys(
        ("Abs", "Acos", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Digamma", "Elu",
         "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "Inv", "IsFinite", "IsInf", "IsNan",
         "LeakyRelu", "Lgamma", "Log", "Log1p", "Ndtri", "Reciprocal", "Relu", "Relu6", "Rint",
         "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt",
         "Square", "Tan", "Tanh", "BesselI0e", "BesselI1e", "ZerosLike", "OnesLike"),
        {},
    ),
    "Acosh": {"low": 1.5, "high": 3},
    "Invert": {"dtype": "int32"},
    "PopulationCount": {"dtype": "int32"},
    "AsString": {"dtype": "int32"},
    "LogicalNot": {"dtype": "bool"},
}  # fmt: skip
for _kind, _options in _UNARY.items():
    case(_kind, raw(_kind), rows(B, 3, **_options), Shard(0))
    case(_kind, raw(_kind), rows(3, B, axis=1, **_options), Shard(1))
    if _kind in ("ZerosLike", "OnesLike"):
        case(_kind, raw(_kind), mean(3), Replicate())
        case(_kind, raw(_kind), rows(B, 3, power=2), Shard(0))
        continue
    case(_kind, raw(_kind), same(3, **_options), Replicate())
    case(_kind, raw(_kind), total(3, **_options))
    case(_kind, raw(_kind), rows(B, 3, power=1, **_options))

_STRINGS = {
    "StringLower": {}, "StringUpper": {}, "StringStrip": {}, "StringLength": {},
    "StringToNumber": {}, "StringToHashBucketFast": {"num_buckets": 7},
    "StringToHashBucketStrong": {"num_buckets": 7, "key": [1, 2]},
    "StaticRegexReplace": {"pattern": "3", "rewrite": "4"},
    "StaticRegexFullMatch": {"pattern": "3+"},
}  # fmt: skip
_OF_STRINGS = {kind: raw(kind, **attributes) for kind, attributes in _STRINGS.items()}
_OF_STRINGS |= {
    "RegexReplace": lambda x: tf.raw_ops.RegexReplace(input=x, pattern="3", rewrite="4"),
    "RegexFullMatch": lambda x: tf.raw_ops.RegexFullMatch(input=x, pattern="3+"),
    "Substr": lambda x: tf.raw_ops.Substr(input=x, pos=0, len=1),
    "StringJoin": lambda x: tf.raw_ops.StringJoin(inputs=[x, "end"]),
}
for _kind, _function in _OF_STRINGS.items():
    case(_kind, _function, rows(B, 3, dtype="string"), Shard(0))
    case(_kind, _function, total(3, dtype="string"))

_BINARY = {
    **dict.fromkeys(("Atan2", "FloorDiv", "FloorMod", "Igamma", "Igammac", "Maximum", "Minimum",
                     "Mod", "NextAfter", "Pow", "SquaredDifference", "Xlog1py", "Xlogy", "Add",
                     "AddV2", "Sub", "Mul", "MulNoNan", "RealDiv", "Div", "DivNoNan", "Xdivy",
                     "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"),
                    "float64"),
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"), "int32"),
    **dict.fromkeys(("TruncateDiv", "TruncateMod"), "int32"),
    **dict.fromkeys(("LogicalAnd", "LogicalOr"), "bool"),
    "Zeta": "float64", "Polygamma": "float64",
}  # fmt: skip
for _kind, _dtype in _BINARY.items():
    _more = {"dtype": _dtype}
    if _dtype == "int32":
        _more |= {"low": 1, "high": 3}
    if _kind == "Zeta":
        _more |= {"low": 1.5, "high": 3}
    if _kind == "Polygamma":
        _more |= {"low": 1, "high": 1.0001}
    _first = dict(_more)
    case(_kind, raw(_kind), [rows(B, 3, **_first), rows(B, 3, **_more)], Shard(0))
    case(_kind, raw(_kind), [rows(B, 3, **_first), same(3, **_more)], Shard(0))
    case(_kind, raw(_kind), [same(2, 1, 3, **_first), rows(B, 3, **_more)], Shard(1))
    case(_kind, raw(_kind), [rows(B, 3, **_first), rows(B, axis=0, **_more)])
    case(_kind, raw(_kind), [rows(B, 3, **_first), rows(3, B, axis=1, **_more)])
    case(_kind, raw(_kind), [same(B, 3, **_first), rows(B, 3, **_more)])
    if _kind not in ("Mul", "MulNoNan", "RealDiv", "Div", "DivNoNan", "Xdivy"):
        case(_kind, raw(_kind), [total(3, **_first), same(3, **_more)])

for _kind in ("Add", "AddV2", "Sub"):
    case(_kind, raw(_kind), [mean(3), same(3)], Sum(-1))
    case(_kind, raw(_kind), [total(3), same(3, power=1)], Sum())
    case(_kind, raw(_kind), [total(3), total(3)], Sum())
    case(_kind, raw(_kind), [total(3), mean(3)])
    case(_kind, raw(_kind), [rows(B, 3), mean(3)])
    case(_kind, raw(_kind), [rows(B, 3), same(3, power=1)])
    case(_kind, raw(_kind), [rows(B, 3, power=1), same(3, power=1)], Shard(0, 1))
    case(_kind, beside(_kind, lambda x: tf.zeros((), x.dtype)), total(3), Sum())
for _kind in ("Mul", "MulNoNan"):
    case(_kind, raw(_kind), [mean(3), same(3, power=1)], Sum())
    case(_kind, raw(_kind), [same(3), total(3)], Sum())
    case(_kind, raw(_kind), [rows(B, 3), same(3, power=-1)], Shard(0, -1))
    case(_kind, raw(_kind), [mean(3), mean(3)])
    case(_kind, raw(_kind), [rows(B, 3), mean(3)])
for _kind in ("RealDiv", "Div", "DivNoNan", "Xdivy"):
    case(_kind, raw(_kind), [total(3), same(3, power=1)], Sum(-1))
    case(_kind, raw(_kind), [rows(B, 3), same(3, power=1)], Shard(0, -1))
    case(_kind, raw(_kind), [rows(B, 3), mean(3)])
    case(_kind, raw(_kind), [same(3), total(3)])
_INTS = {"dtype": "int32", "low": 1, "high": 5}
case("Mul", raw("Mul"), [total(3, **_INTS), same(3, **_INTS)], Sum())
case("Div", raw("Div"), [total(3, **_INTS), same(3, **_INTS)])
case("Div", raw("Div"), [rows(B, 3, **_INTS), rows(B, 3, **_INTS)], Shard(0))
case("AddN", lambda *xs: tf.raw_ops.AddN(inputs=xs), [rows(B, 3), rows(B, 3)], Shard(0))
case("AddN", lambda *xs: tf.raw_ops.AddN(inputs=xs), [total(3), total(3)], Sum())
case("AddN", lambda *xs: tf.raw_ops.AddN(inputs=xs), [total(3), mean(3)])

_GRADIENTS = ("EluGrad", "ReluGrad", "Relu6Grad", "SigmoidGrad", "TanhGrad", "SoftplusGrad",
              "SoftsignGrad", "SeluGrad", "LeakyReluGrad", "RsqrtGrad", "SqrtGrad", "InvGrad",
              "ReciprocalGrad", "ApproximateEqual")  # fmt: skip
for _kind in _GRADIENTS:
    case(_kind, raw(_kind), [rows(B, 3), rows(B, 3)], Shard(0))
    case(_kind, raw(_kind), [rows(3, B, axis=1), rows(3, B, axis=1)], Shard(1))
    case(_kind, raw(_kind), [total(3), same(3)])
    case(_kind, raw(_kind), [rows(B, 3), same(B, 3)])

_TRUTH = {"dtype": "bool"}
for _kind in ("Select", "SelectV2"):
    case(_kind, raw(_kind), [rows(B, 3, **_TRUTH), rows(B, 3), rows(B, 3)], Shard(0))
    case(_kind, raw(_kind), [same(3, **_TRUTH), total(3), total(3)], Sum())
    case(_kind, raw(_kind), [same(3, **_TRUTH), mean(3), same(3)], Sum(-1))
    case(_kind, raw(_kind), [rows(B, 3, **_TRUTH), mean(B, 3), same(B, 3)])
    case(_kind, raw(_kind), [rows(B, 3, **_TRUTH), same(B, 3), rows(B, 3)])
case("Select", raw("Select"), [rows(B, **_TRUTH), rows(B, 3), rows(B, 3)], Shard(0))
case("Select", raw("Select"), [same(3, **_TRUTH), rows(3, B, axis=1), rows(3, B, axis=1)], Shard(1))
case("SelectV2", raw("SelectV2"), [rows(B, 1, **_TRUTH), rows(B, 3), same(3)], Shard(0))
case("SelectV2", raw("SelectV2"), [rows(B, **_TRUTH), rows(B, 3), same(3)])

case("Complex", raw("Complex", Tout=tf.complex128), [rows(B, 3), rows(B, 3)], Shard(0))
case("Complex", raw("Complex", Tout=tf.complex128), [rows(B, 3), mean(3)])
for _kind in ("ComplexAbs", "Angle"):
    case(_kind, raw(_kind, Tout=tf.float64), rows(B, 3, dtype="complex128"), Shard(0))
    case(_kind, raw(_kind, Tout=tf.float64), mean(3, dtype="complex128"))
case("Betainc", raw("Betainc"), [rows(B, 3), rows(B, 3), rows(B, 3)], Shard(0))
case("Betainc", raw("Betainc"), [rows(B, 3), rows(B, 3), mean(B, 3)])
case("ClipByValue", raw("ClipByValue"), [rows(B, 3), same(), same()], Shard(0))
case("ClipByValue", raw("ClipByValue"), [rows(B, 3), mean(), same()])
case("Bucketize", raw("Bucketize", boundaries=[0.3, 0.6]), rows(B, 3), Shard(0))
case("Bucketize", raw("Bucketize", boundaries=[0.3, 0.6]), mean(3))
case("Bitcast", raw("Bitcast", type=tf.int64), rows(B, 3), Shard(0))
case("Bitcast", raw("Bitcast", type=tf.int64), mean(3))
case("Bitcast", raw("Bitcast", type=tf.int32), rows(B, 3))
case("Bitcast", raw("Bitcast", type=tf.int64), rows(3, B, axis=1, dtype="int32"))
_SMALL = {"dtype": "float32"}
case("FakeQuantWithMinMaxArgs", raw("FakeQuantWithMinMaxArgs"), rows(B, 3, **_SMALL), Shard(0))
case("FakeQuantWithMinMaxArgs", raw("FakeQuantWithMinMaxArgs"), mean(3, **_SMALL))
_BOUNDS = [same(low=-1, high=0, **_SMALL), same(low=1, high=2, **_SMALL)]
case("FakeQuantWithMinMaxVars", raw("FakeQuantWithMinMaxVars"), [rows(B, 3, **_SMALL), *_BOUNDS],
     Shard(0))  # fmt: skip
case("FakeQuantWithMinMaxVars", raw("FakeQuantWithMinMaxVars"),
     [rows(B, 3, **_SMALL), mean(**_SMALL), _BOUNDS[1]])  # fmt: skip
_QUANTIZE = "QuantizeAndDequantizeV4"
case(_QUANTIZE, raw(_QUANTIZE, range_given=True), [rows(B, 3, **_SMALL), *_BOUNDS], Shard(0))
case(_QUANTIZE, raw(_QUANTIZE, range_given=False), [rows(B, 3, **_SMALL), *_BOUNDS])
