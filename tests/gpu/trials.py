"""What `make test-gpu` tries, each in a process of its own.

    python -m tests.gpu.trials NAME gpu|cpu

prints a line of JSON before and after each thing that it tries: its name; then with a verdict and
a few words. With one GPU it is split in two. On logical CPUs it is the trials that are tried, with
small sizes.
"""

import ctypes
import functools
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tests.gpu import networks
from tests.gpu.row import BROKEN, OK, SKIPPED, Row, tried
from tests.gpu.run import TRIALS as NAMES
from tests.gpu.speed import speeds
from tests.gpu.training import TOLERANCE, apart, compared, kinds, trained
from tfparallel import cuda_driver
from tfparallel import devices as device_lib
from tfparallel.cluster.launcher.spawn import spawn
from tfparallel.collectives import cross_device
from tfparallel.collectives.algorithm_selection import ChosenAllReduce
from tfparallel.diagnostics.check import make_deterministic
from tfparallel.replication.data_parallel import data_parallel
from tfparallel.replication.drop_in_strategies import MultiWorkerMirroredStrategy

_HALF_TOLERANCE = 3e-2
# Batch normalization and convolutions multiply what half precision rounds; this network does not.
_IN_HALF = "MLP with dropout"
# The first steps overflow float16, and the last ones do not: on one device and on two. Close to the
# largest number the sum over a whole batch may overflow where the sums over its halves do not.
_SCALE = 2.0**17
# A micro-batch has moments of its own.
_REFUSED = {("CNN with batch normalization", "pipeline_parallel"): "statistics of the whole batch"}


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
    if device_type == "gpu" and not names:
        build = tf.sysconfig.get_build_info()
        text = (
            f"this host has an NVIDIA GPU, and TensorFlow sees none (built for CUDA: "
            f"{build.get('cuda_version')}; CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')}): pip install 'tensorflow[and-cuda]'"
        )
        yield "GPUs", BROKEN, text
    for index, physical in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(physical)
        memory = cuda_driver.memory_mib(index)
        capability = ".".join(map(str, details.get("compute_capability", ())))
        text = f"{details.get('device_name')}, {memory} MiB, compute capability {capability}"
        yield f"GPU:{index}", OK, text
    build = tf.sysconfig.get_build_info()
    for name in ("cuda_version", "cudnn_version"):
        yield name.replace("_", " "), OK, str(build.get(name))
    yield "NCCL", OK, _nccl_version()
    for first in range(len(names)):
        peers = [k for k in range(len(names)) if _can_access_peer(first, k)]
        yield f"peer access of GPU:{first}", OK, f"{peers}"
    for arguments in (["--query-gpu=driver_version", "--format=csv,noheader"], ["topo", "-m"]):
        yield f"nvidia-smi {arguments[0]}", OK, _said_by(["nvidia-smi", *arguments])


def _can_access_peer(index: int, other: int) -> bool:
    """Whether a GPU reads another's memory by itself, without the host."""
    (driver, device), (_, peer) = cuda_driver.device_of(index), cuda_driver.device_of(other)
    if device is None or peer is None:
        return False
    can = ctypes.c_int()
    return not driver.cuDeviceCanAccessPeer(ctypes.byref(can), device, peer) and bool(can.value)


def _nccl_version() -> str:
    number = ctypes.c_int()
    for path in ("libnccl.so.2", *_nccl_of_pip()):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.ncclGetVersion(ctypes.byref(number))
        major, rest = divmod(number.value, 10_000)
        return f"{major}.{rest // 100}.{rest % 100}, {path}"
    return "within TensorFlow, or not found"


def _nccl_of_pip() -> list[str]:
    """Where the wheels of `tensorflow[and-cuda]` put NCCL, which no loader looks at by itself."""
    return [
        path
        for folder in sys.path
        for path in glob.glob(os.path.join(glob.escape(folder), "nvidia/nccl/lib/libnccl.so.2"))
    ]


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
            yield algorithm, SKIPPED, reason
            continue
        yield from tried(algorithm, lambda algorithm=algorithm: _sums_by(algorithm, names))


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
                values = tf.cast(total, tf.float64).numpy()
                if values.shape != (size,) or not (values == expected).all():
                    raise AssertionError(f"{dtype.name} of {size}: {values[:3]}, not {expected}")
    return "five types, 1 to 2^20 elements"


def parity(device_type: str) -> Iterator[Row]:
    """Every network and parallelism against one GPU: TF32 off, deterministic, uneven batches."""
    names = _devices(device_type)
    make_deterministic()
    keras.utils.set_random_seed(0)
    for title, network in networks.NETWORKS.items():
        expected = None
        for parallelism, make in kinds(names).items():

            def compare(network=network, make=make):
                nonlocal expected
                if expected is None:
                    expected = trained(network, lambda model: model)
                return compared(expected, trained(network, make))

            yield from tried(f"{title}, {parallelism}", compare, _REFUSED.get((title, parallelism)))


