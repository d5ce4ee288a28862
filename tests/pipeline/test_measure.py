"""What timelines say of the stages."""

import pytest

from tfparallel.layout.schedule import make_schedule
from tfparallel.layout.simulator import StageSeconds, simulate
from tfparallel.pipeline.measure import stage_seconds


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_seconds_of_a_simulated_timeline_are_found_again(name):
    stages = [StageSeconds(1.0, 2.0, 0.25), StageSeconds(1.5, 3.0)]
    schedule = make_schedule(name, 2, 4)
    measured = stage_seconds([simulate(schedule, stages)])
    for stage, expected in zip(measured, stages, strict=True):
        assert vars(stage) == pytest.approx(vars(expected))
