"""`tfparallel plan --parallel=pipeline`: what each device does, and when."""

import pathlib

from absl import flags

from tfparallel.activity import Activity
from tfparallel.commands.exits import UsageError
from tfparallel.commands.options import TrainOptions
from tfparallel.diagnostics.report import versions, write_report
from tfparallel.layout.drawing import as_text, write_picture, write_trace
from tfparallel.layout.schedule import ScheduleError, make_schedule
from tfparallel.layout.simulator import theoretical_bubble
from tfparallel.pipeline.pipeline_plan import PipelinePlan, plan_pipeline
from tfparallel.placement.stages import PlacementError
from tfparallel.task import load_task
from tfparallel.texts import aligned, seconds_text, size_text

__all__ = ["answer"]


def answer(path: str, values: flags.FlagValues) -> int:
    """Prints what a pipeline of the task file at `path` would be, and draws it if asked to."""
    options, task = TrainOptions.of(values), load_task(path)
    choices = options.of_pipeline()
    try:
        schedule = make_schedule(
            choices["schedule"],
            values.num_devices,
            choices["num_micro_batches"],
            choices["chunks_per_device"],
        )
        with Activity("measuring the layers"):
            found = plan_pipeline(
                task.build_model,
                task.compile_model,
                schedule,
                batch_size=values.global_batch_size,
                recompute=choices["recompute"],
                balance=choices["balance"],
                device_memory=options.device_memory,
            )
    except (PlacementError, ScheduleError) as error:
        raise UsageError(str(error)) from error
    print("\n".join(_lines(path, values, found)))
    _write(path, values, found)
    return 0


def _write(path: str, values: flags.FlagValues, found: PipelinePlan) -> None:
    devices = [f"device {index}" for index in range(found.schedule.num_devices)]
    if values.draw is not None:
        if values.draw.endswith(".txt"):
            pathlib.Path(values.draw).write_text(as_text(found.timeline) + "\n")
        else:
            title = f"{_title(path, found)}: {seconds_text(found.timeline.makespan)} a step"
            try:
                write_picture(values.draw, found.timeline, devices, title)
            except ImportError as error:
                raise UsageError(
                    "A picture needs matplotlib, which is missing. Received: "
                    f"--draw={values.draw}. Install it (`pip install matplotlib`), or draw text: "
                    "--draw=plan.txt."
                ) from error
    if values.trace is not None:
        write_trace(values.trace, found.timeline, devices)
    if values.report is not None:
        content = {"command": "plan", "task": path, **found.as_json(), "versions": versions()}
        write_report(values.report, content)
    for name in ("draw", "trace", "report"):
        if getattr(values, name) is not None:
            print(f"wrote {getattr(values, name)}")


def _title(path, found) -> str:
    schedule = found.schedule
    return (
        f"{path}: {schedule.num_micro_batches} micro-batches through {schedule.num_devices} "
        f"devices, schedule {schedule.name}"
    )


def _lines(path: str, values: flags.FlagValues, found: PipelinePlan) -> list[str]:
    rows = [("stage", "device", "layers", "parameters", "a micro-batch", "forward", "backward")]
    for index, stage in enumerate(found.stages):
        names = stage.layers or ["none: passes on what it is given"]
        text = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        rows.append(
            (str(index), str(stage.device), text, size_text(stage.parameter_bytes),
             size_text(stage.activation_bytes), seconds_text(stage.forward_seconds),
             seconds_text(stage.backward_seconds))
        )  # fmt: skip
    step, serial = found.timeline.makespan, found.one_after_the_other
    held = enumerate(found.schedule.most_in_flight())
    return [
        f"{_title(path, found)}; the command:",
        f"  {_command(path, values, found)}",
        "",
        *aligned(rows),
        "",
        as_text(found.timeline),
        "",
        f"predicted step: {seconds_text(step)} for {found.batch_size} examples, without transfers "
        f"and the update; the stages one after the other: {seconds_text(serial)}, "
        f"{serial / step if step else 1:.2f} times as long",
        f"devices stand still {found.timeline.bubble:.0%} of the time; equal stages would "
        f"{theoretical_bubble(found.schedule):.0%}",
        *(
            f"device {device}: holds {most} at most of the micro-batches' activations, "
            f"{size_text(found.held_bytes(device))} in all"
            for device, most in held
        ),
    ]


def _command(path, values, found) -> str:
    schedule = found.schedule
    parts = [
        f"tfparallel train {path} --parallel=pipeline --num_devices={schedule.num_devices}",
        f"--num_micro_batches={schedule.num_micro_batches} --schedule={schedule.name}",
    ]
    if schedule.chunks_per_device > 2:
        parts.append(f"--chunks_per_device={schedule.chunks_per_device}")
    if found.recompute != "never":
        parts.append(f"--recompute={found.recompute}")
    if values.balance is not None:
        parts.append(f"--balance={values.balance}")
    if values.batch_normalization is not None:
        parts.append(f"--batch_normalization={values.batch_normalization}")
    return " ".join([*parts, f"--global_batch_size={found.batch_size}"])
