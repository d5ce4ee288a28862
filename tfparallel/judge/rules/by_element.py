"""Rules for elementwise operations, and for sums and products of placements."""

import dataclasses

from tfparallel.judge.placements import Listed, Replicate, Row, Shard, Sum
from tfparallel.judge.rules.call import Call, are_numbers, is_uniform, power_of
from tfparallel.judge.size import depends_on_rows

_LINEAR_1 = ("Neg", "Identity", "StopGradient", "PreventGradient", "Snapshot",
             "PlaceholderWithDefault", "Cast", "EnsureShape", "CheckNumerics", "Real", "Imag",
             "Conj", "DebugGradientIdentity", "Print", "DeepCopy", "Copy")  # fmt: skip
_SUMS = ("Add", "AddV2", "Sub", "AddN")
_PRODUCTS = ("Mul", "MulNoNan")
_QUOTIENTS = ("RealDiv", "Div", "DivNoNan", "Xdivy")
_CHOICES = ("Select", "SelectV2")
_NONLINEAR = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BitwiseAnd", "BitwiseOr"),
    *("BitwiseXor", "Ceil", "ClipByValue", "Complex", "ComplexAbs", "Cos", "Cosh", "Digamma"),
    *("Elu", "Equal", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod"),
    *("Greater", "GreaterEqual", "Igamma", "Igammac", "Inv", "Invert", "IsFinite", "IsInf"),
    *("IsNan", "LeakyRelu", "LeftShift", "Less", "LessEqual", "Lgamma", "Log", "Log1p"),
    *("LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod"),
    *("Ndtri", "NextAfter", "NotEqual", "Pow", "Reciprocal", "Relu", "Relu6", "RightShift"),
    *("Rint", "Round", "Rsqrt"),
    *("Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square"),
    *("SquaredDifference", "Tan", "Tanh", "TruncateDiv", "TruncateMod", "Xlog1py", "Xlogy", "Zeta"),
    *("Angle", "Polygamma", "Bitcast", "PopulationCount", "Betainc", "AsString"),
    *("StringLower", "StringUpper", "StringStrip", "StringToHashBucketFast", "StringJoin"),
    *("StringToHashBucketStrong", "StringToNumber", "StringLength", "StaticRegexReplace"),
    *("RegexReplace", "StaticRegexFullMatch", "RegexFullMatch", "Substr", "Bucketize"),
    *("BesselI0e", "BesselI1e", "EluGrad", "ReluGrad", "Relu6Grad", "SigmoidGrad", "TanhGrad"),
    *("SoftplusGrad", "SoftsignGrad", "SeluGrad", "LeakyReluGrad", "RsqrtGrad", "SqrtGrad"),
    *("QuantizeAndDequantizeV4", "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxArgs"),
    *("LookupTableFindV2", "ApproximateEqual", "InvGrad", "ReciprocalGrad"),
)


BY_ELEMENT = frozenset((*_LINEAR_1, *_SUMS, *_PRODUCTS, *_QUOTIENTS, *_CHOICES, *_NONLINEAR))


def by_element(call: Call):
    """Judges operations with one output element per element of the inputs, broadcast."""
    kind = call.op.type
    placements = [each.placement for each in call.inputs]
    is_exact = not _rounds(call.op)
    if kind in _LINEAR_1 and is_exact:
        if are_numbers(placements[0]) and call.op.outputs[0].dtype.size < 4:
            return call.mixed("computes with row indices")
        return placements[0]
    if kind == "QuantizeAndDequantizeV4" and not call.op.get_attr("range_given"):
        return call.mixed("computes the range of all examples")
    if kind == "Bitcast" and call.op.inputs[0].dtype.size != call.op.outputs[0].dtype.size:
        return call.mixed("changes the number of elements")
    ranks = [call.rank(i) for i in range(len(placements))]
    if kind == "Select" and ranks[0] == 1 and ranks[1] is not None and ranks[1] > 1:
        ranks[0] = ranks[1]  # Its condition has one element per row.
    shifted = aligned(call, placements, ranks)
    if not isinstance(shifted, list):
        return shifted
    powers = [power_of(p) for p in shifted]
    if kind in _PRODUCTS or (kind in _QUOTIENTS and is_exact):
        return product_of(call, shifted, -1 if kind in _QUOTIENTS else 1)
    is_sum = any(isinstance(p, Sum) for p in shifted)
    if not is_sum and not any(powers):
        return next((p for p in shifted if isinstance(p, Shard)), Replicate())
    if kind in _SUMS or (kind in _CHOICES and shifted[0] == Replicate()):
        return sum_of(call, shifted if kind in _SUMS else shifted[1:], call.inputs)
    if is_sum:
        return call.mixed("is a nonlinear function of a sum over the rows")
    return call.mixed("depends on the number of rows")


