"""The flags that say how a task is trained in parallel, where, and on how much at a time."""

from absl import flags

from tfparallel.collectives.compression_name import FORMS, CompressionName
from tfparallel.commands.help import define_choice
from tfparallel.commands.pipeline_flags import pipeline_flags, pipeline_problems
from tfparallel.commands.plan_flags import plan_flags, plan_problems
from tfparallel.layout.mesh import Mesh
from tfparallel.replication import synchronization
from tfparallel.size_text import parse_bytes

__all__ = [
    "bucket_bytes",
    "common_flags",
    "common_problems",
    "numbers_flags",
]

PRECISIONS = ("float32", "float64", "mixed_float16", "mixed_bfloat16")

_KINDS = {
    "none": "one device, plain Keras",
    "data": "each device, and each worker, has the model and its share of the batch",
    "model": "each device has some of the layers; they work one after the other",
    "tensor": "each device has a part of each large layer",
    "pipeline": "as model, with micro-batches, so that the devices work at the same time",
    "hybrid": "replicas of a model that is itself on several devices, as --mesh says",
    "auto": "what `tfparallel plan` puts first, measured here",
}


def common_flags() -> flags.FlagValues:
    """Returns a fresh set of flags that holds those common to all programs."""
    values = flags.FlagValues()
    define_choice(
        values,
        "parallel",
        "data",
        _KINDS,
        "How the model is trained on several devices.",
    )
    flags.DEFINE_integer(
        "num_devices", None, "How many devices; the CPU is split as needed.", flag_values=values
    )
    flags.DEFINE_string(
        "mesh",
        None,
        "For hybrid: the number of devices along each axis: data, pipeline, tensor.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "device_type", "auto", ("auto", "cpu", "gpu"), "Which devices to count.", values
    )
    flags.DEFINE_bool(
        "split_gpu",
        False,
        "Split this machine's one GPU into --num_devices parts (2 if absent), to try things out.",
        flag_values=values,
    )
    define_choice(
        values,
        "strategy",
        "auto",
        {
            "auto": "all workers, if this process is one of several; else its devices",
            "mirrored": "the devices of this process",
            "multi_worker": "all workers of the job",
        },
        "For data: what takes part.",
    )
    flags.DEFINE_integer(
        "num_workers", None, "Start this many workers on this host.", flag_values=values
    )
    flags.DEFINE_float(
        "start_timeout", 120.0, "Seconds to wait for the other workers.", flag_values=values
    )
    flags.DEFINE_float(
        "stall_timeout",
        1800.0,
        "Seconds that a step, or the pause between two, may last before a worker of a job ends.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "allow_independent_workers",
        False,
        "Let each worker of a job train a model of its own.",
        flag_values=values,
    )
    flags.DEFINE_list("devices", None, "Devices by name, such as GPU:0,GPU:2.", flag_values=values)
    flags.DEFINE_integer(
        "global_batch_size", 64, "Examples in a step, over all devices.", flag_values=values
    )
    flags.DEFINE_string(
        "all_reduce",
        None,
        "For data: the algorithm that sums gradients, by name (`tfparallel bench all_reduce` lists "
        "those that run here), or auto for the fastest, measured; TensorFlow's default if absent. "
        "Between workers: ring, ring_tuned, nccl, mpi or one of MPI's algorithms.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "bucket_bytes",
        None,
        "Between workers: sum gradients in pieces of this size, such as 4MiB, while the rest is "
        "computed; all at once if absent.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "compression",
        None,
        f"Between workers: send gradients in fewer bytes, which is not exact: {FORMS}.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "sync",
        None,
        f"When the weights are updated, and workers agree: {synchronization.FORMS}. Default: "
        "every_step. local_sgd, post_local_sgd and async are for several workers, and not exact; "
        "async needs `tfparallel launch --num_ps=1`. pipeline and hybrid take only every_step and "
        "accumulate:N.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "shard_optimizer",
        False,
        "For data and hybrid: whether each replica keeps and updates its share of the optimizer.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "calibrate",
        True,
        "For --all_reduce=auto: measure at the first step if no profile was saved.",
        flag_values=values,
    )
    plan_flags(values)
    define_choice(
        values,
        "convolutions",
        "channels",
        {"channels": "channels, weights and all", "height": "rows of the image"},
        "For tensor: what convolutions are split by.",
    )
    pipeline_flags(values)
    flags.DEFINE_integer(
        "seed", 0, "Fixes the initial weights and the order of the data.", flag_values=values
    )
    return values


