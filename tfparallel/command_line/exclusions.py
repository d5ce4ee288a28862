"""Mutually exclusive flags, one row per reason."""

import dataclasses

__all__ = ["EXCLUDES", "Excludes"]


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


_MAKES_DEVICES = "--split_gpu makes the devices itself, of a GPU."
_FITTED = "The numbers are either given or fitted."
_NO_SUMS = "Asynchronous workers sum no gradients, and are the processes of the job."
_NO_ASYNC = "Drop one; --sync=every_step goes with all."
_ALONE = "Workers that step by themselves each need whole weights, and the whole optimizer."

EXCLUDES = (
    Excludes(
        ("num_devices", "devices"), "Devices are given either by count or by name, not both."
    ),
    Excludes(
        ("devices", "device_type"), "Devices that are named need no type.", "Drop --device_type."
    ),
    Excludes(
        ("num_devices", "nproc_per_node"),
        "Ranks are the devices of one process or processes, not both.",
    ),
    Excludes(("split_gpu", "devices"), _MAKES_DEVICES),
    Excludes(("split_gpu", "device_type=cpu"), _MAKES_DEVICES),
    Excludes(
        ("split_gpu", "parallel=auto"),
        "--parallel=auto plans for devices that are there.",
        "Name the parallelism: --parallel=data, or drop --split_gpu.",
    ),
    *(
        Excludes((flag, "sync=async"), _NO_SUMS, _NO_ASYNC)
        for flag in (
            "devices", "num_devices", "num_workers", "strategy", "all_reduce", "bucket_bytes",
            "compression", "shard", "inject", "jit_compile", "precision=mixed_float16",
        )
    ),
    Excludes(
        ("sync=local_sgd|post_local_sgd", "compression"),
        "--compression is of gradients, and workers that step by themselves send weights.",
    ),
    Excludes(("sync=local_sgd|post_local_sgd", "shard"), _ALONE),
    Excludes(
        ("shard=parameters", "compression"),
        "Gradients of shares are sent to their owners as they are.",
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
            "--num_ps is for a job on this host, whose processes sum no gradients.",
            f"Drop --{flag}; on several hosts, name all processes in TF_CONFIG.",
        )
        for flag in ("bind_cores", "standby", "transport", "nnodes")
    ),
    *(
        Excludes(
            ("emit", flag), f"--{flag} cannot be in a file that all hosts read.", "Leave it out."
        )
        for flag in ("node_rank", "rdzv_endpoint", "local_addr", "num_ps", "bind_cores")
    ),
)  # fmt: skip
