"""Restarts that follow each other soon wait longer and longer."""

from tfparallel.cluster.launcher.back_off import RestartBackOff


def test_restarts_wait_longer_and_longer():
    """Story: 150 restarts were used up in 44 s."""
    back_off = RestartBackOff()
    waits = [back_off.failed(lasted_seconds=0.2) for _ in range(9)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [back_off.failed(90.0), back_off.failed(0.2)] == [0, 1]  # It had worked for a while.
