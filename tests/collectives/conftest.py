"""Two groups in two threads of one process stand for two workers; their collectives are real."""

import concurrent.futures

import pytest

from tfparallel.collectives.process_group import ProcessGroup

PREFIX = "/job:localhost/replica:0/task:0/device:"


@pytest.fixture(name="workers")
def two_workers():
    groups = [ProcessGroup(2, k, f"{PREFIX}CPU:{k}", timeout_seconds=30.0) for k in range(2)]
    for group in groups[1:]:
        group._group_key = groups[0]._group_key  # As in processes, which each count from the first.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:

        def on_both(function, *arguments):
            """Calls `function(group, argument of the worker …)` on both; returns both results."""
            calls = [
                pool.submit(function, group, *(each[k] for each in arguments))
                for k, group in enumerate(groups)
            ]
            return [call.result(timeout=60) for call in calls]

        yield on_both
