"""`tfparallel plan TASK.py`: finds the fastest mesh of devices for a task, and whether it fits.

With `--parallel=model` it shows the placement of layers; with `--parallel=pipeline` the timeline of
each device. All are views of one plan (`planning/planner.py`).
"""

import contextlib
import math
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfparallel import devices as device_lib
from tfparallel.command_line.exits import UsageError
from tfparallel.command_line.options import TrainOptions
from tfparallel.commands.task_setup import nothing_fits, plan_task, what_fits
from tfparallel.diagnostics.report import versions, write_report
from tfparallel.layout.drawing import as_text, write_picture, write_trace
from tfparallel.layout.simulator import theoretical_bubble
from tfparallel.planning.candidates import Candidate
from tfparallel.planning.planner import Plan
from tfparallel.task import load_task
from tfparallel.texts import aligned, counted, seconds_text, size_text

_View = tuple[list[str], dict[str, Any]]  # The printed lines, and the report's content.


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Prints the plan; returns 1 if nothing fits."""
    (path,) = positional
    # Before the task file is imported, which may start TensorFlow.
    options = TrainOptions.of(values)
    devices = _devices(options)
    plan = plan_task(load_task(path), options.num_devices, options, devices)
    lines, details = _VIEWS[options.parallel](path, options, plan)
    print("\n".join(lines))
    _draw(path, values, plan)
    if values.report is not None:
        content = {"command": "plan", "task": path, **plan.as_json(), **details}
        write_report(values.report, content | {"versions": versions()})
    for name in ("draw", "trace", "report"):
        if getattr(values, name) is not None:
            print(f"wrote {getattr(values, name)}")
    return 0 if plan.first is not None else 1


def _devices(options: TrainOptions) -> list[str]:
    """The devices for trials. Without trials, two if available, to time a tiny model."""
    if options.num_trials:
        try:
            return device_lib.choose_devices(num_devices=options.num_devices)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"--num_trials needs the actual devices. {error}") from error
    if options.num_devices > 1:
        with contextlib.suppress(ValueError, RuntimeError):
            return device_lib.choose_devices(num_devices=2)
    return []


def _command(path: str, options: TrainOptions, candidate: Candidate) -> str:
    """Returns the command that trains a task on a candidate's mesh."""
    mesh, parallelism = candidate.mesh, candidate.parallelism
    parts = [f"tfparallel train {shlex.quote(path)} --parallel={parallelism}"]
    if parallelism == "hybrid":
        parts.append(f"--mesh={str(mesh).replace(', ', ',')}")
    elif mesh.size > 1:
        parts.append(f"--num_devices={mesh.size}")
    if candidate.shard is not None:
        parts.append(f"--shard={candidate.shard}")
    if mesh.pipeline > 1 and parallelism != "model":
        parts.append(f"--num_micro_batches={candidate.num_micro_batches}")
        for name in ("schedule", "chunks_per_device", "recompute"):
            if getattr(options, name) is not None:
                parts.append(f"--{name}={getattr(options, name)}")
    if candidate.balance not in (None, "memory" if parallelism == "model" else "time"):
        parts.append(f"--balance={candidate.balance}")
    # A cut balanced by memory alone does not depend on the limit.
    is_limited = options.parallel != "auto" and candidate.balance not in (None, "memory")
    if is_limited and options.device_memory is not None:
        parts.append(f"--device_memory={options.device_memory}")
    if parallelism in ("pipeline", "hybrid") and options.batch_normalization is not None:
        parts.append(f"--batch_normalization={options.batch_normalization}")
    return " ".join([*parts, f"--global_batch_size={options.global_batch_size}"])


def _all_meshes(path: str, options: TrainOptions, plan: Plan) -> _View:
    """Lists all meshes by rank, and why the first is best."""
    first = plan.first
    if first is None:
        head = [nothing_fits(plan)]
    else:
        measured = "" if first.measured_seconds is None else ", measured"
        head = [
            f"first: {first.name}, {seconds_text(first.step_seconds)} a step{measured}; the "
            "command:",
            f"  {_command(path, options, first)}",
            f"why: {plan.why}",
        ]
    return [*head, "", *_table(plan), "", *_basis(plan)], {}


