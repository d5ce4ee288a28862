"""Which tests run in the same process of `pytest -n`: those that share what takes long to make.

A job of workers is started once for a module's tests, by a fixture, and a parity case is trained
on one device once for all its pairs. pytest-xdist's own `--dist=loadgroup` is to do this, but 3.8
finds no group under pytest 9.2.
"""

import re

from xdist.scheduler import LoadScopeScheduling

# Files whose tests look at what one job has done.
JOBS = ("placement/test_processes.py", "asynchronous/test_asynchronous_model.py")


def shared_work(nodeid: str) -> str:
    """Returns what a test shares with others, as a text that is the same for all of them.

    Args:
        nodeid: The test's id, as pytest has it.
    """
    path, _, test = nodeid.partition("::")
    # The parameters' ids: "Dice-data_parallel-3" of a case, "2 x 2-name" of a job.
    parameters = re.search(r"\[(.*)\]$", test)
    if path.endswith("parity/test_parity.py") and parameters:
        return f"{path}::{parameters[1].rsplit('-', 2)[0]}"
    if "/workers/" in path or path.endswith("parity/test_workers.py"):
        job = re.match(r"\d( x \d)?(?=-|$)", parameters[1]) if parameters else None
        return f"{path}::{job[0]}" if job else path
    if path.endswith(JOBS):
        return path
    return nodeid


class BySharedWork(LoadScopeScheduling):
    """Keeps the tests of one job of workers together, and the pairs of one parity case."""

    def _split_scope(self, nodeid):
        return shared_work(nodeid)
