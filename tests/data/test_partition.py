"""The partition of a batch: the literal table, then what holds for every size."""

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfparallel.data.partition import RowRange, row_ranges

# (rows, shards) -> (start, size) of each shard
TABLE = {
    (6, 1): [(0, 6)],
    (6, 2): [(0, 3), (3, 3)],
    (6, 3): [(0, 2), (2, 2), (4, 2)],
    (7, 2): [(0, 3), (3, 4)],
    (7, 3): [(0, 2), (2, 2), (4, 3)],
    (10, 4): [(0, 2), (2, 3), (5, 2), (7, 3)],
    (17, 3): [(0, 5), (5, 6), (11, 6)],
    # Fewer rows than shards: some are empty.
    (2, 3): [(0, 0), (0, 1), (1, 1)],
    (1, 4): [(0, 0), (0, 0), (0, 0), (0, 1)],
    (0, 2): [(0, 0), (0, 0)],
}


@pytest.mark.parametrize("rows, shards", TABLE)
def test_table(rows, shards):
    assert row_ranges(rows, shards) == [RowRange(*pair) for pair in TABLE[rows, shards]]


@hypothesis.given(rows=st.integers(0, 10_000), shards=st.integers(1, 64))
def test_every_row_has_one_shard_and_sizes_differ_by_at_most_one(rows, shards):
    ranges = row_ranges(rows, shards)
    assert len(ranges) == shards
    ends = [0, *[start + size for start, size in ranges]]
    assert [start for start, _ in ranges] == ends[:-1]
    assert ends[-1] == rows
    sizes = [size for _, size in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 0


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(rows=st.integers(0, 10_000), shards=st.integers(1, 16))
def test_a_row_count_known_only_at_run_time_gives_the_same(rows, shards):
    ranges = row_ranges(tf.constant(rows), shards)
    assert [(int(start), int(size)) for start, size in ranges] == row_ranges(rows, shards)


def test_the_larger_shards_come_last():
    """floor(k·B/N): a remainder-first split would give [2, 2, 1]."""
    assert [size for _, size in row_ranges(5, 3)] == [1, 2, 2]


def test_weights_give_unequal_shares():
    assert row_ranges(8, 2, [3, 1]) == [RowRange(0, 6), RowRange(6, 2)]
    assert row_ranges(7, 3, [2, 1, 1]) == [RowRange(0, 3), RowRange(3, 2), RowRange(5, 2)]
    assert row_ranges(1, 2, [3, 1]) == [RowRange(0, 0), RowRange(0, 1)]


@hypothesis.given(rows=st.integers(0, 10_000), weights=st.lists(st.integers(1, 9), min_size=1))
def test_every_weighted_share_is_within_one_row_of_its_weight(rows, weights):
    ranges = row_ranges(rows, len(weights), weights)
    ends = [0, *[start + size for start, size in ranges]]
    assert [start for start, _ in ranges] == ends[:-1] and ends[-1] == rows
    for (_, size), weight in zip(ranges, weights, strict=True):
        assert abs(size - rows * weight / sum(weights)) < 1


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, 2.5], [1, 2, 3], [True, 1]])
def test_invalid_weights_raise(weights):
    with pytest.raises(ValueError, match="one whole number of at least 1 for each replica"):
        row_ranges(8, 2, weights)
