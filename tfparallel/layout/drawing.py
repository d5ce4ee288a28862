"""A timeline as text, as a picture, and as a trace for `chrome://tracing` or ui.perfetto.dev."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tfparallel.layout.schedule import Schedule
from tfparallel.layout.simulator import StageSeconds, Timeline, simulate

_COLUMNS = 180  # The length of the longest row.
_COLORS = {"forward": "#4c78a8", "backward": "#f2a34b"}


def as_text(timeline: Timeline) -> str:
    """Draws one row per device; an instruction's name marks its begin.

    Returns:
        Rows such as `0 │F0F1B0--F2B1--B2--│`. `F3'` is micro-batch 3 in the device's second stage.
    """
    shortest = min(end - begin for begin, end in timeline.seconds.values())
    names = {i: _name(i, timeline.schedule) for i in timeline.seconds}
    widest = max(map(len, names.values()))
    # As wide as the names need; if that is too wide, names are cut.
    longest = timeline.makespan or 1
    scale = min(widest / shortest if shortest else _COLUMNS, _COLUMNS / longest)
    columns = round(timeline.makespan * scale)
    rows = []
    for device, passes in enumerate(timeline.schedule.instructions):
        row = [" "] * columns
        for instruction in passes:
            begin, end = (round(second * scale) for second in timeline.seconds[instruction])
            text = names[instruction][: end - begin].ljust(end - begin, "-")
            row[begin:end] = text
        rows.append(f"{device} │{''.join(row)}│")
    return "\n".join(rows)


def draw_schedule(schedule: Schedule) -> str:
    """Draws a schedule with equal stages, whose backward passes take twice as long."""
    return as_text(simulate(schedule, [StageSeconds(1.0, 2.0)] * schedule.num_stages))


def as_trace(timeline: Timeline, devices: Sequence[str]) -> dict[str, Any]:
    """Returns a timeline as Chrome trace events, in microseconds, one row per device."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": index, "name": "thread_name", "args": {"name": name}}
        for index, name in enumerate(devices)
    ]
    for device, passes in enumerate(timeline.schedule.instructions):
        for instruction in passes:
            begin, end = timeline.seconds[instruction]
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": device,
                    "name": _name(instruction, timeline.schedule),
                    "cat": instruction.kind,
                    "ts": 1e6 * begin,
                    "dur": 1e6 * (end - begin),
                    "args": {"stage": instruction.stage, "micro_batch": instruction.micro_batch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str, timeline: Timeline, devices: Sequence[str]) -> None:
    """Writes a trace file."""
    pathlib.Path(path).write_text(json.dumps(as_trace(timeline, devices)) + "\n")


def write_picture(path: str, timeline: Timeline, devices: Sequence[str], title: str) -> None:
    """Writes a picture of a timeline, one row per device.

    Raises:
        ImportError: If matplotlib is missing; the extra `bench` installs it.
    """
    from matplotlib.figure import Figure  # Heavy, and an extra that only pictures need.
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.6 + 0.5 * len(devices)), layout="constrained")
    axes = figure.subplots()
    for device, passes in enumerate(timeline.schedule.instructions):
        for instruction in passes:
            begin, end = (1e3 * second for second in timeline.seconds[instruction])
            color = _COLORS[instruction.kind]
            # A device's second stage is paler than its first.
            chunk = instruction.stage // timeline.schedule.num_devices
            axes.barh(
                device, end - begin, left=begin, height=0.8, color=color,
                alpha=1.0 / (1 + 0.6 * chunk), edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            if end - begin > 1e3 * timeline.makespan / 60:
                axes.text(
                    (begin + end) / 2, device, str(instruction.micro_batch),
                    ha="center", va="center", fontsize=8,
                )  # fmt: skip
    axes.set_yticks(range(len(devices)), list(devices))
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * timeline.makespan)
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10, loc="left")
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _name(instruction, schedule) -> str:
    return f"{instruction}{chr(39) * (instruction.stage // schedule.num_devices)}"
