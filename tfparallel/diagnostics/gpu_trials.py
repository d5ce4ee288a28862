"""What `tfparallel doctor --gpu` tries, each in a process of its own.

    python -m tfparallel.diagnostics.gpu_trials NAME gpu|cpu

prints a line of JSON before and after each thing that it tries: its name; then with a verdict and
a few words. With one GPU it is split in two. On logical CPUs it is the trials that are tried, with
small sizes.
"""

import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfparallel import cuda_driver, device_memory
from tfparallel import devices as device_lib
from tfparallel.cluster.spawn import spawn
from tfparallel.collectives import cross_device
from tfparallel.collectives.choice import ChosenAllReduce
from tfparallel.diagnostics import gpu_networks
from tfparallel.diagnostics.determinism import make_deterministic
from tfparallel.diagnostics.gpu import TRIALS as NAMES
from tfparallel.layers.tensor_parallel import tensor_parallel
from tfparallel.pipeline.pipeline_parallel import pipeline_parallel
from tfparallel.placement.model_parallel import model_parallel
from tfparallel.replication.data_parallel import data_parallel
from tfparallel.replication.drop_in import MirroredStrategy, MultiWorkerMirroredStrategy

__all__ = ["TRIALS", "main"]

# A row: what was tried; "ok", "skipped" or "broken"; what came of it.
Row = tuple[str, str, str]

_TOLERANCE = 1e-3  # Of float32, after some steps of plain SGD; a fault makes 1e-2 and more.
_HALF_TOLERANCE = 3e-2
_ROUNDS = 3  # Through the batches.
_OK, _SKIPPED, _BROKEN = "ok", "skipped", "broken"
# A micro-batch has moments of its own; TensorFlow's own strategy compiles no step of two devices.
_REFUSED = re.compile("batch normalization, pipeline_parallel|^tf.distribute.MirroredStrategy, XLA")


def _devices(device_type: str) -> list[str]:
    if device_type == "cpu":
        device_lib.hide_gpus()
        return device_lib.split_cpu(2)
    gpus = device_lib.list_devices("GPU")
    if not gpus:
        raise RuntimeError("TensorFlow lists no GPU.")
    if len(gpus) == 1:
        return device_lib.split_gpu(2)
    device_lib.set_memory_growth()
    return gpus


def hardware(device_type: str) -> Iterator[Row]:
    """Devices, driver, CUDA, cuDNN, NCCL, topology and peer access."""
    names = device_lib.list_devices("GPU") if device_type == "gpu" else []
    for index, details in enumerate(device_memory.gpu_details()):
        memory = cuda_driver.memory_mib(index)
        capability = ".".join(map(str, details.get("compute_capability", ())))
        text = f"{details.get('device_name')}, {memory} MiB, compute capability {capability}"
        yield f"GPU:{index}", _OK, text
    build = tf.sysconfig.get_build_info()
    for name in ("cuda_version", "cudnn_version"):
        yield name.replace("_", " "), _OK, str(build.get(name))
    yield "NCCL", _OK, _nccl_version()
    for first in range(len(names)):
        peers = [k for k in range(len(names)) if cuda_driver.can_access_peer(first, k)]
        yield f"peer access of GPU:{first}", _OK, f"{peers}"
    for arguments in (["--query-gpu=driver_version", "--format=csv,noheader"], ["topo", "-m"]):
        yield f"nvidia-smi {arguments[0]}", _OK, _said_by(["nvidia-smi", *arguments])


def _nccl_version() -> str:
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return "within TensorFlow, or not found"
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _said_by(command) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not there ({error})"
    return done.stdout.strip()


def sums(device_type: str) -> Iterator[Row]:
    """Sums in five types at three sizes, by name and by "auto"."""
    names = _devices(device_type)
    for algorithm in ("nccl", "tf_reduce_to_one", "tree", "auto"):
        if reason := cross_device.refusals(names).get(algorithm, ""):
            yield algorithm, _SKIPPED, reason
            continue
        yield from _tried(algorithm, lambda algorithm=algorithm: _sums_by(algorithm, names))


