"""Mutually exclusive flags, one row per reason."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Excludes:
    """Flags that cannot be combined.

    Attributes:
        these: Two or more flags, or values of flags, such as "sync=async".
        why: The reason, as a sentence.
        fix: How to fix it.
    """

    these: tuple[str, ...]
    why: str
    fix: str = "Drop one of the two."


_MAKES_DEVICES = "--split_gpu creates its own devices from a GPU."
_FITTED = "The cost model comes either from the flags or from a sweep."
_NO_SUMS = "Asynchronous workers are the processes of the job, and do not sum gradients."
_NO_ASYNC = "Drop one of them; --sync=every_step works with all flags."
_ALONE = "Workers that take local steps each need all weights and the whole optimizer state."

EXCLUDES = (
    Excludes(
        ("num_devices", "devices"), "Choose devices either by count or by name, not both."
    ),
    Excludes(
        ("devices", "device_type"),
        "Devices given by name already have a type.",
        "Drop --device_type.",
    ),
    Excludes(
        ("num_devices", "nproc_per_node"),
        "Ranks are either the devices of one process or several processes, not both.",
    ),
    Excludes(("split_gpu", "devices"), _MAKES_DEVICES),
    Excludes(("split_gpu", "device_type=cpu"), _MAKES_DEVICES),
    Excludes(
        ("split_gpu", "parallel=auto"),
        "--parallel=auto plans only for existing devices.",
        "Choose the parallelism, such as --parallel=data, or drop --split_gpu.",
    ),
    *(
        Excludes((flag, "sync=async"), _NO_SUMS, _NO_ASYNC)
        for flag in (
            "devices", "num_devices", "num_workers", "strategy", "all_reduce", "bucket_bytes",
            "compression", "shard", "inject", "jit_compile", "precision=mixed_float16",
        )
    ),
    Excludes(
        ("sync=local_sgd|post_local_sgd|diloco", "compression"),
        "--compression applies to gradients, but workers that take local steps send weights.",
    ),
    Excludes(("sync=local_sgd|post_local_sgd|diloco", "shard"), _ALONE),
    Excludes(
        ("sync=adascale", "compression"),
        "AdaScale measures the noise of gradients, which compression would change.",
    ),
    Excludes(
        ("shard=parameters", "compression"),
        "With --shard=parameters, gradients are sent uncompressed to the owners of the shards.",
    ),
    *(
        Excludes(("sweep", flag), _FITTED)
        for flag in (
            "latency_us", "bandwidth", "local_latency_us", "local_bandwidth", "add_bandwidth",
        )
    ),
    *(
        Excludes(
            ("num_ps", flag),
            "--num_ps is for a job on this host alone, whose processes do not sum gradients.",
            f"Drop --{flag}; on several hosts, list all processes in TF_CONFIG.",
        )
        for flag in ("bind_cores", "standby", "transport", "nnodes")
    ),
    *(
        Excludes(
            ("emit", flag),
            f"--{flag} cannot be in a job file, which is the same for all hosts.",
            "Drop it.",
        )
        for flag in ("node_rank", "rdzv_endpoint", "local_addr", "num_ps", "bind_cores")
    ),
    Excludes(
        ("emit=jobset|trainjob", "standby"),
        "A JobSet restarts the job in new pods, where no standby process is left.",
        "Drop --standby.",
    ),
    *(
        Excludes(
            ("on", flag),
            "With --on=ray, Ray decides on which hosts the workers run.",
            f"Drop --{flag}; --num_workers is the number of workers on all hosts.",
        )
        for flag in (
            "nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "local_addr", "num_ps",
            "standby", "bind_cores", "emit",
        )
    ),
)  # fmt: skip
