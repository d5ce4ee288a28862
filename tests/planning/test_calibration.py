"""What a tiny model's steps say of replicas and calls."""

import pytest

from tfparallel.layout.model_costs import Line, Machine
from tfparallel.planning.calibration import TinySteps, calibrated


def test_what_was_measured_is_predicted_again():
    # Four weights are updated: a second each.
    overhead, machine = calibrated(TinySteps(10.0, 13.0, 24.0), Line(1.0, 0.0), Machine())
    assert overhead == 6.0
    assert machine.replica_seconds == pytest.approx(1.5)
    # Two stages update two weights each at the same time: 24 - 6 - 2 are calls. Of forward and
    # backward calls (M + K - 1) = 5 stand one behind the other.
    assert machine.call_seconds == pytest.approx(16.0 / (2 * 5))


def test_on_busy_cores_all_calls_stand_behind_each_other():
    overhead, machine = calibrated(TinySteps(10.0, None, 26.0), Line(), Machine(side_by_side=1.0))
    assert overhead == 10.0 and machine.replica_seconds == 0.0
    assert machine.call_seconds == pytest.approx(16.0 / (2 * 2 * 4))


def test_less_than_nothing_is_nothing():
    overhead, machine = calibrated(TinySteps(1.0, 0.5, 0.5), Line(1.0, 0.0), Machine())
    assert (overhead, machine.replica_seconds, machine.call_seconds) == (0.0, 0.0, 0.0)


def test_the_cost_of_shares_is_per_weight_and_replica():
    # Two replicas take 13 s, of which they update four weights; in shares each updates them, too.
    steps = TinySteps(10.0, 13.0, shares=17.0)
    _, machine = calibrated(steps, Line(1.0, 0.0), Machine())
    assert machine.share_seconds == pytest.approx((17.0 - 13.0) / (2 * 4))
    _, machine = calibrated(TinySteps(10.0, 13.0, shares=12.0), Line(1.0, 0.0), Machine())
    assert machine.share_seconds == 0.0
