"""`tfparallel check TASK.py`: verifies that parallel training matches training on one device."""

import importlib
import inspect
import time
from collections.abc import Sequence

import keras
import tensorflow as tf
from absl import flags

from tfparallel.activity import Activity
from tfparallel.command_line.exits import UsageError
from tfparallel.command_line.options import TrainOptions
from tfparallel.commands.task_setup import compiling, start_chosen_parallelism, use_precision
from tfparallel.data.batches import first_batches
from tfparallel.device_memory import peak_bytes_of_gpus
from tfparallel.diagnostics.check import check_parity, make_deterministic, uneven_first
from tfparallel.diagnostics.report import peak_memory_bytes, versions, write_report
from tfparallel.extend import original_class
from tfparallel.judge.check_rows import exchange_moments, refusal_of
from tfparallel.judge.proof import OfLayer, explained
from tfparallel.pipeline.batch_norm import grouped, ungrouped
from tfparallel.task import load_task
from tfparallel.texts import aligned


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Checks the task file according to the flags, and prints the result.

    Returns:
        0 if no variable differs, or, with --prove, if the model is accepted; else 1.

    Raises:
        TaskError: If the task file violates its contract.
        UsageError: If the devices do not exist.
    """
    (path,) = positional
    return _prove(path, values) if values.prove else _check(path, values)


def _check(path: str, values: flags.FlagValues) -> int:
    started = time.perf_counter()
    # All three before the task file is imported: it may start TensorFlow's runtime, and create
    # layers, whose dtype is fixed at creation.
    parallelism, options, _ = start_chosen_parallelism(
        path, TrainOptions.of(values), {"command": "check"}
    )
    if parallelism.name == "none":
        raise UsageError(
            "A parallelism to check is required. Received: --parallel=auto, which chose one "
            "device. Name the parallelism: --parallel=data."
        )
    on_gpu = any(device.startswith("GPU") for device in parallelism.devices)
    by_xla = bool(values.jit_compile)
    if on_gpu:
        make_deterministic(operations=not by_xla)
    use_precision(values.precision)
    keras.utils.set_random_seed(values.seed)
    task = load_task(path)
    data, _ = task.load_data()
    batches = uneven_first(
        first_batches(
            data,
            global_batch_size=values.global_batch_size,
            seed=values.seed,
            num_batches=values.steps,
        )
    )
    parallelism.say(
        f"{task.name}: one device vs. {parallelism}; {values.steps} steps, global batch "
        f"{values.global_batch_size}, seed {values.seed}, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}"
    )
    if on_gpu:
        operations = "" if by_xla else "deterministic ops are on, "
        parallelism.say(f"on GPU: {operations}TF32 is off")
    built, build_single, unwrapped = [], task.build_model, lambda build: build
    if values.batch_normalization is not None:
        parallelism.say(
            "the single-device run also normalizes each micro-batch by its own statistics"
        )
        build_single = grouped(task.build_model, parallelism.num_pieces)
        unwrapped = ungrouped

    def build(build_model):
        built.append(parallelism.build(unwrapped(build_model)))
        return built[-1]

    with Activity("building the model", is_shown=parallelism.is_chief) as activity:
        report = check_parity(
            build_single,
            compiling(task, values.jit_compile, [batches[0][0]]),
            batches,
            make_parallel_model=build,
            seed=values.seed,
            progress=activity.say,
        )
    if len(parallelism.devices) == 1 and parallelism.num_workers == 1:
        report = report.with_note(
            "Only one device is used, so nothing is divided: add --num_devices=2 --device_type=cpu."
        )
    all_reduce = parallelism.all_reduce_report(built[-1])
    joined = getattr(built[-1], "why_joined", None) or False
    parallelism.say(str(report))
    if values.plot is not None and parallelism.is_chief:
        check_plot = importlib.import_module("tfparallel.diagnostics.check_plot")  # Matplotlib.
        check_plot.draw(values.plot, report, title=f"{task.name}: one device vs. {parallelism}")
        print(f"wrote {values.plot}")
    peaks = peak_bytes_of_gpus(parallelism.devices)
    if values.report is not None and parallelism.is_chief:
        has_pieces = parallelism.name in ("data", "pipeline", "hybrid")
        content = {
            "command": "check",
            "configuration": {"task": path, **options.configuration(values)},
            "devices": parallelism.devices,
            "num_workers": parallelism.num_workers,
            "versions": versions(),
            **report.to_json(),
            **({"layout": built[-1].layout.to_json()} if parallelism.name != "none" else {}),
            **({"all_reduce": all_reduce} if all_reduce is not None else {}),
            **({"joined_outputs": joined} if has_pieces else {}),
            "peak_memory_bytes": peak_memory_bytes(),
            **({"peak_gpu_bytes": peaks} if peaks else {}),
            "wall_time_seconds": time.perf_counter() - started,
        }
        write_report(values.report, content)
        print(f"wrote {values.report}")
    return 0 if report.passed else 1


def _prove(path: str, values: flags.FlagValues) -> int:
    """Judges a task file's model, and prints where the batch rows are in each layer's output."""
    use_precision(values.precision)
    keras.utils.set_random_seed(values.seed)
    task = load_task(path)
    data, _ = task.load_data()
    (batch,) = first_batches(data, global_batch_size=2, seed=values.seed, num_batches=1)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    model = task.build_model()
    if not model.built:
        model(x)
    exchange_moments(model)
    mode = {"training": True} if "training" in inspect.signature(model.call).parameters else {}
    proof, layers = explained(model, model.__call__, (x,), mode)
    print(f"{task.name}: {proof.num_operations} operations, for any number of rows")
    for line in _table(layers):
        print(line)
    if proof.fault is not None:
        print(refusal_of(model, proof.fault))
        return 1
    print("Each output has one row per example, computed from that example alone.")
    return 0


def _table(layers: list[OfLayer]):
    rows = [("layer", "class", "operations", "output", "")]
    for each in layers:
        notes = [
            *(["draws"] if each.draws else []),
            *(["pieces exchange batch statistics"] if each.exchanges else []),
        ]
        name = original_class(each.layer).__name__
        rows.append((each.path, name, str(each.num_operations), str(each.output), ", ".join(notes)))
    return aligned(rows)
