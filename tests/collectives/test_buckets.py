"""Which gradients go together."""

from hypothesis import given
from hypothesis import strategies as st

from tfparallel.collectives.packing import buckets


def test_from_the_last_layer_to_the_first():
    assert buckets([4, 4, 4, 8], 8) == [[3], [2, 1], [0]]
    assert buckets([4, 4, 4, 8], None) == [[3, 2, 1, 0]]
    assert buckets([100], 8) == [[0]]
    assert buckets([], 8) == buckets([], None) == []


@given(st.lists(st.integers(0, 100)), st.integers(1, 100))
def test_each_once_and_no_bucket_closes_too_early_or_too_late(sizes, limit):
    result = buckets(sizes, limit)
    assert [i for bucket in result for i in bucket] == list(reversed(range(len(sizes))))
    for bucket in result[:-1]:
        assert sum(sizes[i] for i in bucket) >= limit
    for bucket in result:
        assert sum(sizes[i] for i in bucket[:-1]) < limit
