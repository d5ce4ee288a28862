"""The body of `tfparallel check`: everything that needs TensorFlow loaded."""

import time

import keras
import tensorflow as tf
from absl import flags

from tfparallel.commands.flags import resolved
from tfparallel.commands.forms import start_form
from tfparallel.data.batches import first_batches
from tfparallel.diagnostics.check import CheckReport, check_parity
from tfparallel.diagnostics.determinism import make_deterministic
from tfparallel.diagnostics.report import peak_memory_bytes, versions, write_report
from tfparallel.pipeline.batch_norm import grouped, ungrouped
from tfparallel.task import load_task

__all__ = ["check"]


def check(path: str, values: flags.FlagValues) -> int:
    """Checks the task file at `path` as the flags say, and prints what it saw.

    Returns:
        0 if nothing differs, else 1.

    Raises:
        TaskError: If the task file breaks its contract.
        UsageError: If the devices do not exist.
    """
    started = time.perf_counter()
    # All three before the task file is imported: it may start TensorFlow's
    # runtime, and make layers, which take their type when they are made.
    form = start_form(values, {"command": "check"})
    on_gpu = any(device.startswith("GPU") for device in form.devices)
    if on_gpu:
        make_deterministic()
    if values.dtype is not None:
        keras.config.set_floatx(values.dtype if values.dtype == "float64" else "float32")
        keras.config.set_dtype_policy(values.dtype)
    keras.utils.set_random_seed(values.seed)
    task = load_task(path)
    data, _ = task.load_data()
    batches = first_batches(
        data,
        global_batch_size=values.global_batch_size,
        seed=values.seed,
        num_batches=values.steps,
    )
    form.say(
        f"{task.name}: one device against {form}; "
        f"{values.steps} steps, global batch {values.global_batch_size}, seed {values.seed}, "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    )
    if on_gpu:
        form.say("on a GPU: deterministic operations are on, TF32 is off")
    built, build_single, unwrapped = [], task.build_model, lambda build: build
    if values.batch_normalization is not None:
        form.say("on one device each micro-batch is normalized by its own moments, too")
        build_single = grouped(task.build_model, form.cut["num_micro_batches"])
        unwrapped = ungrouped

    def build(build_model):
        built.append(form.build(unwrapped(build_model)))
        return built[-1]

    report = check_parity(
        build_single,
        task.compile_model,
        batches,
        make_parallel_model=build,
        seed=values.seed,
    )
    ran = form.all_reduce_report(built[-1])
    form.say(to_text(report))
    if values.report is not None and form.is_chief:
        content = {
            "command": "check",
            "configuration": {"task": path, **resolved(values)},
            "devices": form.devices,
            "num_workers": form.num_workers,
            "versions": versions(),
            **report.to_json(),
            **({"all_reduce": ran} if ran is not None else {}),
            "peak_memory_bytes": peak_memory_bytes(),
            "wall_time_seconds": time.perf_counter() - started,
        }
        write_report(values.report, content)
        print(f"wrote {values.report}")
    return 0 if report.passed else 1


def to_text(report: CheckReport) -> str:
    """Returns the report as tables for the terminal."""
    sizes = report.batch_sizes
    full = max(sizes)
    uneven = f", {sum(size < full for size in sizes)} of them shorter" if min(sizes) < full else ""
    rows = [
        [item.path, str(item.shape), f"{item.absolute:.1e}", f"{item.relative:.1e}", item.verdict]
        for item in report.variables
    ]
    value_rows = [
        [item.name, f"{item.single:.9g}", f"{item.parallel:.9g}", item.verdict]
        for item in report.values
    ]
    lines = [
        "",
        *_table(["variable", "shape", "largest abs", "largest rel", "verdict"], rows),
        "",
        *_table(["loss or metric", "one device", "under the form", "verdict"], value_rows),
        "",
        f"computed in {report.dtype}, tolerance {report.tolerance:.0e} relative to the largest "
        f"magnitude in a variable; {len(sizes)} batches of {full}{uneven}",
    ]
    if report.random_layers:
        lines.append(f"random layers: {', '.join(report.random_layers)}")
    lines += [f"note: {note}" for note in report.notes]
    if report.first_difference is not None:
        lines.append(f"first difference: {report.first_difference}")
    counted = [item.verdict for item in report.variables]
    counts = ", ".join(
        f"{counted.count(name)} {name}"
        for name in ("exact", "reproducible", "undetermined", "differs")
        if name in counted
    )
    lines.append(f"{'OK' if report.passed else 'FAILED'}: {report.verdict} ({counts})")
    return "\n".join(lines)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    # Names to the left, numbers to the right, the verdict last and ragged.
    last = len(head) - 1

    def line(row: list[str]) -> str:
        cells = [
            cell if column == last else cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells)

    return [line(head), line(["-" * width for width in widths]), *(line(row) for row in rows)]
