"""`tfparallel.check`: verifies a parallelism from Python, without a task file."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfparallel import devices as device_lib
from tfparallel.data.batches import first_batches
from tfparallel.diagnostics.check import CheckReport, check_parity, uneven_first
from tfparallel.hybrid.hybrid_parallel import hybrid_parallel
from tfparallel.layers.tensor_parallel import tensor_parallel
from tfparallel.pipeline.pipeline_parallel import pipeline_parallel
from tfparallel.placement.model_parallel import model_parallel
from tfparallel.replication.data_parallel import data_parallel

_BUILDERS = {
    "data": data_parallel,
    "model": model_parallel,
    "tensor": tensor_parallel,
    "pipeline": pipeline_parallel,
    "hybrid": hybrid_parallel,
}


def check(
    build_model: Callable[[], keras.Model],
    compile_model: Callable[[keras.Model], None],
    data: Any,
    *,
    parallel: str | Callable[[Callable[[], keras.Model]], keras.Model] = "data",
    devices: Sequence[str] | None = None,
    global_batch_size: int = 64,
    steps: int = 20,
    seed: int = 0,
    plot: str | None = None,
    **options: Any,
) -> CheckReport:
    """Compares parallel training with training on one device, variable by variable.

    Use it before you train your model on several devices, or when two runs give different weights
    and you want to know whether rounding explains it. The model trains three times from the same
    weights on the same batches: on one device, in parallel, and on one device with the initial
    weights nudged by one unit in the last place. A variable matches at a step if

        max|a − b|  ≤  max(tolerance · max|a|,  multiple · max|a − m|)

    where a is its value on one device, b in parallel, and m after the nudge. The comparison is
    sharpest in float64 (call `keras.config.set_dtype_policy("float64")` and
    `keras.config.set_floatx("float64")` before you create any layer).

    Args:
        build_model: Returns the uncompiled model; called once for each training.
        compile_model: Compiles a model in place, with a new optimizer each time.
        data: `(x, y)` or `(x, y, sample_weight)` in arrays or nested structures of them, a
            `tf.data.Dataset` of single examples, or any other training data that a task file's
            `load_data` may return.
        parallel: `"data"`, `"model"`, `"tensor"`, `"pipeline"` or `"hybrid"`; or a function that
            takes `build_model` and returns the parallel model.
        devices: Device names, such as `["GPU:0", "GPU:1"]`; by default all GPUs, or all logical CPU
            devices.
        global_batch_size: Examples per step. The first batch is shortened to a number that no
            number of devices divides.
        steps: Number of training steps.
        seed: Fixes the initial weights, the random layers and the order of the data.
        plot: Path of a `.png` file, to plot how the difference and the floor grow.
        **options: Passed on to the builder (`num_micro_batches=4`).

    Returns:
        The report. `print` it to see its tables; `passed` says whether nothing differs, and
        `to_json()` returns plain values.

    Raises:
        ValueError: If the parallelism or a device does not exist, the data are empty, or you pass
            `devices` or options together with a function.

    Example:
        >>> devices = ["CPU:0", "CPU:1"]
        >>> report = tfparallel.check(build_model, compile_model, (x, y), devices=devices, steps=2)
        >>> print(report)  # doctest: +SKIP
        >>> report.passed
        True
    """
    if not callable(parallel) and parallel not in _BUILDERS:
        raise ValueError(
            f"Unknown parallelism; it must be one of {', '.join(_BUILDERS)}, or a function that "
            f"takes build_model. Received: parallel={parallel!r}."
        )
    if callable(parallel):
        if devices is not None or options:
            raise ValueError(
                "A function passed as `parallel` chooses its own devices and options. Received: "
                f"parallel={parallel!r} with devices={devices}, options {sorted(options)}. Drop "
                "them, or pass a parallelism by name: parallel='data'."
            )
        make_parallel_model = parallel
    else:
        names = device_lib.choose_devices(devices=devices)
        builder = _BUILDERS[parallel]

        def make_parallel_model(build: Callable[[], keras.Model]) -> keras.Model:
            return builder(build, devices=names, **options)

    if steps < 1 or global_batch_size < 1:
        raise ValueError(
            "At least one step of at least one example is required. "
            f"Received: steps={steps}, global_batch_size={global_batch_size}."
        )
    if plot is not None and not plot.endswith(".png"):
        raise ValueError(f"A plot's path must end in .png. Received: plot={plot!r}.")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"A plot needs matplotlib, which is not installed. Received: plot={plot!r}. Install "
            "it: pip install 'tfparallel[bench]'"
        )
    batches = first_batches(data, global_batch_size=global_batch_size, seed=seed, num_batches=steps)
    report = check_parity(
        build_model,
        compile_model,
        uneven_first(batches),
        make_parallel_model=make_parallel_model,
        seed=seed,
    )
    if not callable(parallel) and len(names) == 1:
        report = report.with_note(
            "Only one device is used, so nothing runs in parallel: call "
            "`tfparallel.devices.split_cpu(2)` first, then pass devices=['CPU:0', 'CPU:1']."
        )
    if plot is not None:
        parallelism = parallel if isinstance(parallel, str) else "in parallel"
        check_plot = importlib.import_module("tfparallel.diagnostics.check_plot")  # Matplotlib.
        check_plot.draw(plot, report, title=f"one device vs. {parallelism}")
    return report
