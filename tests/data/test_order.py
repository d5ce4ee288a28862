"""The order of examples is a pure function of the seed and the pass."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.data.example_order import batch_indices, epoch_order, num_batches_per_pass

SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(st.integers(0, 300), SEEDS, st.integers(0, 1000))
def test_each_epoch_is_a_permutation_and_repeats(num_examples, seed, epoch):
    order = epoch_order(num_examples, seed, epoch)
    assert sorted(order) == list(range(num_examples))
    np.random.seed(1)  # no global state takes part
    assert np.array_equal(order, epoch_order(num_examples, seed, epoch))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 40), SEEDS, st.integers(1, 4))
def test_each_pass_sees_every_example_once(num_examples, global_batch_size, seed, num_passes):
    per_pass = num_batches_per_pass(num_examples, global_batch_size)
    steps = batch_indices(num_examples, global_batch_size, seed, 0, num_passes * per_pass)
    for index in range(num_passes):
        seen = np.concatenate(steps[index * per_pass : (index + 1) * per_pass])
        assert np.array_equal(seen, epoch_order(num_examples, seed, index))


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 40), SEEDS, st.integers(0, 50), st.integers(1, 20))
def test_steps_do_not_depend_on_where_the_run_started(n, batch, seed, first, num_steps):
    whole = batch_indices(n, batch, seed, 0, first + num_steps)
    part = batch_indices(n, batch, seed, first, num_steps)
    assert len(part) == num_steps
    assert all(np.array_equal(a, b) for a, b in zip(whole[first:], part, strict=True))


def test_sizes_of_the_picture_in_the_module():
    assert [len(step) for step in batch_indices(7, 3, 0, 0, 7)] == [3, 3, 1, 3, 3, 1, 3]


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_negative_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=rf"num_examples={arguments[0]}, seed={arguments[1]}"):
        epoch_order(*arguments)
