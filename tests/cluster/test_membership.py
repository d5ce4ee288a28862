"""Of two halves of a network at most one goes on."""

import itertools

import pytest

from tfparallel.cluster.membership import Present, are_all_back, has_quorum


def host(node=None, attempt=3, may_run=None):
    """A launcher that was a node of a round, or a new one."""
    hello = {"last_node": node, "node_rank": None, "attempt": attempt, "may_run": may_run}
    return Present(None, "", hello)


@pytest.mark.parametrize("number", range(1, 7))
def test_never_both_halves(number):
    """However they are cut, and whoever of them knows that all may be running."""
    nodes = [host(node, may_run=number) for node in range(number)]
    for size in range(number + 1):
        for half in itertools.combinations(nodes, size):
            other = [each for each in nodes if each not in half]
            both = [bool(part) and has_quorum(part) for part in (half, other)]
            assert sum(both) == 1, (len(half), len(other))


def test_a_host_that_has_certainly_ended_is_not_needed():
    assert has_quorum([host(2, may_run=1)]) and are_all_back([host(2, may_run=1)])
    assert has_quorum([host(1, may_run=2), host(2, may_run=2)])
    assert not has_quorum([host(1, may_run=2)]) and not are_all_back([host(1, may_run=2)])


def test_the_one_who_knows_most_is_believed():
    """Another has not heard that a third one has ended."""
    assert are_all_back([host(1, may_run=3), host(2, may_run=2)])


def test_a_host_that_missed_the_last_round_does_not_count():
    late = host(0, attempt=2, may_run=3)
    assert not has_quorum([late, host(1, may_run=3)])
    assert has_quorum([late, host(1, may_run=3), host(2, may_run=3)])


def test_a_new_job_needs_nobody_of_a_round():
    assert has_quorum([host(attempt=-1)]) and not are_all_back([host(attempt=-1)])