def numbers_flags(values: flags.FlagValues) -> None:
    """Adds the flags that say in which type a model computes, and what compiles it."""
    define_choice(
        values,
        "precision",
        None,
        {
            "float32": "all of it in 32 bits",
            "float64": "all of it in 64 bits, where `check` is sharpest",
            "mixed_float16": "computed in 16 bits, weights in 32; the loss is scaled",
            "mixed_bfloat16": "computed in 16 bits of float32's range, weights in 32",
        },
        "The type to compute in. Default: Keras's own, which is float32 unless set.",
    )
    flags.DEFINE_enum("dtype", None, PRECISIONS, "Alias for --precision.", values)
    flags.DEFINE_bool(
        "jit_compile",
        None,
        "Whether XLA compiles what each device computes. Default: as the task file compiles the "
        "model. Not with --sync=async.",
        flag_values=values,
    )


def bucket_bytes(values: flags.FlagValues) -> int | None:
    """Returns what --bucket_bytes says, in bytes."""
    return None if values.bucket_bytes is None else parse_bytes(values.bucket_bytes)


def _mesh_problems(values: flags.FlagValues) -> list[str]:
    """Returns what is wrong with --mesh."""
    if values.parallel != "hybrid":
        if values.mesh is None:
            return []
        return [
            "--mesh belongs to --parallel=hybrid. Received: "
            f"--mesh={values.mesh} with --parallel={values.parallel}. Drop --mesh."
        ]
    if values.mesh is None:
        return [
            "--parallel=hybrid needs a mesh: how many devices there are along each axis. Received: "
            "no --mesh. Add --mesh=data=2,pipeline=2, for example."
        ]
    try:
        Mesh.parse(values.mesh)
    except ValueError as error:
        return [f"--mesh: {error}"]
    return []


def _update_problems(values: flags.FlagValues) -> list[str]:
    """Returns what is wrong with --sync and --shard_optimizer."""
    if values.shard_optimizer and values.parallel not in ("data", "hybrid"):
        return [
            "--shard_optimizer is of replicas. Received: "
            f"--shard_optimizer with --parallel={values.parallel}. Take --parallel=data or hybrid, "
            "or drop --shard_optimizer."
        ]
    if values.sync is None:
        return []
    try:
        policy = synchronization.Synchronization.parse(values.sync)
    except ValueError as error:
        return [f"--sync: {error}"]
    in_micro_batches = values.parallel in ("pipeline", "hybrid")
    is_plain = not (policy.grows or policy.is_local or policy.is_async)
    if values.parallel != "data" and not (in_micro_batches and is_plain):
        takes = "every_step and accumulate:N alone" if in_micro_batches else "none"
        return [
            f"--parallel={values.parallel} takes of --sync {takes}; replicas that each hold the "
            f"whole model take all. Received: --sync={values.sync} with --parallel="
            f"{values.parallel}. Take --parallel=data, or drop --sync."
        ]
    if policy.is_async:
        return _async_problems(values)
    if policy.is_local and values.compression is not None:
        return [
            "--compression is of gradients, and workers that step by themselves send weights. "
            f"Received: --sync={values.sync} with --compression={values.compression}. Drop one."
        ]
    if policy.is_local and values.shard_optimizer:
        return [
            "Workers that step by themselves each need the whole optimizer. Received: "
            f"--sync={values.sync} with --shard_optimizer. Drop one."
        ]
    return []


_NOT_ASYNC = (
    "devices", "num_devices", "num_workers", "all_reduce", "bucket_bytes", "compression",
    "shard_optimizer", "inject",
)  # fmt: skip


def _async_problems(values: flags.FlagValues) -> list[str]:
    """Returns which flags do not go with asynchronous workers."""
    given = [name for name in _NOT_ASYNC if name in values and getattr(values, name)]
    given += ["strategy"] if values.strategy != "auto" else []
    if "jit_compile" in values and values.jit_compile:
        given.append("jit_compile")
    if "precision" in values and values.precision == "mixed_float16":
        given.append("precision=mixed_float16")
    return [
        "Asynchronous workers sum no gradients, and are the processes of the job. Received: "
        f"--{name} with --sync={values.sync}. Drop one; --sync=every_step goes with all."
        for name in given
    ]


