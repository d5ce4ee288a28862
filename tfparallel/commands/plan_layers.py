"""`tfparallel plan --parallel=model`: which layers go where, and do they fit."""

from absl import flags

from tfparallel.activity import Activity
from tfparallel.commands.exits import UsageError
from tfparallel.commands.options import TrainOptions
from tfparallel.diagnostics.report import versions, write_report
from tfparallel.placement.placement_plan import Plan, plan
from tfparallel.placement.stages import PlacementError
from tfparallel.task import load_task
from tfparallel.texts import aligned, seconds_text, size_text

__all__ = ["answer"]


def answer(path: str, values: flags.FlagValues) -> int:
    """Prints the plan of the task file at `path`; returns 1 if nothing fits."""
    options, task = TrainOptions.of(values), load_task(path)
    try:
        with Activity("measuring the layers"):
            found = plan(
                task.build_model,
                task.compile_model,
                num_devices=values.num_devices,
                batch_size=values.global_batch_size,
                device_memory=options.device_memory,
                balance=options.balance or "memory",
            )
    except PlacementError as error:
        raise UsageError(str(error)) from error
    print("\n".join(_lines(path, values, found)))
    if values.report is not None:
        write_report(
            values.report,
            {"command": "plan", "task": path, **found.as_json(), "versions": versions()},
        )
        print(f"wrote {values.report}")
    return 0 if found.stages else 1


def _lines(path: str, values: flags.FlagValues, found: Plan) -> list[str]:
    lines = [*_head(path, values, found), ""]
    if found.stages:
        lines += [*_table(found), ""]
        lines.append(
            f"predicted step: {seconds_text(found.step_seconds)} for {found.batch_size} examples, "
            "the stages one after the other"
        )
    lines += ["", "devices  largest stage of the best cut"]
    for number, largest in found.largest.items():
        verdict = ""
        if found.device_memory is not None:
            over = largest - found.device_memory
            verdict = f", {size_text(over)} too much" if over > 0 else ", fits"
        lines.append(f"{number:>7}  {size_text(largest)}{verdict}")
    return lines


def _head(path, values, found) -> list[str]:
    limit = "" if found.device_memory is None else f" of {size_text(found.device_memory)}"
    if not found.stages:
        over = min(found.largest.values()) - found.device_memory
        return [
            f"does not fit {values.num_devices} devices{limit}: the best cut misses by "
            f"{size_text(over)} on its largest stage. Take more devices, a smaller batch, an "
            "optimizer with less state, or smaller layers."
        ]
    number, more = len(found.stages), []
    batch = f" --global_batch_size={found.batch_size}"
    if number == 1:
        parallelism, extra = ("none", "") if values.num_devices == 1 else ("data", "")
        extra = f" --num_devices={values.num_devices}" if values.num_devices > 1 else ""
        text = "fits one device" + limit
    else:
        parallelism, text = "model", f"needs {number} devices" + limit
        extra = f" --num_devices={number}"
        if found.device_memory is None:
            text = f"cut into {number} stages"
        more = [
            "or keep them all busy, with micro-batches; what that gains:",
            f"  tfparallel plan {path} --parallel=pipeline{extra}{batch}",
        ]
        if values.balance not in (None, "memory"):
            extra += f" --balance={values.balance}"
            if found.device_memory is not None:
                extra += f" --device_memory={found.device_memory}"
    command = f"tfparallel train {path} --parallel={parallelism}{extra}{batch}"
    return [f"{text}; take --parallel={parallelism}; the command:", f"  {command}", *more]


def _table(found: Plan) -> list[str]:
    rows = [("stage", "layers", "parameters", "memory", "time", "received a batch")]
    for index, stage in enumerate(found.stages):
        first, last = stage.layers[0], stage.layers[-1]
        names = first if first == last else f"{first} … {last} ({len(stage.layers)})"
        rows.append(
            (str(index), names, size_text(stage.parameter_bytes), size_text(stage.held_bytes),
             seconds_text(stage.seconds), size_text(stage.received_bytes))
        )  # fmt: skip
    return aligned(rows)