def _table(plan: Plan) -> list[str]:
    head = ("tried",) if plan.num_trials else ()
    rows = [("mesh", *head, "step", "passes", "sums", "updates", "shares", "memory per device", "")]
    for candidate in plan.ranked:
        name = candidate.name
        measured = candidate.measured_seconds
        trial = ["–" if measured is None else seconds_text(measured)] * len(head)
        if candidate.prediction is None:
            rows.append((name, *trial, *6 * ["–"], candidate.why_not))
            continue
        if candidate.mesh.pipeline > 1:
            name += f", {candidate.num_micro_batches} micro-batches"
        prediction = candidate.prediction
        seconds = (
            prediction.step_seconds,
            prediction.passes_seconds,
            prediction.sums_seconds,
            prediction.update_seconds,
        )
        seconds = (*seconds, prediction.copies_seconds)
        texts = (*trial, *map(seconds_text, seconds), size_text(candidate.held_bytes))
        rows.append((name, *texts, candidate.why_not or ""))
    return aligned(rows)


def _basis(plan: Plan) -> list[str]:
    rows = " and ".join(map(str, plan.measured_rows))
    lines = [
        f"measured in {plan.seconds:.0f} s, layer by layer, at {rows} rows; step times are "
        "predicted from that, no mesh was run"
    ]
    if plan.num_trials:
        meshes = f"{plan.num_trials} mesh{'es' * (plan.num_trials > 1)}"
        lines = [
            f"measured in {plan.seconds:.0f} s, layer by layer, at {rows} rows, to predict step "
            f"times; {meshes} tried in {plan.trial_seconds:.0f} s"
        ]
    if plan.share_in_parts is not None:
        lines.append(f"tensor=… splits {plan.share_in_parts:.0%} of the weights")
    if not plan.has_loss:
        lines.append("the loss was not measured: it does not accept synthetic targets")
    if plan.num_cores is not None and plan.num_devices > 1:
        at_once = min(plan.num_cores, plan.num_devices)
        lines.append(
            f"the devices share {counted(plan.num_cores, 'core')}: {at_once} running at once do "
            f"{plan.side_by_side:.2f} times the work of one"
        )
    elif plan.num_devices > 1 and math.isinf(plan.side_by_side):
        lines.append("each device computes independently; transfers between them were not measured")
    return lines


def _layers_on_devices(path: str, options: TrainOptions, plan: Plan) -> _View:
    """Shows the placement of layers on as few devices as suffice; on all without a limit."""
    limit = "" if options.device_memory is None else f" of {size_text(options.device_memory)}"
    by_number = sorted(plan.ranked, key=lambda candidate: candidate.mesh.size)
    largest = {c.mesh.size: c.held_bytes for c in by_number if c.prediction is not None}
    first = plan.first
    stages: list[dict[str, Any]] = []
    if first is None:
        over = min(largest.values()) - options.device_memory
        lines = [
            f"does not fit {plan.num_devices} devices{limit}: the largest stage of the best cut is "
            f"{size_text(over)} too large. {what_fits(plan)}",
            "",
        ]
    else:
        bytes_by_device = first.prediction.held_bytes
        stages = [stage.as_json() for stage in first.prediction.stages]
        stages = [{**stage, "held_bytes": bytes_by_device[stage["device"]]} for stage in stages]
        rows = [("stage", "layers", "parameters", "memory", "time", "input per batch")]
        rows += [
            (str(index), _names(stage["layers"]), size_text(stage["parameter_bytes"]),
             size_text(stage["held_bytes"]),
             seconds_text(stage["forward_seconds"] + stage["backward_seconds"]),
             size_text(stage["received_bytes"]))
            for index, stage in enumerate(stages)
        ]  # fmt: skip
        lines = [
            *_what_fits(path, options, plan, first, limit),
            "",
            *aligned(rows),
            "",
            f"predicted step: {seconds_text(first.step_seconds)} for {options.global_batch_size} "
            "examples, with stages run one after the other",
            "",
        ]
    lines.append("devices  largest stage of the best cut")
    for number, held_bytes in largest.items():
        over = 0 if options.device_memory is None else held_bytes - options.device_memory
        verdict = f", {size_text(over)} too much" if over > 0 else ", fits" if limit else ""
        lines.append(f"{number:>7}  {size_text(held_bytes)}{verdict}")
    step = None if first is None else first.step_seconds
    return lines, {"stages": stages, "largest": largest, "step_seconds": step}