def _precision_problems(values: flags.FlagValues) -> list[str]:
    """Has --dtype mean --precision; what contradicts that is a problem."""
    if "dtype" not in values or values.dtype is None:
        return []
    if values.precision not in (None, values.dtype):
        return [
            "--dtype is another name for --precision, and a model computes in one type. Received: "
            f"--precision={values.precision} with --dtype={values.dtype}. Drop one of the two."
        ]
    values.precision = values.dtype
    return []


def common_problems(values: flags.FlagValues) -> list[str]:
    """Returns what is wrong with the common flags, alone and together."""
    problems = _precision_problems(values)
    if values.global_batch_size < 1:
        problems.append(
            "The global batch size must be at least 1. "
            f"Received: --global_batch_size={values.global_batch_size}."
        )
    if values.num_devices is not None and values.num_devices < 1:
        problems.append(
            "The number of devices must be at least 1. "
            f"Received: --num_devices={values.num_devices}."
        )
    if not 0 <= values.seed < 2**32:
        problems.append(f"The seed must lie in [0, 2**32). Received: --seed={values.seed}.")
    if values.devices is not None and values.num_devices is not None:
        problems.append(
            "Devices are given either by count or by name, not both. "
            f"Received: --num_devices={values.num_devices}, "
            f"--devices={','.join(values.devices)}. Drop one of the two."
        )
    if values.devices is not None and values.device_type != "auto":
        problems.append(
            "Devices that are named need no type. Received: "
            f"--devices={','.join(values.devices)}, --device_type={values.device_type}. "
            "Drop --device_type."
        )
    if values.num_workers is not None and values.num_workers < 1:
        problems.append(
            "The number of workers must be at least 1. "
            f"Received: --num_workers={values.num_workers}."
        )
    if values.num_workers is not None and values.parallel in ("none", "tensor", "auto"):
        problems.append(
            f"--parallel={values.parallel} has no workers. "
            f"Received: --num_workers={values.num_workers}. Use --parallel=data or model."
        )
    for name in ("start_timeout", "stall_timeout"):
        if not getattr(values, name) > 0:
            problems.append(
                "The time to wait for other workers must be positive. "
                f"Received: --{name}={getattr(values, name)}."
            )
    if values.parallel != "data" and values.strategy != "auto":
        problems.append(
            "--strategy chooses among the kinds of --parallel=data. Received: "
            f"--strategy={values.strategy} with --parallel={values.parallel}. Drop --strategy."
        )
    if values.parallel not in ("data", "hybrid") and values.all_reduce is not None:
        problems.append(
            "--all_reduce says what sums the replicas of --parallel=data and hybrid. Received: "
            f"--all_reduce={values.all_reduce} with --parallel={values.parallel}. "
            "Drop --all_reduce."
        )
    if not values.calibrate and values.all_reduce != "auto":
        problems.append(
            "--nocalibrate is for --all_reduce=auto. Received: --nocalibrate with "
            f"--all_reduce={values.all_reduce}. Drop --nocalibrate."
        )
    try:
        bucket_bytes(values)
    except ValueError as error:
        problems.append(f"--bucket_bytes: {error}")
    try:
        CompressionName.parse(values.compression)
    except ValueError as error:
        problems.append(f"--compression: {error}")
    problems += _update_problems(values)
    problems += plan_problems(values)
    if values.split_gpu and values.parallel == "auto":
        problems.append(
            "--parallel=auto plans for devices that are there. Received: --split_gpu with "
            "--parallel=auto. Name the parallelism: --parallel=data, or drop --split_gpu."
        )
    problems += _mesh_problems(values)
    problems += pipeline_problems(values)
    has_stages = values.parallel in ("model", "pipeline", "hybrid", "auto")
    if not has_stages and (values.device_memory or values.balance != "memory"):
        name = "device_memory" if values.device_memory else "balance"
        problems.append(
            f"--{name} says where --parallel=model, pipeline, hybrid and auto cut. Received: "
            f"--{name}={getattr(values, name)} with --parallel={values.parallel}. Drop --{name}."
        )
    if values.parallel != "tensor" and values.convolutions != "channels":
        problems.append(
            "--convolutions says how --parallel=tensor splits. Received: --convolutions="
            f"{values.convolutions} with --parallel={values.parallel}. Drop --convolutions."
        )
    count = len(values.devices) if values.devices is not None else values.num_devices
    if values.parallel == "none" and count is not None and count > 1:
        given = (
            f"--devices={','.join(values.devices)}"
            if values.devices is not None
            else f"--num_devices={count}"
        )
        problems.append(
            "--parallel=none trains on one device. "
            f"Received: {given}. Use --parallel=data, or one device."
        )
    return problems
