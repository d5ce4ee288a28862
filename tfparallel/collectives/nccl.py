"""Decides whether NCCL can connect GPUs: each rank needs a whole GPU of its own.

NCCL rejects two ranks on one GPU only when the first collective runs; this check comes earlier.
Parts of a GPU (`split_gpu`) and processes that share one are connected like CPUs.
"""

from collections.abc import Mapping, Sequence

from tfparallel import cuda_driver
from tfparallel import devices as device_lib


def refusal(devices: Sequence[str]) -> str:
    """Returns why NCCL cannot connect devices of this process; "" if it can."""
    for name in devices:
        if reason := _reason(name):
            return reason
    return ""


def offer(device: str) -> dict[str, str]:
    """Returns a JSON description of this worker's device, for the other workers."""
    if reason := _reason(device):
        return {"device": device_lib.canonical(device), "reason": reason}
    index = device_lib.whole_gpu(device)
    return {"device": device_lib.canonical(device), "gpu": cuda_driver.uuid(index) or ""}


def refusal_between(offers: Sequence[Mapping[str, str]]) -> str:
    """Returns why NCCL cannot connect workers, from their offers; "" if it can."""
    users: dict[str, int] = {}
    for worker, received in enumerate(offers):
        if received.get("reason"):
            return f"worker {worker}: {received['reason']}"
        gpu = received["gpu"]
        if gpu and gpu in users:
            return f"workers {users[gpu]} and {worker} share a GPU"
        users[gpu] = worker
    return ""


def _reason(name: str) -> str:
    name = device_lib.canonical(name)
    if not name.rpartition("/device:")[2].startswith("GPU"):
        return f"nccl needs GPUs; {name} is not one"
    if device_lib.whole_gpu(name) is None:
        return f"nccl needs a whole GPU for each rank; {name} is a part of one"
    return ""