def _sums_by(algorithm, names) -> str:
    is_open = algorithm == "auto"  # It chooses for the first, and keeps to that.
    ops = ChosenAllReduce(names) if is_open else cross_device.make(algorithm, names)
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int64):
        for size in (1, 1000, 2**20):

            def reduce(dtype=dtype, size=size):
                terms = []
                for rank, name in enumerate(names):
                    with tf.device(name):
                        terms.append(tf.fill([size], tf.cast(rank + 1, dtype)))
                return cross_device.all_reduce(ops, [terms])[0]

            expected = len(names) * (len(names) + 1) / 2
            for total in tf.function(reduce, autograph=False)():
                found = tf.cast(total, tf.float64).numpy()
                if found.shape != (size,) or not (found == expected).all():
                    raise AssertionError(f"{dtype.name} of {size}: {found[:3]}, not {expected}")
    return "five types, 1 to 2^20 elements"


def _forms(names) -> dict[str, Callable[[keras.Model], keras.Model]]:
    pair = names[:2]
    return {
        "data_parallel": lambda model: data_parallel(model, devices=names),
        "model_parallel": lambda model: model_parallel(model, devices=pair),
        "tensor_parallel": lambda model: tensor_parallel(model, devices=pair),
        "pipeline_parallel": lambda model: pipeline_parallel(
            model, devices=pair, num_micro_batches=2, schedule="gpipe"
        ),
    }


def parity(device_type: str) -> Iterator[Row]:
    """Every network in every form, against one GPU: TF32 off, deterministic, uneven batches."""
    names = _devices(device_type)
    make_deterministic()
    keras.utils.set_random_seed(0)
    for title, network in gpu_networks.NETWORKS.items():
        expected = None
        for form, make in _forms(names).items():

            def compare(network=network, make=make):
                nonlocal expected
                if expected is None:
                    expected = _trained(network, lambda model: model)
                return _compared(expected, _trained(network, make))

            yield from _tried(f"{title}, {form}", compare)


def _trained(network, make, optimizer=lambda: keras.optimizers.SGD(0.05), **options):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = make(network.build())
    model.compile(optimizer(), network.loss, **options)
    for x, y in network.batches() * _ROUNDS:
        data = tf.data.Dataset.from_tensors((x, y))
        if options.get("steps_per_execution"):
            data = data.repeat(options["steps_per_execution"])
        model.fit(data, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()


def _compared(expected, found, tolerance=_TOLERANCE) -> str:
    largest = 0.0
    for wanted, value in zip(expected, found, strict=True):
        if np.issubdtype(wanted.dtype, np.floating) and wanted.size:
            apart = np.max(np.abs(wanted - value)) / max(np.max(np.abs(wanted)), 1e-3)
            largest = max(largest, float(apart))
    if not largest <= tolerance:
        raise AssertionError(f"weights differ by {largest:.1e} from one device's")
    return f"the weights of one device, up to {largest:.0e}"


def compiled(device_type: str) -> Iterator[Row]:
    """Models that were compiled or loaded, and ones that never were: XLA's "auto"."""
    names = _devices(device_type)
    network = gpu_networks.NETWORKS["MLP with dropout"]
    (x, y), *_ = network.batches()
    for form, make in _forms(names).items():

        def of_compiled(make=make):
            model = network.build()
            model.compile("sgd", "mse")
            return f"loss {make(model).fit(x, y, verbose=0).history['loss'][0]:.3f}"

        def of_loaded(make=make):
            model = network.build()
            model.compile("sgd", "mse")
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.keras")
                model.save(path)
                loaded = keras.models.load_model(path)
            return f"loss {make(loaded).fit(x, y, verbose=0).history['loss'][0]:.3f}"

        def of_predicting(make=make):
            return f"predictions of shape {make(network.build()).predict(x, verbose=0).shape}"

        def of_xla(make=make):
            model = make(network.build())
            model.compile("sgd", "mse", jit_compile=True)
            return f"loss {model.fit(x, y, verbose=0).history['loss'][0]:.3f}"

        yield from _tried(f"compiled before, {form}", of_compiled)
        yield from _tried(f"loaded, {form}", of_loaded)
        yield from _tried(f"never compiled, {form}", of_predicting)
        yield from _tried(f"jit_compile=True, {form}", of_xla)


def precision(device_type: str) -> Iterator[Row]:
    """mixed_float16 whose first steps overflow, and mixed_bfloat16; and several steps a call."""
    names = _devices(device_type)
    make_deterministic(operations=False)
    title = "CNN with batch normalization"

    def overflowing():
        # Skipped until the scale is small enough, on one device and on all alike.
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**18
        )

    for policy, optimizer in (
        ("mixed_float16", overflowing),
        ("mixed_bfloat16", lambda: keras.optimizers.SGD(0.05)),
    ):
        keras.config.set_dtype_policy(policy)
        for form, make in _forms(names).items():
            # A pipeline takes no batch normalization.
            network = gpu_networks.NETWORKS["LSTM" if form == "pipeline_parallel" else title]

            def compare(make=make, optimizer=optimizer, network=network):
                expected = _trained(network, lambda model: model, optimizer)
                return _compared(expected, _trained(network, make, optimizer), _HALF_TOLERANCE)

            yield from _tried(f"{policy}, {form}", compare)
    keras.config.set_dtype_policy("float32")
    network = gpu_networks.NETWORKS["MLP with dropout"]
    several = {"steps_per_execution": 3}
    yield from _tried(
        "steps_per_execution=3, data_parallel",
        lambda: _compared(
            _trained(network, lambda model: model, **several),
            _trained(network, _forms(names)["data_parallel"], **several),
        ),
    )


