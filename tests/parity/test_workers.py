"""Cases on several worker processes; `make parity` runs all of them, on three jobs."""

from __future__ import annotations

import functools

import pytest

# By the name by which the forked workers import it.
from tests.parity.workers import run_cases

from . import table
from .cases import ALL

# Where workers may go wrong and replicas of one process may not: what is exchanged (predictions,
# sparse gradients, divisors) and what is drawn.
SAMPLE = {
    "2 x 2": [
        "sparse gradients under Adam",
        "loss that compares examples",
        "mask and sample weights a token",
        "random Dropout",
        "gradient penalty",
    ],
    # Whose third worker once looked for a copy of a weight that it does not have.
    "3": ["three steps an update"],
}


@functools.cache
def seen_by(job: str):
    return run_cases(SAMPLE[job], *table.JOBS[job])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "name"), [(job, name) for job, names in SAMPLE.items() for name in names]
)
def test_workers_train_as_one_device_does(job: str, name: str):
    if table.MODE == "write":
        pytest.skip("`python -m tests.parity.table` runs all of them")
    (case,) = [case for case in ALL if case.name == name]
    seen = seen_by(job)[name]
    assert not seen.failure, seen.failure
    table.record(case, table.WORKERS, job, seen.verdict, seen.detail)
    table.refuse_stale(case, table.WORKERS, job)
