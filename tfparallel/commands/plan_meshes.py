"""The body of `tfparallel plan` without --parallel: every mesh, ranked, and why the first is it."""

import contextlib
import math
from collections.abc import Sequence

from absl import flags

from tfparallel import devices as device_lib
from tfparallel.activity import Activity
from tfparallel.commands.exits import UsageError
from tfparallel.commands.mesh_trials import after_trials, batch_of
from tfparallel.commands.options import TrainOptions
from tfparallel.diagnostics.report import versions, write_report
from tfparallel.hybrid.mesh_plan import MeshPlan, plan_meshes
from tfparallel.layout.ranking import BALANCES, Candidate, Choices
from tfparallel.problems import PlacementError
from tfparallel.task import Task, load_task
from tfparallel.texts import aligned, seconds_text, size_text

__all__ = ["answer", "nothing_fits", "plan_task"]


def answer(path: str, values: flags.FlagValues) -> int:
    """Prints every mesh of the task file at `path`, the best first; returns 1 if nothing fits."""
    # Before the task file is imported, which may start TensorFlow.
    options = TrainOptions.of(values)
    devices = _devices(options)
    found = plan_task(load_task(path), values.num_devices, options, devices)
    print("\n".join(_lines(path, options, found)))
    if values.report is not None:
        content = {"command": "plan", "task": path, **found.as_json(), "versions": versions()}
        write_report(values.report, content)
        print(f"wrote {values.report}")
    return 0 if found.first is not None else 1


def _devices(options: TrainOptions) -> list[str]:
    """The devices for trials. Without trials two, if there are two, to time a tiny model on."""
    if options.num_trials:
        try:
            return device_lib.choose_devices(num_devices=options.num_devices)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"--num_trials needs the devices themselves. {error}") from error
    if options.num_devices > 1:
        with contextlib.suppress(ValueError, RuntimeError):
            return device_lib.choose_devices(num_devices=2)
    return []


def plan_task(
    task: Task, num_devices: int, options: TrainOptions, devices: Sequence[str]
) -> MeshPlan:
    """Ranks the meshes of so many devices for a task, and shows on stderr what is measured.

    Args:
        task: The task.
        num_devices: How many devices there are.
        options: What the flags say.
        devices: Those devices; needed for `--num_trials` alone.

    Raises:
        UsageError: If the model's layers cannot be seen.
        TaskError: If no mesh can be trained.
    """
    asked = options.of_pipeline()
    choices = Choices(
        batch_size=options.global_batch_size,
        device_memory=options.device_memory,
        num_micro_batches=options.num_micro_batches,
        schedule=asked["schedule"],
        chunks_per_device=asked["chunks_per_device"],
        recompute=asked["recompute"],
        balances=BALANCES if options.balance is None else (options.balance,),
    )
    try:
        with Activity("building the model") as activity:
            batch = None
            if options.num_trials:  # A mistake in it is told before anything is measured.
                activity.say("loading the data")
                batch = batch_of(task, options.global_batch_size)
            found = plan_meshes(
                task.build_model,
                task.compile_model,
                num_devices,
                choices,
                batch_normalization=options.batch_normalization,
                progress=lambda text: activity.say(f"measuring {text}"),
            )
            if batch is None:
                return found
            return after_trials(found, task, batch, devices, options, activity)
    except PlacementError as error:
        advice = "Or name the parallelism: --parallel=data takes any model."
        raise UsageError(f"{error}\n{advice}") from error


def _lines(path: str, options: TrainOptions, found: MeshPlan) -> list[str]:
    return [*_head(path, options, found), "", *_table(found), "", *_rests_on(found)]


def nothing_fits(found: MeshPlan) -> str:
    """Says what no mesh of a plan fits, by how much, and what to do."""
    limit = size_text(found.choices.device_memory)
    of_devices = f"{found.num_devices} device{'s' * (found.num_devices > 1)} of {limit}"
    least = min((c for c in found.ranked if c.held_bytes is not None), key=_held)
    return (
        f"nothing fits {of_devices}: {least.mesh} comes closest, {least.why_not}. Take more "
        "devices, a smaller batch, --recompute=always, an optimizer with less state, or smaller "
        "layers."
    )


def _held(candidate: Candidate) -> int:
    return candidate.held_bytes or 0


def _head(path, options, found) -> list[str]:
    first = found.first
    if first is None:
        return [nothing_fits(found)]
    measured = "" if first.measured_seconds is None else ", measured"
    return [
        f"first: {first.mesh}, {seconds_text(first.step_seconds)} a step{measured}; the command:",
        f"  {_command(path, options, first)}",
        f"why: {found.why}",
    ]


def _command(path: str, options: TrainOptions, candidate: Candidate) -> str:
    mesh = candidate.mesh
    parts = [f"tfparallel train {path} --parallel={candidate.parallelism}"]
    if candidate.parallelism == "hybrid":
        parts.append(f"--mesh={str(mesh).replace(', ', ',')}")
    elif mesh.size > 1:
        parts.append(f"--num_devices={mesh.size}")
    if mesh.pipeline > 1:
        parts.append(f"--num_micro_batches={candidate.num_micro_batches}")
        for name in ("schedule", "chunks_per_device", "recompute"):
            if getattr(options, name) is not None:
                parts.append(f"--{name}={getattr(options, name)}")
        if candidate.balance != "time":
            parts.append(f"--balance={candidate.balance}")
    if candidate.parallelism in ("pipeline", "hybrid") and options.batch_normalization is not None:
        parts.append(f"--batch_normalization={options.batch_normalization}")
    return " ".join([*parts, f"--global_batch_size={options.global_batch_size}"])


def _table(found: MeshPlan) -> list[str]:
    head = ("tried",) if found.num_trials else ()
    rows = [("mesh", *head, "step", "passes", "sums", "updates", "memory a device", "")]
    for candidate in found.ranked:
        name = str(candidate.mesh)
        measured = candidate.measured_seconds
        own_trial = ["–" if measured is None else seconds_text(measured)] * len(head)
        if candidate.prediction is None:
            rows.append((name, *own_trial, *5 * ["–"], candidate.why_not))
            continue
        if candidate.mesh.pipeline > 1:
            name += f", {candidate.num_micro_batches} micro-batches"
        own = candidate.prediction
        seconds = (own.step_seconds, own.passes_seconds, own.sums_seconds, own.update_seconds)
        texts = (*own_trial, *map(seconds_text, seconds), size_text(candidate.held_bytes))
        rows.append((name, *texts, candidate.why_not or ""))
    return aligned(rows)


def _rests_on(found: MeshPlan) -> list[str]:
    rows = " and ".join(map(str, found.measured_rows))
    lines = [
        f"measured in {found.seconds:.0f} s, layer by layer, at {rows} rows; the steps are "
        "predicted from that, no mesh was run"
    ]
    if found.num_trials:
        meshes = f"{found.num_trials} mesh{'es' * (found.num_trials > 1)}"
        lines = [
            f"measured in {found.seconds:.0f} s, layer by layer, at {rows} rows, from which steps "
            f"are predicted; {meshes} tried in {found.trial_seconds:.0f} s"
        ]
    if not found.has_loss:
        lines.append("without the loss: made-up targets do not suit it")
    if found.num_cores is not None and found.num_devices > 1:
        at_once = min(found.num_cores, found.num_devices)
        lines.append(
            f"the devices share {found.num_cores} core{'s' * (found.num_cores > 1)}: {at_once} at "
            f"work at once do {found.side_by_side:.2f} times as much as one"
        )
    elif math.isinf(found.side_by_side):
        lines.append("each device computes by itself; what travels between them was not measured")
    return lines
