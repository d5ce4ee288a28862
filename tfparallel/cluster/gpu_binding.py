"""Which GPUs each of several workers on a host should see."""

import glob
import itertools
import re
from collections.abc import Mapping

from tfparallel.cluster.config_error import refusal, shown

__all__ = ["visible_gpus"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ON_NODE = "SLURM_GPUS_ON_NODE"
_NO_GPU = ("", "-1", "NoDevFiles")  # The last is what Slurm writes for a job without GPUs.
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def visible_gpus(
    environ: Mapping[str, str], local_rank: int, num_local_workers: int
) -> dict[str, str]:
    """Deals a host's GPUs out to the workers on it, in equal shares by local rank.

    A worker that has its host to itself keeps every GPU. With one worker a GPU, each still sees all
    of them (Slurm, torchrun and MPI alike), and would take their memory from its neighbours, unless
    `--gpus-per-task` or `--gpu-bind` has made Slurm bind them.

    Returns:
        CUDA_VISIBLE_DEVICES and its value. Where this worker sees one GPU, its own or one that it
        shares, which cannot be told apart: TF_FORCE_GPU_ALLOW_GROWTH, unless it is set, so that no
        worker takes all of the memory. Nothing if all is well as it is.

    Raises:
        ValueError: If the GPUs cannot be shared out equally.
    """
    if num_local_workers == 1 or _bound_by_slurm(environ):
        return {}
    visible = environ.get(_VISIBLE)
    gpus = _listed(visible) if visible is not None else _counted(environ)
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
            f"Start {_count(len(gpus), 'worker')} a host, or set {_VISIBLE}: {_VISIBLE}={gpus[0]} "
            f"has all workers share that GPU, {_VISIBLE}=-1 trains on the CPU.",
        )
    first = local_rank * share
    return {_VISIBLE: ",".join(gpus[first : first + share])}


def _count(number, noun):
    return f"{number} {noun}{'s' * (number != 1)}"


def _bound_by_slurm(environ):
    bind = environ.get("SLURM_GPU_BIND", "")
    if bind:
        # Such as "single:1" or "verbose,closest"; "none" lets every task see all.
        return "none" not in re.split("[,:]", bind.lower())
    return bool(environ.get("SLURM_GPUS_PER_TASK")) or "gpu" in environ.get(
        "SLURM_TRES_PER_TASK", ""
    )


def _listed(visible):
    names = (name.strip() for name in visible.split(","))
    # CUDA stops at the first name that it does not know.
    return list(itertools.takewhile(lambda name: name not in _NO_GPU, names))


def _counted(environ):
    on_node = environ.get(_ON_NODE, "")
    is_told = re.fullmatch("[0-9]{1,4}", on_node)
    number = int(on_node) if is_told else len(glob.glob("/dev/nvidia[0-9]*"))
    return [str(index) for index in range(number)]
