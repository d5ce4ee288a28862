"""What plain Keras under TensorFlow's own MirroredStrategy makes of a task file.

    python -m tests.parity.upstream padded_text

trains `tests/tasks/padded_text.py` for 20 steps in float64: on one device, under
`tf.distribute.MirroredStrategy` on 3 logical CPUs, and under
`tfparallel.data_parallel`, each from the same seed, and prints as JSON how far each
of the two is from one device. Where TensorFlow's strategy fails with its collectives,
it is tried again with the reduction that needs none. In a process of its own, since it
sets the precision of the whole of Keras, and since two MirroredStrategy objects break each
other.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path

from tests.forked import run_python

TASKS = {
    "padded_text": "padded text with `mask_zero`, rows sorted by length",
    "gan": "a GAN with its own `train_step`",
}
FOLDER = Path(__file__).parents[1] / "tasks"
NUM_REPLICAS, NUM_STEPS, GLOBAL_BATCH_SIZE = 3, 20, 24


@functools.cache
def measure(name: str) -> dict[str, str]:
    """Runs this module for a task in a process of its own; forms to what they did."""
    result = run_python(
        ["-m", "tests.parity.upstream", name], cwd=Path(__file__).parents[2], timeout=300
    )
    if result.returncode:
        raise RuntimeError(f"Measuring {name} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def table_row(name: str) -> str:
    """A line of docs/parity.md."""
    seen = measure(name)
    return f"| `tests/tasks/{name}.py`: {TASKS[name]} | {seen['upstream']} | {seen['tfparallel']} |"


def in_words(relative: float) -> str:
    """A difference as the page prints it: exact below 1e-9, else its power of ten."""
    if relative <= 1e-9:
        return "exact, ≤ 1e-09"
    return f"other weights: about 1e{round(math.log10(relative)):+03d}"


def main(name: str) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tfparallel

    tfparallel.devices.split_cpu(NUM_REPLICAS)
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    from .case import observe, relative_difference

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    (x, y), _ = task.load_data()
    x, y = x[: NUM_STEPS * GLOBAL_BATCH_SIZE], y[: NUM_STEPS * GLOBAL_BATCH_SIZE]
    devices = [f"CPU:{index}" for index in range(NUM_REPLICAS)]

    def train(build, scope):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        with scope:
            model = build()
            task.compile_model(model)
        model.fit(x, y, batch_size=GLOBAL_BATCH_SIZE, shuffle=False, verbose=0)
        return {k: v for k, v in observe(model).items() if k.startswith("weight:")}

    def beside_one_device(build, scope):
        try:
            seen = train(build, scope)
        except Exception as error:  # noqa: BLE001  (what upstream raises is the result)
            reason = re.search(
                r"You must feed a value for placeholder|must have the same size", str(error)
            )
            return f"fails: {type(error).__name__}" + (f", “{reason[0]} …”" if reason else "")
        return in_words(max(relative_difference(k, v, seen[k]) for k, v in expected.items()))

    np.seterr(all="ignore")
    expected = train(task.build_model, contextlib.nullcontext())
    ours = beside_one_device(
        lambda: tfparallel.data_parallel(task.build_model, devices=devices),
        contextlib.nullcontext(),
    )
    theirs = beside_one_device(task.build_model, tf.distribute.MirroredStrategy(devices).scope())
    if theirs.startswith("fails"):
        without_collectives = tf.distribute.MirroredStrategy(
            devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
        again = beside_one_device(task.build_model, without_collectives.scope())
        theirs += f"; with `cross_device_ops=ReductionToOneDevice()`: {again}"
    print(json.dumps({"tfparallel": ours, "upstream": theirs}))


if __name__ == "__main__":
    main(sys.argv[1])
