"""The best cut of a model, against all cuts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.layout.balance import NoPartition, Weighed, partition


def cost_of(stages, costs, edges, peaks=None):
    """The largest stage, and all that is sent, of one partition."""
    ends = list(itertools.accumulate(stages, initial=0))
    largest, everything = 0.0, 0.0
    for start, end in zip(ends, ends[1:], strict=False):
        sent = sum(
            cost
            for producer, (cost, readers) in edges.items()
            if producer < start and any(start <= reader < end for reader in readers)
        )
        peak = max(peaks[start:end]) if peaks else 0
        largest = max(largest, sum(costs[start:end]) + peak + sent)
        everything += sent
    return largest, everything


@st.composite
def graphs(draw):
    num_layers = draw(st.integers(1, 16))
    sizes = st.integers(0, 20)
    numbers = st.lists(sizes, min_size=num_layers, max_size=num_layers)
    costs, peaks = draw(numbers), draw(numbers)
    edges = {}
    for producer in range(num_layers - 1):
        readers = draw(st.sets(st.integers(producer + 1, num_layers - 1), max_size=4))
        if readers:
            edges[producer] = (draw(sizes), sorted(readers))
    return costs, edges, peaks, draw(st.integers(1, min(num_layers, 5)))


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(graphs())
def test_no_other_cut_is_better(graph):
    costs, edges, peaks, num_stages = graph
    stages = partition(num_stages, Weighed(costs, edges, peaks=peaks))
    assert len(stages) == num_stages and sum(stages) == len(costs) and min(stages) >= 1
    best = min(
        cost_of(np.diff([0, *cuts, len(costs)]), costs, edges, peaks)
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    assert cost_of(stages, costs, edges, peaks) == pytest.approx(best)


@pytest.mark.parametrize(
    "edges, stages", [(None, [2, 2]), ({1: (5, [2])}, [1, 3]), ({0: (1, [1, 2, 3])}, [2, 2])]
)
def test_communication_moves_the_cut(edges, stages):
    assert partition(2, Weighed([3, 1, 1, 3], edges)) == stages


def test_a_thousand_layers():
    costs = np.random.default_rng(0).random(1000)
    stages = partition(8, Weighed(costs, {i: (0.1, [i + 1]) for i in range(999)}))
    assert sum(stages) == 1000
    assert cost_of(stages, costs, {})[0] < sum(costs) / 8 + 1


def test_a_cap_that_nothing_meets_says_by_how_much():
    assert partition(2, Weighed([3, 1, 1, 3], cap=4)) == [2, 2]
    with pytest.raises(NoPartition) as raised:
        partition(2, Weighed([3, 1, 1, 3], cap=3.5))
    assert raised.value.smallest == 4


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(graphs(), st.data())
def test_no_other_cut_of_two_things_under_a_cap_is_better(graph, data):
    costs, edges, _, num_stages = graph
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(costs), max_size=len(costs)))
    cap = data.draw(st.integers(1, sum(sizes)))
    whole = sum(costs) or 1.0
    largest_shares = [
        max(cost_of(stages, costs, edges)[0] / whole, cost_of(stages, sizes, {})[0] / sum(sizes))
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
        if cost_of(stages := np.diff([0, *cuts, len(costs)]), sizes, {})[0] <= cap
    ]
    if largest_shares:
        best = partition(num_stages, Weighed(costs, edges), Weighed(sizes, cap=cap))
        time, memory = cost_of(best, costs, edges)[0], cost_of(best, sizes, {})[0]
        assert memory <= cap
        assert max(time / whole, memory / sum(sizes)) == pytest.approx(min(largest_shares))
    else:
        with pytest.raises(NoPartition):
            partition(num_stages, Weighed(costs, edges), Weighed(sizes, cap=cap))


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="3 stages for 2 layers"):
        partition(3, Weighed([1, 1]))