def _rounds(op) -> bool:
    """Returns whether a cast or quotient rounds, so that it is not linear."""
    target = op.outputs[0].dtype
    if op.type in _QUOTIENTS:
        return target.is_integer
    if op.type != "Cast" or target.is_floating or target.is_complex:
        return False
    return not (target.is_integer and op.inputs[0].dtype.is_integer)


def like(call: Call):
    """Judges `ZerosLike` and `OnesLike`."""
    placement = call.placement()
    if isinstance(placement, Shard):
        return Shard(placement.axis, 0, placement.folded), call.dims()
    return Replicate()


def aligned(call, placements, ranks):
    """Returns the placements with axes counted as in the output; or `Mixed`."""
    shards = [(p, rank) for p, rank in zip(placements, ranks, strict=True) if isinstance(p, Shard)]
    if any(isinstance(p, Listed | Row) for p in placements):
        return call.mixed("pairs one row with all rows")
    if not shards:
        return list(placements)
    known_ranks = [rank for rank in ranks if rank is not None]
    if any(rank is None for _, rank in shards) or not known_ranks:
        return call.mixed("has inputs of unknown rank")
    rank = max(known_ranks)
    axes = {p.axis + rank - input_rank for p, input_rank in shards}
    if len(axes) > 1 or len({p.folded for p, _ in shards}) > 1:
        return call.mixed("pairs each example with the others")
    (axis,) = axes
    shifted = []
    for i, (p, input_rank) in enumerate(zip(placements, ranks, strict=True)):
        if isinstance(p, Shard):
            p = dataclasses.replace(p, axis=axis)
        elif isinstance(p, Replicate) and not _is_broadcast(call, i, input_rank, axis, rank):
            return call.mixed("combines the examples with a constant that has its own rows")
        shifted.append(p)
    return shifted


def _is_broadcast(call, i, input_rank, axis, rank) -> bool:
    """Returns whether an input has a single row for all rows."""
    if input_rank is None:
        return False
    place = axis - (rank - input_rank)
    if place < 0 or place >= len(call.dims(i)) or call.dims(i)[place] == 1:
        return True
    # A fixed number of rows would fit only one batch size.
    return is_uniform(call, i) and depends_on_rows(call.dims(i)[place])


def product_of(call, placements, sign):
    """Returns the placement of a product, or with `sign=-1` of a quotient."""
    first, *others = placements
    power = power_of(first) + sum(sign * power_of(each) for each in others)
    if sign < 0 and any(isinstance(each, Sum) for each in others):
        return call.mixed("divides by a sum over the rows")
    sums = [p for p in placements if isinstance(p, Sum)]
    shards = [p for p in placements if isinstance(p, Shard)]
    if len(sums) > 1 or (sums and shards):
        return call.mixed("multiplies a sum over the rows by a value that also depends on them")
    if sums:
        return Sum(power)
    if shards:
        return Shard(shards[0].axis, power, shards[0].folded)
    return Replicate(power)


def sum_of(call, placements, inputs):
    """Returns the placement of a sum. Σ_rows c is c·B, so a constant may be added to a mean."""
    if any(isinstance(p, Sum) for p in placements):
        sum_powers = set()
        for p, each in zip(placements, inputs[-len(placements) :], strict=True):
            if isinstance(p, Shard):
                return call.mixed("adds a sum over the rows to each row")
            if isinstance(p, Sum):
                sum_powers.add(p.power)
            elif not each.is_zero:
                sum_powers.add(p.power - 1)
        if len(sum_powers) == 1:
            return Sum(sum_powers.pop())
        return call.mixed("adds sums and means over the rows, or a constant to a sum over the rows")
    powers = {power_of(p) for p in placements}
    if len(powers) > 1:
        return call.mixed("depends on the number of rows")
    (power,) = powers
    shards = [p for p in placements if isinstance(p, Shard)]
    return Shard(shards[0].axis, power, shards[0].folded) if shards else Replicate(power)
