"""Schedules, in plain Python: who sends what, that all is summed, and what it costs."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.collectives.algorithms import (
    ALGORITHMS,
    GROUPED,
    double_binary_tree,
    rings,
    schedule,
    trees,
)
from tfparallel.collectives.algorithms.schedule import holdings, log2_ceiling

NAMES = st.sampled_from(sorted(ALGORITHMS))
MANY = settings(max_examples=60, deadline=None)


def sent(step):
    return [(source, target, start) for source, target, start, _ in step.messages()]


def test_a_ring_of_three():
    first, second, third, fourth = rings.ring(3).steps()
    assert sent(first) == [(0, 1, 0), (1, 2, 1), (2, 0, 2)]
    assert sent(second) == [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    # Backwards: rank 0, which has the sum of block 1, gives it to 2 first.
    assert sent(third) == [(1, 0, 2), (2, 1, 0), (0, 2, 1)]
    assert [step.adds for step in (first, second, third, fourth)] == [True, True, False, False]


def test_the_drawing_is_the_one_in_the_docstring():
    drawn = str(rings.ring(3)).splitlines()
    assert len(drawn) == 4 and all(line in schedule.__doc__ for line in drawn)
    assert str(trees.tree(2)) == "step 0  add   1 ──► 0\nstep 1  copy  0 ──► 1"


def test_a_tree_of_five():
    steps = list(trees.tree(5).steps())
    assert [sent(step) for step in steps[:3]] == [[(1, 0, 0), (3, 2, 0)], [(2, 0, 0)], [(4, 0, 0)]]
    assert len(steps) == 6


def test_two_trees_of_eight_are_the_picture():
    first, second = double_binary_tree.parents(8)
    assert first == [-1, 2, 4, 2, 0, 6, 4, 6]
    assert second == [1, 3, 1, 7, 5, 3, 5, -1]


@given(NAMES, st.integers(1, 40))
@MANY
def test_every_rank_ends_with_the_sum_of_all(name, num_ranks):
    assert (holdings(ALGORITHMS[name].schedule(num_ranks)) == 1).all()


@given(NAMES, st.integers(1, 40))
@MANY
def test_a_rank_sends_one_message_and_receives_one_in_a_step(name, num_ranks):
    for step in ALGORITHMS[name].schedule(num_ranks).steps():
        assert len(step.sources)
        for ends in (step.sources, step.targets):
            assert max(collections.Counter(ends.tolist()).values()) == 1
        assert (step.stops > step.starts).all() and (step.sources != step.targets).all()


@given(NAMES, st.integers(1, 40))
@MANY
def test_steps_and_bytes_are_those_of_the_formulas(name, num_ranks):
    schedule, terms = ALGORITHMS[name].schedule(num_ranks), ALGORITHMS[name].terms(num_ranks)
    largest = [(step.stops - step.starts).max() / schedule.num_blocks for step in schedule.steps()]
    adding = [step.adds for step in schedule.steps()]
    assert terms.latencies + terms.latencies_across == len(largest)
    assert terms.sent + terms.sent_across == pytest.approx(sum(largest))
    assert terms.added == pytest.approx(sum(itertools.compress(largest, adding)))


# PERFORMANCE: the formulas as they are published, for powers of two.
def test_the_published_formulas():
    for n in (2, 4, 8, 16):
        check_published_formulas(n)


def check_published_formulas(n):
    share, log = (n - 1) / n, log2_ceiling(n)
    terms = {name: tuple(each.terms(n))[:3] for name, each in ALGORITHMS.items()}
    assert terms["ring"] == (2 * (n - 1), 2 * share, share)
    assert terms["halving_doubling"] == (2 * log, 2 * share, share)
    assert terms["recursive_doubling"] == (log, log, log)
    assert terms["reduce_to_one"] == (2 * (n - 1), 2 * (n - 1), n - 1)


@given(st.integers(2, 60), st.integers(1, 9))
@MANY
def test_a_phase_of_the_double_tree_is_no_longer_than_promised(num_ranks, num_packets):
    schedule = double_binary_tree.schedule(num_ranks, num_packets)
    num_steps = sum(1 for _ in schedule.steps())
    assert num_steps <= 2 * double_binary_tree.max_rising(num_ranks, num_packets)


@given(st.sampled_from(GROUPED), st.integers(1, 6), st.integers(1, 6))
@MANY
def test_groups_of_any_size(name, local_ranks, num_groups):
    num_ranks = local_ranks * num_groups
    schedule = ALGORITHMS[name].schedule(num_ranks, local_ranks)
    assert (holdings(schedule) == 1).all()
    across = 0.0
    for step in schedule.steps():
        crosses = step.sources // local_ranks != step.targets // local_ranks
        # A step is within the groups or across them, never both.
        assert crosses.all() or not crosses.any()
        across += crosses.any() * (step.stops - step.starts).max() / schedule.num_blocks
    assert ALGORITHMS[name].terms(num_ranks, local_ranks).sent_across == pytest.approx(across)


def test_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="local_ranks=3, num_ranks=8"):
        rings.hierarchical(8, 3)
    assert rings.groups(12, None) == (4, 3)
    assert rings.groups(7, None) == (7, 1)


@given(st.integers(0, 50), st.integers(1, 12))
@MANY
def test_blocks_cover_a_vector_of_any_size(count, num_ranks):
    bounds = rings.ring(num_ranks).bounds(count)
    assert bounds[0] == 0 and bounds[-1] == count
    assert np.ptp(np.diff(bounds)) <= 1


def test_no_ranks():
    for algorithm in ALGORITHMS.values():
        with pytest.raises(ValueError, match="at least one rank. Received: num_ranks=0"):
            algorithm.schedule(0)
