"""Rules for matrix products: sums of products over labelled axes."""

from tfparallel.judge.placements import Replicate, Shard, Sum
from tfparallel.judge.rules.by_element import product_of
from tfparallel.judge.rules.call import Call, power_of
from tfparallel.judge.size import depends_on_rows


def einsum(call: Call):
    """Judges `Einsum`, by its equation."""
    equation = call.op.get_attr("equation").decode()
    inputs, output = equation.replace(" ", "").split("->")
    terms = [_labels(term, call.rank(i)) for i, term in enumerate(inputs.split(","))]
    if None in terms:
        return call.mixed("has inputs of unknown rank")
    width = max((sum(isinstance(each, int) for each in term) for term in terms), default=0)
    wide = [label for label in range(-width, 0)]
    result = [each for part in _split(output) for each in (wide if part == "..." else [part])]
    return _contracted(call, terms, result)


def _split(term):
    left, dots, right = term.partition("...")
    return [*left, *([dots] if dots else []), *right]


def _labels(term, rank):
    if rank is None:
        return None
    parts = _split(term)
    labels = []
    for part in parts:
        missing = rank - (len(parts) - 1)
        labels += range(-missing, 0) if part == "..." else [part]
    return labels


def _contracted(call, terms, result):
    """Judges a sum of products whose axes have labels."""
    placements = [call.placement(i) for i in range(len(terms))]
    if not any(isinstance(p, Shard) for p in placements):
        return product_of(call, placements, 1)
    if any(isinstance(p, Sum) for p in placements):
        return call.mixed("multiplies a sum over the rows by a value that also depends on them")
    power = sum(map(power_of, placements))
    labels = [
        term[p.axis] for term, p in zip(terms, placements, strict=True) if isinstance(p, Shard)
    ]
    if len(set(labels)) > 1:
        return call.mixed("pairs each example with the others")
    label = labels[0]
    if any(term.count(label) > 1 for term in terms):
        return call.mixed("pairs each example with the others")
    dims: dict = {}
    for i, (term, p) in enumerate(zip(terms, placements, strict=True)):
        sizes = call.dims(i)
        if isinstance(p, Replicate) and label in term and sizes[term.index(label)] != 1:
            return call.mixed("combines the examples with a constant that has its own rows")
        for each, size in zip(term, sizes, strict=True):
            if dims.get(each, 1) == 1 or depends_on_rows(size):
                dims[each] = size
    if any(depends_on_rows(size) and each not in result and each != label
           for each, size in dims.items()):  # fmt: skip
        return call.mixed("sums over an axis whose size depends on the rows")
    folds = {p.folded for p in placements if isinstance(p, Shard)}
    if len(folds) > 1:
        return call.mixed("pairs each example with the others")
    if label not in result:
        if any(depends_on_rows(dims.get(each)) for each in result):
            return call.mixed("sums rows that are padded to the longest row of the piece")
        return Sum(power)
    shard = Shard(result.index(label), power, folds.pop())
    return shard, tuple(dims.get(each) for each in result)


def matmul(call: Call):
    """Judges `MatMul` and `BatchMatMul`, as an equation."""
    ranks = call.rank(0), call.rank(1)
    if None in ranks:
        return call.mixed("has inputs of unknown rank")
    names = ("transpose_a", "transpose_b") if call.op.type == "MatMul" else ("adj_x", "adj_y")
    flips = [call.op.get_attr(name) for name in names]
    batch = [list(range(-(rank - 2), 0)) for rank in ranks]
    left = [*batch[0], *("ki" if flips[0] else "ik")]
    right = [*batch[1], *("jk" if flips[1] else "kj")]
    longest = max(batch, key=len)
    return _contracted(call, [left, right], [*longest, "i", "j"])