def workers(device_type: str) -> Iterator[Row]:
    """Two workers, a GPU each, against one device."""
    if device_type == "gpu" and len(device_lib.list_devices("GPU")) < 2:
        yield "two workers", _SKIPPED, "one GPU, which NCCL cannot share"
        return
    # The workers have the GPUs; this process compares.
    device_lib.hide_gpus()

    def compare():
        transport, found = spawn(
            _train_as_worker, num_devices=1, device_type=device_type, timeout_seconds=180
        )
        if device_type == "gpu" and transport != "nccl":
            raise AssertionError(f"joined by {transport}, not by NCCL")
        network = gpu_networks.NETWORKS["MLP with dropout"]
        return f"{_compared(_trained(network, lambda model: model), found)}, by {transport}"

    yield from _tried("two workers", compare)


def _train_as_worker():
    make_deterministic(operations=False)
    strategy = MultiWorkerMirroredStrategy()
    network = gpu_networks.NETWORKS["MLP with dropout"]
    found = _trained(network, lambda model: data_parallel(model, strategy))
    return strategy.workers.transport, found


_TASK = """\
import keras, numpy as np

def load_data():
    return (np.ones((64, 4), "float32"), np.ones((64, 1), "float32")), None

def build_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

def compile_model(model):
    model.compile("sgd", "mse")
"""


def lost_workers(device_type: str) -> Iterator[Row]:
    """A worker that is killed, and one that hangs: how long the others wait."""
    if device_type == "gpu" and len(device_lib.list_devices("GPU")) < 2:
        yield "a lost worker", _SKIPPED, "one GPU, which NCCL cannot share"
        return
    for fault in ("kill:worker=1,step=3", "hang:worker=1,step=3"):
        yield from _tried(fault.partition(":")[0], lambda fault=fault: _lost(fault, device_type))


def _lost(fault, device_type) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "task.py")
        with open(path, "w") as file:
            file.write(_TASK)
        command = [
            *(sys.executable, "-m", "tfparallel", "launch", "--nproc_per_node=2", "--"),
            *(sys.executable, "-m", "tfparallel", "train", path, "--epochs=50"),
            *("--parallel=data", f"--device_type={device_type}"),
            *("--global_batch_size=8", "--seed=1", "--stall_timeout=20", f"--inject={fault}"),
        ]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    seconds = time.perf_counter() - start
    said = f"{done.stdout}\n{done.stderr}"
    struck = re.search("inject: worker 1 .* after 3 steps", said)
    if not struck or not done.returncode or "worker 1" not in done.stderr:
        raise AssertionError(f"exit code {done.returncode}: {said[-500:]}")
    return f"all have ended after {seconds:.0f} s, start included, exit code {done.returncode}"