def _what_fits(path, options, plan, first, limit) -> list[str]:
    number, line = first.mesh.size, _command(path, options, first)
    if number > 1:
        is_needed = options.device_memory is not None
        memory = f" --device_memory={options.device_memory}" if is_needed else ""
        text = f"needs {number} devices{limit}" if is_needed else f"cut into {number} stages"
        return [
            f"{text}; use --parallel=model; the command:",
            f"  {line}",
            "or keep all devices busy with micro-batches; to see the gain:",
            f"  tfparallel plan {shlex.quote(path)} --parallel=pipeline --num_devices={number} "
            f"--global_batch_size={options.global_batch_size}{memory}",
        ]
    parallelism = "none"
    if plan.num_devices > 1:  # A model that fits one device is faster replicated than split.
        parallelism = "data"
        line = line.replace("--parallel=none", f"--parallel=data --num_devices={plan.num_devices}")
    return [f"fits one device{limit}; use --parallel={parallelism}; the command:", f"  {line}"]


def _one_pipeline(path: str, options: TrainOptions, plan: Plan) -> _View:
    """Shows the timeline of each device of a pipeline."""
    (candidate,) = plan.ranked
    if candidate.prediction is None:
        raise UsageError(f"The model cannot be trained in this pipeline: {candidate.why_not}.")
    prediction, step = candidate.prediction, candidate.step_seconds
    timeline = prediction.timeline
    schedule, stages = timeline.schedule, [stage.as_json() for stage in prediction.stages]
    rows = [("stage", "device", "layers", "parameters", "per micro-batch", "forward", "backward")]
    rows += [
        (str(index), str(stage["device"]), _names(stage["layers"]),
         size_text(stage["parameter_bytes"]), size_text(stage["activation_bytes"]),
         seconds_text(stage["forward_seconds"]), seconds_text(stage["backward_seconds"]))
        for index, stage in enumerate(stages)
    ]  # fmt: skip
    serial = step - prediction.passes_seconds + sum(timeline.busy)
    most_in_flight = schedule.most_in_flight()
    lines = [
        f"{_title(path, candidate)}; the command:",
        f"  {_command(path, options, candidate)}",
        "",
        *aligned(rows),
        "",
        as_text(timeline),
        "",
        f"predicted step: {seconds_text(step)} for {options.global_batch_size} examples, without "
        f"transfers; stages run one after the other: {seconds_text(serial)}, {serial / step:.2f} "
        "times as long",
        f"devices are idle for {timeline.bubble:.0%} of the passes; with equal stages, "
        f"{theoretical_bubble(schedule):.0%}",
        *(
            f"device {device}: micro-batches in flight: at most {number}; holds "
            f"{size_text(size_bytes)} in all"
            for device, (number, size_bytes) in enumerate(
                zip(most_in_flight, prediction.held_bytes, strict=True)
            )
        ),
    ]
    if candidate.why_not is not None:
        lines += ["", f"does not fit: {candidate.why_not}. {what_fits(plan)}"]
    return lines, {
        "schedule": schedule.name,
        "num_micro_batches": schedule.num_micro_batches,
        "stages": stages,
        "held_bytes": list(prediction.held_bytes),
        "most_in_flight": most_in_flight,
        "step_seconds": step,
        "one_after_the_other_seconds": serial,
        "bubble": timeline.bubble,
        "bubble_of_equal_stages": theoretical_bubble(schedule),
    }


_VIEWS = {"auto": _all_meshes, "model": _layers_on_devices, "pipeline": _one_pipeline}


def _names(layers: Sequence[str]) -> str:
    if not layers:
        return "none: passes its inputs on"
    first, *others = layers
    return f"{first} … {others[-1]} ({len(layers)})" if others else first


def _title(path: str, candidate: Candidate) -> str:
    schedule = candidate.prediction.timeline.schedule
    return (
        f"{path}: {schedule.num_micro_batches} micro-batches through {schedule.num_devices} "
        f"devices, schedule {schedule.name}"
    )


def _draw(path: str, values: flags.FlagValues, plan: Plan) -> None:
    """Draws the timeline of a pipeline, and writes it as a trace, if requested."""
    if values.trace is None and values.draw is None:
        return
    timeline = plan.ranked[0].prediction.timeline
    devices = [f"device {index}" for index in range(timeline.schedule.num_devices)]
    if values.trace is not None:
        write_trace(values.trace, timeline, devices)
    if values.draw is None:
        return
    if values.draw.endswith(".txt"):
        pathlib.Path(values.draw).write_text(as_text(timeline) + "\n")
        return
    title = f"{_title(path, plan.ranked[0])}: {seconds_text(timeline.makespan)} of passes"
    try:
        write_picture(values.draw, timeline, devices, title)
    except ImportError as error:
        raise UsageError(
            "Drawing a picture needs matplotlib, which is not installed. Received: "
            f"--draw={values.draw}. Install it (`pip install matplotlib`), or draw text: "
            "--draw=plan.txt."
        ) from error
