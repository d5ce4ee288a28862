"""Schedules: literal tables for small cases, and what must hold of all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfparallel.layout.drawing import as_trace, draw_schedule
from tfparallel.layout.schedule import ScheduleError, make_schedule
from tfparallel.layout.simulator import StageSeconds, simulate, theoretical_bubble


def rows(*arguments):
    return [" ".join(map(str, row)) for row in make_schedule(*arguments).instructions]


def test_gpipe():
    assert rows("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b():
    assert rows("1f1b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_micro_batches_than_devices():
    assert rows("1f1b", 3, 1) == ["F0 B0"] * 3


def test_interleaved():
    schedule = make_schedule("interleaved", 2, 4)
    stages = [[f"{i}@{i.stage}" for i in of_device] for of_device in schedule.instructions]
    assert stages[0] == (
        "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0".split()
    )
    assert stages[1] == (
        "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1".split()
    )


def test_drawn_as_in_the_docstring():
    assert draw_schedule(make_schedule("1f1b", 3, 4)) == (
        "0 │F0F1F2        B0--F3B1--  B2--  B3--│\n"
        "1 │  F0F1    B0--F2B1--F3B2--  B3--    │\n"
        "2 │    F0B0--F1B1--F2B2--F3B3--        │"
    )


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    devices = draw(st.integers(1, 5))
    if name != "interleaved":
        return make_schedule(name, devices, draw(st.integers(1, 9)))
    devices = max(devices, 2)
    return make_schedule(
        name, devices, devices * draw(st.integers(1, 4)), draw(st.integers(2, 4))
    )


@given(schedules())
def test_everything_is_done_once_behind_what_it_needs(schedule):
    seen = set()
    for device, instruction in schedule.in_order():
        assert device == schedule.device_of(instruction.stage)
        assert set(schedule.needs(instruction)) <= seen
        assert instruction not in seen
        seen.add(instruction)
    assert len(seen) == 2 * schedule.num_stages * schedule.num_micro_batches


@given(schedules())
def test_equal_stages_leave_the_bubble_of_the_formula(schedule):
    times = [StageSeconds(1.0, 2.0)] * schedule.num_stages
    timeline = simulate(schedule, times)
    assert timeline.bubble == pytest.approx(theoretical_bubble(schedule))


@given(schedules(), st.data())
def test_no_device_does_two_things_at_once_and_nothing_comes_before_it_is_sent(schedule, data):
    seconds = st.floats(0.1, 3.0)
    times = [
        StageSeconds(data.draw(seconds), data.draw(seconds), data.draw(st.floats(0.0, 1.0)))
        for _ in range(schedule.num_stages)
    ]
    timeline = simulate(schedule, times)
    for of_device in schedule.instructions:
        spans = [timeline.seconds[instruction] for instruction in of_device]
        for (_, end), (begin, _) in zip(spans, spans[1:], strict=False):
            assert end <= begin
        for instruction in of_device:
            for needed in schedule.needs(instruction):
                assert timeline.seconds[needed][1] <= timeline.seconds[instruction][0]
    assert 0 <= timeline.bubble < 1


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_behind(devices, number):
    in_flight = make_schedule("1f1b", devices, number).most_in_flight()
    assert in_flight == [min(devices - d, number) for d in range(devices)]
    assert make_schedule("gpipe", devices, number).most_in_flight() == [number] * devices


def test_unequal_stages_take_what_the_formula_says():
    times = [StageSeconds(1.0, 2.0), StageSeconds(2.0, 4.0)]
    timeline = simulate(make_schedule("gpipe", 2, 8), times)
    assert timeline.makespan == 3 + 6 + 7 * 6
    assert timeline.most_in_flight() == [8, 8]


def test_a_trace_has_each_instruction():
    schedule = make_schedule("1f1b", 2, 3)
    trace = as_trace(simulate(schedule, [StageSeconds(1.0, 2.0, 0.1)] * 2), ["CPU:0", "CPU:1"])
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["ts"]) for e in spans[:2]] == [("F0", 0.0), ("F1", 1e6)]
    assert len(spans) == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zigzag", 2, 4), "'zigzag'"),
        (("1f1b", 2, 0), "`num_micro_batches`.*Received: 0"),
        (("gpipe", 2, 4, 2), "chunks_per_device=2, schedule='gpipe'"),
        (("interleaved", 4, 6), "num_micro_batches=6 on 4 devices. Use 8"),
        (("interleaved", 1, 6), "num_devices=1"),
        (("interleaved", 2, 6, 1), "chunks_per_device=1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, said):
    with pytest.raises(ScheduleError, match=said):
        make_schedule(*arguments)
