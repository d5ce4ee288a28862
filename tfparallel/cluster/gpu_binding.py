"""Assigns a host's GPUs to its workers."""

import glob
import itertools
import re
from collections.abc import Mapping

from tfparallel.cluster.config_error import refusal, shown

# Set by an engine, such as Ray, that shows each worker only its own GPUs.
BOUND = "TFPARALLEL_GPUS_ARE_BOUND"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ON_NODE = "SLURM_GPUS_ON_NODE"
_NO_GPU = ("", "-1", "NoDevFiles")  # Slurm sets the last for a job without GPUs.
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def visible_gpus(
    environ: Mapping[str, str], local_rank: int, num_local_workers: int
) -> dict[str, str]:
    """Divides a host's GPUs among its workers, in equal shares by local rank.

    A worker alone on its host keeps every GPU. Otherwise each worker sees all GPUs under Slurm,
    torchrun and MPI, and would allocate memory on all of them, unless Slurm (`--gpus-per-task`,
    `--gpu-bind`) or Ray binds them.

    Returns:
        CUDA_VISIBLE_DEVICES and its value. If this worker sees a single GPU, which may be shared:
        TF_FORCE_GPU_ALLOW_GROWTH, unless it is set, to keep one worker from taking all memory.
        Empty if nothing needs to change.

    Raises:
        ValueError: If the GPUs cannot be divided equally.
    """
    if num_local_workers == 1 or environ.get(BOUND) == "1" or _bound_by_slurm(environ):
        return {}
    visible = environ.get(_VISIBLE)
    gpus = _visible_names(visible) if visible is not None else _all_indices(environ)
    if not gpus:
        return {}
    if visible is not None and len(gpus) == 1:  # This worker's own, or one for all.
        return {} if _GROWTH in environ else {_GROWTH: "true"}
    share, left_over = divmod(len(gpus), num_local_workers)
    if left_over or not share:
        named = {name: environ[name] for name in (_VISIBLE, _ON_NODE) if name in environ}
        num_gpus = _count(len(gpus), "GPU")
        raise refusal(
            f"{num_local_workers} workers on one host cannot share {num_gpus} equally",
            ["the number of GPUs must be a multiple of the number of workers"],
            shown(named) if named else f"{num_gpus} in /dev",
            f"Start {_count(len(gpus), 'worker')} per host, or set {_VISIBLE}: "
            f"{_VISIBLE}={gpus[0]} makes all workers share that GPU, {_VISIBLE}=-1 trains on the "
            "CPU.",
        )
    first = local_rank * share
    return {_VISIBLE: ",".join(gpus[first : first + share])}


def _count(number, noun):
    return f"{number} {noun}{'s' * (number != 1)}"


def _bound_by_slurm(environ):
    bind = environ.get("SLURM_GPU_BIND", "")
    if bind:
        # Such as "single:1" or "verbose,closest"; with "none" every task sees all GPUs.
        return "none" not in re.split("[,:]", bind.lower())
    return bool(environ.get("SLURM_GPUS_PER_TASK")) or "gpu" in environ.get(
        "SLURM_TRES_PER_TASK", ""
    )


def _visible_names(visible):
    names = (name.strip() for name in visible.split(","))
    # CUDA stops at the first unknown name.
    return list(itertools.takewhile(lambda name: name not in _NO_GPU, names))


def _all_indices(environ):
    on_node = environ.get(_ON_NODE, "")
    is_number = re.fullmatch("[0-9]{1,4}", on_node)
    number = int(on_node) if is_number else len(glob.glob("/dev/nvidia[0-9]*"))
    return [str(index) for index in range(number)]
