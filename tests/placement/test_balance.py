"""The best cut of a model, against all cuts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.placement.balance import NoPartition, partition


def cost_of(stages, costs, edges):
    """The largest stage, and all that is sent, of one partition."""
    ends = list(itertools.accumulate(stages, initial=0))
    largest, everything = 0.0, 0.0
    for start, end in zip(ends, ends[1:], strict=False):
        sent = sum(
            cost
            for producer, (cost, readers) in edges.items()
            if producer < start and any(start <= reader < end for reader in readers)
        )
        largest = max(largest, sum(costs[start:end]) + sent)
        everything += sent
    return largest, everything


@st.composite
def graphs(draw):
    num_layers = draw(st.integers(1, 16))
    sizes = st.integers(0, 20)
    costs = draw(st.lists(sizes, min_size=num_layers, max_size=num_layers))
    edges = {}
    for producer in range(num_layers - 1):
        readers = draw(st.sets(st.integers(producer + 1, num_layers - 1), max_size=4))
        if readers:
            edges[producer] = (draw(sizes), sorted(readers))
    return costs, edges, draw(st.integers(1, min(num_layers, 5)))


@settings(deadline=None, max_examples=200)
@given(graphs())
def test_no_other_cut_is_better(graph):
    costs, edges, num_stages = graph
    found = partition(costs, num_stages, edges)
    assert len(found) == num_stages and sum(found) == len(costs) and min(found) >= 1
    best = min(
        cost_of(np.diff([0, *cuts, len(costs)]), costs, edges)
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    assert cost_of(found, costs, edges) == pytest.approx(best)


@pytest.mark.parametrize(
    "edges, stages", [(None, [2, 2]), ({1: (5, [2])}, [1, 3]), ({0: (1, [1, 2, 3])}, [2, 2])]
)
def test_what_is_sent_moves_the_cut(edges, stages):
    assert partition([3, 1, 1, 3], 2, edges) == stages


def test_a_thousand_layers():
    costs = np.random.default_rng(0).random(1000)
    stages = partition(costs, 8, {i: (0.1, [i + 1]) for i in range(999)})
    assert sum(stages) == 1000
    assert cost_of(stages, costs, {})[0] < sum(costs) / 8 + 1


def test_a_cap_that_nothing_meets_says_by_how_much():
    assert partition([3, 1, 1, 3], 2, cap=4) == [2, 2]
    with pytest.raises(NoPartition) as raised:
        partition([3, 1, 1, 3], 2, cap=3.5)
    assert raised.value.smallest == 4


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="3 stages for 2 layers"):
        partition([1, 1], 3)