def speed_of_resnet50(device_type: str) -> Iterator[Row]:
    """Step time of ResNet-50: one GPU, TensorFlow's strategy, ours; XLA on and off."""
    yield from _speeds(gpu_networks.resnet50, device_type)


def speed_of_transformer(device_type: str) -> Iterator[Row]:
    """The same of a transformer."""
    yield from _speeds(gpu_networks.transformer, device_type)


def _speeds(make, device_type) -> Iterator[Row]:
    names = _devices(device_type)
    is_small = device_type == "cpu"
    scopes = {
        "one device": (lambda: tf.device(names[0]), 1),
        "tf.distribute.MirroredStrategy": (
            lambda: tf.distribute.MirroredStrategy(names).scope(),
            len(names),
        ),
        "tfparallel.MirroredStrategy": (lambda: MirroredStrategy(names).scope(), len(names)),
    }
    for title, (scope, num_devices) in scopes.items():
        for is_compiled in (False, True):
            what = f"{title}{', XLA' * is_compiled}"

            def measure(scope=scope, num_devices=num_devices, is_compiled=is_compiled):
                keras.backend.clear_session()
                return _step_time(make, is_small, scope, num_devices, is_compiled, names)

            yield from _tried(what, measure)


def _step_time(make, is_small, scope, num_devices, is_compiled, names) -> str:
    device_memory.reset_peaks(names)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with scope():
        model, x, y = make(is_small)
        model.compile("adam", loss, jit_compile=is_compiled)
    batch = (np.concatenate([x] * num_devices), np.concatenate([y] * num_devices))
    data = tf.data.Dataset.from_tensors(batch).repeat()
    steps = _Times()
    num_steps = 4 if is_small else 25
    model.fit(data, steps_per_epoch=num_steps, verbose=0, callbacks=[steps])
    milliseconds = 1e3 * statistics.median(steps.seconds[num_steps // 4 :])
    peaks = device_memory.peak_bytes_of_gpus(names)
    memory = "".join(f", {name} {peak / 2**20:.0f} MiB" for name, peak in peaks.items())
    return f"{milliseconds:.1f} ms a step of {len(batch[0])} rows{memory}"


class _Times(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds, self._begin = [], 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._begin)


def profile(device_type: str) -> Iterator[Row]:
    """A step under TensorFlow's profiler, for `tensorboard --logdir=gpu_profile`."""
    names = _devices(device_type)
    network = gpu_networks.NETWORKS["CNN with batch normalization"]

    def trace():
        model = data_parallel(network.build(), devices=names)
        model.compile("adam", network.loss)
        (x, y), *_ = network.batches()
        model.train_on_batch(x, y)
        folder = os.path.abspath("gpu_profile")
        tf.profiler.experimental.start(folder)
        model.train_on_batch(x, y)
        tf.profiler.experimental.stop()
        return "in the folder gpu_profile"

    yield from _tried("a profiled step", trace)


def _tried(what: str, function: Callable[[], str]) -> Iterator[Row]:
    """A row of what a function returned, or raised."""
    print(json.dumps([what]), flush=True)
    try:
        yield what, _OK, function()
    except Exception as error:  # noqa: BLE001  (whatever it is: it is what was asked for)
        text = f"{type(error).__name__}: {error}"
        yield what, _SKIPPED if _REFUSED.search(what) else _BROKEN, text[:500]


TRIALS: dict[str, Callable[[str], Iterator[Row]]] = {name: globals()[name] for name in NAMES}


def main(name: str, device_type: str) -> None:
    """Runs one trial and prints what came of it, row by row."""
    for row in TRIALS[name](device_type):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