def compiled(device_type: str) -> Iterator[Row]:
    """Models that were compiled or loaded, and ones that never were: XLA's "auto"."""
    names = _devices(device_type)
    make_deterministic(operations=False)
    network = networks.NETWORKS["MLP with dropout"]
    (x, y), *_ = network.batches()

    def built():
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        return network.build()

    def fitted(model):
        model.fit(x, y, verbose=0)
        return model.get_weights()

    def of_compiled(make):
        model = built()
        model.compile("sgd", "mse")
        return fitted(make(model))

    def of_loaded(make):
        model = built()
        model.compile("sgd", "mse")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            loaded = keras.models.load_model(path)
        return fitted(make(loaded))

    def of_predicting(make):
        return [make(built()).predict(x, verbose=0)]

    def of_xla(make):
        model = make(built())
        model.compile("sgd", "mse", jit_compile=True)
        return fitted(model)

    for what, train in {
        "compiled before": of_compiled,
        "loaded": of_loaded,
        "never compiled": of_predicting,
        "jit_compile=True": of_xla,
    }.items():
        on_one_device = functools.cache(lambda train=train: train(lambda model: model))
        for parallelism, make in kinds(names).items():

            def compare(train=train, make=make, on_one_device=on_one_device):
                largest = apart(on_one_device(), train(make))
                if not largest <= TOLERANCE:
                    raise AssertionError(f"{largest:.1e} from one device's")
                return f"as on one device, up to {largest:.0e}"

            yield from tried(f"{what}, {parallelism}", compare)


def summed_by_xla(device_type: str) -> Iterator[Row]:
    """`all_reduce="xla"`: one program for each replica, which XLA runs on whole GPUs alone."""
    names = _devices(device_type)
    make_deterministic(operations=False)
    for title in ("MLP with dropout", "CNN with batch normalization"):
        network = networks.NETWORKS[title]

        def compare(network=network):
            expected = trained(network, lambda model: model, jit_compile=True)
            actual = trained(
                network,
                lambda model: data_parallel(model, devices=names, all_reduce="xla"),
                jit_compile=True,
            )
            return compared(expected, actual)

        yield from tried(f"all_reduce='xla', {title}", compare, "xla sums with NCCL: .*")


def precision(device_type: str) -> Iterator[Row]:
    """mixed_float16 whose first steps overflow, and mixed_bfloat16; and several steps a call."""
    names = _devices(device_type)
    make_deterministic(operations=False)
    for policy in ("mixed_float16", "mixed_bfloat16"):
        for parallelism, make in kinds(names).items():
            yield from tried(
                f"{policy}, {parallelism}", lambda policy=policy, make=make: _in_half(policy, make)
            )
    keras.config.set_dtype_policy("float32")
    network = networks.NETWORKS["MLP with dropout"]
    several = {"steps_per_execution": 3}
    yield from tried(
        "steps_per_execution=3, data_parallel",
        lambda: compared(
            trained(network, lambda model: model, **several),
            trained(network, kinds(names)["data_parallel"], **several),
        ),
    )


def _in_half(policy, make) -> str:
    def optimizer():
        plain = keras.optimizers.SGD(0.05)
        if policy != "mixed_float16":
            return plain
        return keras.optimizers.LossScaleOptimizer(plain, initial_scale=_SCALE)

    keras.config.set_dtype_policy(policy)
    network = networks.NETWORKS[_IN_HALF]
    expected = trained(network, lambda model: model, optimizer)
    skipped = expected.num_steps - expected.num_updates
    if policy == "mixed_float16" and not 0 < skipped < expected.num_steps:
        raise AssertionError(
            f"one device must skip some of its {expected.num_steps} updates, not {skipped}"
        )
    text = compared(expected, trained(network, make, optimizer), _HALF_TOLERANCE)
    return f"{text}; {skipped} of {expected.num_steps} updates skipped"


def workers(device_type: str) -> Iterator[Row]:
    """Two workers, a GPU each, against one device."""
    if device_type == "gpu" and len(device_lib.list_devices("GPU")) < 2:
        yield "two workers", SKIPPED, "one GPU, which NCCL cannot share"
        return
    # The workers have the GPUs; this process compares.
    device_lib.hide_gpus()

    def compare():
        transport, actual = spawn(
            _train_as_worker, num_devices=1, device_type=device_type, timeout_seconds=180
        )
        if device_type == "gpu" and transport != "nccl":
            raise AssertionError(f"joined by {transport}, not by NCCL")
        network = networks.NETWORKS["MLP with dropout"]
        return f"{compared(trained(network, lambda model: model), actual)}, by {transport}"

    yield from tried("two workers", compare)


def _train_as_worker():
    make_deterministic(operations=False)
    strategy = MultiWorkerMirroredStrategy()
    network = networks.NETWORKS["MLP with dropout"]
    result = trained(network, lambda model: data_parallel(model, strategy))
    return strategy.workers.transport, result


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
        yield "a lost worker", SKIPPED, "one GPU, which NCCL cannot share"
        return
    for fault in ("kill:worker=1,step=3", "hang:worker=1,step=3"):
        yield from tried(fault.partition(":")[0], lambda fault=fault: _lost(fault, device_type))


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
    yield from speeds(networks.resnet50, _devices(device_type), is_small=device_type == "cpu")


def speed_of_transformer(device_type: str) -> Iterator[Row]:
    """The same of a transformer."""
    yield from speeds(
        networks.transformer, _devices(device_type), is_small=device_type == "cpu"
    )


def profile(device_type: str) -> Iterator[Row]:
    """A step under TensorFlow's profiler, for `tensorboard --logdir=gpu_profile`."""
    names = _devices(device_type)
    network = networks.NETWORKS["CNN with batch normalization"]

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

    yield from tried("a profiled step", trace)


TRIALS: dict[str, Callable[[str], Iterator[Row]]] = {name: globals()[name] for name in NAMES}


def main(name: str, device_type: str) -> None:
    """Runs one trial and prints what came of it, row by row."""
    for row in TRIALS[name](device_type):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
