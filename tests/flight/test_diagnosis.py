"""What is said of a job whose steps have such parts."""

import pytest

from tfparallel.flight.diagnosis import verdict
from tfparallel.flight.job import Split


def split(worker=0, *, input=1, compute=20, reduction=1, waiting=0, between=0):
    """In milliseconds."""
    parts = {"input": input, "compute": compute, "reduction": reduction}
    parts |= {"waiting": waiting, "between": between}
    seconds = {name: value / 1e3 for name, value in parts.items()}
    return Split(worker, 50, sum(seconds.values()), **seconds)


@pytest.mark.parametrize(
    ("splits", "options", "expected"),
    [
        ([split(0), split(1)], {}, "no bottleneck: 95%"),
        (
            [split(0, waiting=20), split(1, compute=40)],
            {},
            "worker 1 is slow: its own work takes 41.0 ms",
        ),
        ([split(0, waiting=20), split(1, between=20)], {}, "between steps, in a callback"),
        ([split(0, waiting=20), split(1, input=21)], {}, "input-bound on worker 1: its steps"),
        ([split(0, between=30), split(1, waiting=30)], {}, "worker 0 is slow"),
        ([split(w, waiting=30 * (w != 2), between=30 * (w == 2)) for w in range(4)], {},
         "worker 2 is slow"),
        ([split(0, input=20), split(1, input=20)], {}, "input-bound: 20.0 of 41.0 ms"),
        ([split(0, between=20), split(1, between=20)], {}, "callbacks: 20.0 of 42.0 ms"),
        ([split(w, compute=2, reduction=1, waiting=1) for w in (0, 1)], {"sent_bytes": 6e5},
         "batch too small: a step computes for 2.0 ms, then spends 2.0 ms"),
        ([split(w, reduction=40) for w in (0, 1)], {"sent_bytes": 4.5e6, "link_bits": 1e9},
         "the link carries 0.9 of 1 Gbit/s: 40.0 of 61.0 ms"),
        ([split(w, reduction=40) for w in (0, 1)], {"sent_bytes": 4e7}, "the link carries 8 Gbit"),
        ([split(0), split(1)], {"expected_compute": 0.010}, "batch too small: a worker computes"),
        ([split(0)], {}, "no bottleneck"),
        ([split(w, input=0.2, compute=2, reduction=0.1) for w in (0, 1)], {},
         "batch too small: a step takes 2.3 ms"),
        ([split(0, input=30)], {}, "input-bound"),
    ],
)  # fmt: skip
def test_the_cause_is_named(splits, options, expected):
    assert expected in verdict(splits, **options)
