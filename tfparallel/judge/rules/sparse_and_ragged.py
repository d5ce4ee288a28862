"""Rules for the components of sparse or ragged rows."""

from tfparallel.judge.placements import Entries, Replicate, Shard
from tfparallel.judge.rules.by_element import BY_ELEMENT
from tfparallel.judge.rules.call import Call
from tfparallel.judge.size import ROWS, size_named


def of_entries(call: Call):
    """Judges an operation on the components of sparse or ragged rows."""
    kind, placements = call.op.type, [each.placement for each in call.inputs]
    parts = [p.part if isinstance(p, Entries) else None for p in placements]
    others = [p for p in placements if not isinstance(p, Entries)]
    if any(not (p == Replicate() or isinstance(p, Shard)) for p in others):
        return call.mixed("combines sums over the rows with entries of sparse or ragged rows")
    if any(p != Replicate() for p in others):
        return Entries("computed")
    rank = call.op.outputs[0].shape.rank if call.op.outputs else None
    if kind == "SparseToDense" and parts[:3] == ["indices", "sizes", "values"]:
        sizes = call.inputs[1].value
        return Shard(0), None if sizes is None else tuple(sizes.ravel().tolist())
    if kind == "SparseTensorDenseMatMul" and parts[:3] == ["indices", "values", "sizes"]:
        if not call.op.get_attr("adjoint_a"):
            return Shard(0), (ROWS, None)
    if kind == "RaggedTensorToTensor" and rank is not None and "computed" not in parts:
        shape = call.inputs[0].value
        requested = [-1] * rank if shape is None or shape.size != rank else shape.ravel().tolist()
        sizes = [ROWS, *requested[1:]]
        longest = size_named(("longest", call.op.name, ROWS))
        static = [None, *call.op.outputs[0].shape[1:]]
        pairs = zip(sizes, static, strict=True)
        sizes = [size if static_size is None else static_size for size, static_size in pairs]
        return Shard(0), tuple(longest if size == -1 else size for size in sizes)
    if kind in ("Identity", "StopGradient"):
        return placements
    is_value = {part for part in parts if part} == {"values"}
    if is_value and kind in BY_ELEMENT:
        return Entries("values")
    if kind in ("ResourceGather", "GatherV2") and parts[1] == "values" and is_value:
        return Entries("values")
    if kind == "SparseReorder":
        return [Entries("indices"), Entries("values")]
    return Entries("computed")
