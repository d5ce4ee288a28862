"""What each device is to hold, by the schedule's own arithmetic."""

import pytest

from tfparallel.layout.schedule import make_schedule
from tfparallel.layout.simulator import StageSeconds, simulate
from tfparallel.pipeline.pipeline_plan import PipelinePlan, PlannedStage

STATE, ACTIVATION, RECEIVED = 1000, 64, 8


def planned(name, recompute, num_micro_batches=8, num_devices=2):
    schedule = make_schedule(name, num_devices, num_micro_batches)
    stages = [
        PlannedStage(["layer"], schedule.device_of(s), 400, STATE, ACTIVATION, RECEIVED, 1.0, 2.0)
        for s in range(schedule.num_stages)
    ]
    seconds = [StageSeconds(stage.forward_seconds, stage.backward_seconds) for stage in stages]
    return PipelinePlan(stages, schedule, simulate(schedule, seconds), recompute, 64)


@pytest.mark.parametrize(
    ("name", "recompute", "of_activations"),
    [
        ("gpipe", "never", 8 * ACTIVATION),
        ("1f1b", "never", 2 * ACTIVATION),
        ("gpipe", "always", 8 * RECEIVED + ACTIVATION),
        ("1f1b", "always", 2 * RECEIVED + ACTIVATION),
    ],
)
def test_the_first_device_holds_what_is_in_flight(name, recompute, of_activations):
    assert planned(name, recompute).held_bytes(0) == STATE + of_activations


def test_a_device_of_two_stages_holds_both():
    found = planned("interleaved", "never")
    assert found.held_bytes(0) == 2 * STATE + found.schedule.most_in_flight()[0] * ACTIVATION


def test_a_plan_is_told_as_json():
    found = planned("1f1b", "never").as_json()
    assert found["step_seconds"] == 3 * 9
    assert found["one_after_the_other_seconds"] == 2 * 8 * 3
    assert found["bubble"] == pytest.approx(found["bubble_of_equal_stages"])
