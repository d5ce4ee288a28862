"""Each rule is held against numbers: what an operation makes of rows, whole and in two pieces."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.judge import operations_by_element, operations_of_rows
from tests.judge.operations import CASES, MIXED, B, holds, whole_and_pieces
from tfparallel.judge.placements import Mixed, Shard
from tfparallel.judge.propagation import Judge, Judged, judged_graph
from tfparallel.judge.rules import RULES
from tfparallel.judge.size import ROWS, Size

CUT = 2
WITHOUT_CASE = {**operations_by_element.WITHOUT_CASE, **operations_of_rows.WITHOUT_CASE}
NEVER_MIXED = operations_by_element.NEVER_MIXED
ALWAYS_MIXED = operations_of_rows.ALWAYS_MIXED


def judged_and_computed(case):
    """What the judge knows of each output, and what it is: of the whole, and of two pieces."""
    graph, placements, inputs = judged_graph("rules"), {}, []
    with graph.as_default():
        for tensor in case.inputs:
            axis = tensor.placement.axis if isinstance(tensor.placement, Shard) else None
            static = [None if a == axis else size for a, size in enumerate(tensor.shape)]
            inputs.append(tf.compat.v1.placeholder(tensor.dtype, static))
            dims = tuple(ROWS if a == axis else size for a, size in enumerate(tensor.shape))
            placements[inputs[-1].name] = Judged(tensor.placement, dims)
        outputs = tf.nest.flatten(case.function(*inputs))
    assert case.kind in _kinds(graph)
    judge = Judge(graph, placements)
    judged = [judge.of(out) for out in outputs]
    if case.right == MIXED:
        return judged, None
    parts = [whole_and_pieces(each, i, CUT) for i, each in enumerate(case.inputs)]
    names = [each.name for each in inputs]
    with tf.compat.v1.Session(graph=graph) as session:
        results = [
            session.run(outputs, dict(zip(names, arrays, strict=True)))
            for arrays in zip(*parts, strict=True)
        ]
    return judged, [[np.asarray(each) for each in ways] for ways in zip(*results, strict=True)]


def _kinds(graph):
    inner = [graph, *(function.graph for function in graph._functions.values())]
    return {op.type for each in inner for op in each.get_operations()}


def sizes_hold(dims, arrays) -> bool:
    """Whether the sizes that are numbers, and powers of B, are those of the arrays."""
    if dims is None:
        return True
    for array, num_rows in zip(arrays, (B, CUT, B - CUT), strict=True):
        if len(dims) != array.ndim:
            return False
        for size, actual in zip(dims, array.shape, strict=True):
            if isinstance(size, Size) and set(size.powers) <= set(ROWS.powers):
                (power,) = size.powers.values()
                size = size.factor * num_rows**power
            if not isinstance(size, Size) and size != actual:
                return False
    return True


def fault_of(case) -> str | None:
    """What is wrong with the judge's word, if something is."""
    judged, computed = judged_and_computed(case)
    said = [str(each.placement) for each in judged]
    if case.right == MIXED:
        return None if "Mixed" in said else f"{said}, not mixed"
    right = [str(each) for each in case.right]
    if said != (right if len(right) > 1 else right * len(said)):
        why = [each.placement.why for each in judged if isinstance(each.placement, Mixed)]
        return f"{said}, not {right} {why}"
    for each, arrays in zip(judged, computed, strict=True):
        if not holds(each.placement, *arrays, CUT):
            return f"{each.placement} does not hold of {arrays}"
        if not sizes_hold(each.dims, arrays):
            return f"sizes {each.dims} are not those of {[array.shape for array in arrays]}"
    return None


@pytest.mark.parametrize("kind", sorted({case.kind for case in CASES}))
def test_a_rule_says_what_numbers_say(kind):
    cases = [case for case in CASES if case.kind == kind]
    faults = {i: fault_of(case) for i, case in enumerate(cases)}
    assert not {i: (cases[i].inputs, fault) for i, fault in faults.items() if fault is not None}


def test_each_rule_has_cases():
    mixed_by_kind = collections.defaultdict(set)
    for case in CASES:
        mixed_by_kind[case.kind].add(case.right == MIXED)
    without = {kind for kind in RULES if False not in mixed_by_kind[kind]}
    assert without == set(WITHOUT_CASE) | set(ALWAYS_MIXED)


def test_each_rule_has_a_case_that_mixes():
    mixed = {case.kind for case in CASES if case.right == MIXED}
    assert set(RULES) - mixed == set(WITHOUT_CASE) | set(NEVER_MIXED)
