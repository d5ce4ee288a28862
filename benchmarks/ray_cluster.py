"""A Ray cluster of several raylets on this machine, whose nodes come and go.

`ray_elastic.py`, `faults.py --on=ray` and `tests/ray` use it.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import uuid

import psutil

NUM_TRIES = 10
_CLONE_FS, _CLONE_NEWNS = 0x00000200, 0x00020000  # Of <sched.h>.
_BOOT = "/proc/sys/kernel/random/boot_id"  # By which processes know that they share a host.
_NODE = {"object_store_memory": 80_000_000}
# The workers' threads come from their reserved CPUs.
_NOT_INHERITED = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


def is_missing(program):
    """Whether Ray is not installed; then says so."""
    missing = importlib.util.find_spec("ray") is None
    if missing:
        print(f"{program} measures nothing here: `pip install ray` first.", file=sys.stderr)
    return missing


@contextlib.contextmanager
def cluster(num_nodes, num_cpus=1):
    """Starts nodes of some CPUs each, and connects this process; the first node stays.

    Args:
        num_nodes: How many.
        num_cpus: Of each node.
    """
    ray = importlib.import_module("ray")
    before = {name: os.environ.pop(name, None) for name in _NOT_INHERITED}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    started = _in_time(lambda: _first_node(num_cpus))
    try:
        for _ in range(num_nodes - 1):
            add_node(started, num_cpus)
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=started.address, log_to_driver=False)
        signal.signal(signal.SIGTERM, handler)  # Ray's own ends this process, but not the nodes.
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
        os.environ.update({name: value for name, value in before.items() if value is not None})


def add_node(started, num_cpus=1, own_host=False):
    """Adds a node; as root, on request, as if on a host of its own. In the main thread only."""
    with contextlib.ExitStack() as stack:
        if own_host:
            stack.enter_context(own_mounts())
            boot = stack.enter_context(tempfile.NamedTemporaryFile("w"))
            boot.write(str(uuid.uuid4()))
            boot.flush()
            subprocess.run(["mount", "--bind", boot.name, _BOOT], check=True)
        _in_time(lambda: started.add_node(num_cpus=num_cpus, **_NODE))


@contextlib.contextmanager
def own_mounts():
    """Gives what this thread starts inside, and mounts, mounts of its own. As root."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/mnt", "rb") as before:
        if libc.unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "no mounts of its own")
        try:
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            yield
        finally:
            # Threads that were started inside share the working folder, which setns refuses.
            if libc.unshare(_CLONE_FS) or libc.setns(before.fileno(), _CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "no way back to the mounts of all")


def _first_node(num_cpus):
    started = importlib.import_module("ray.cluster_utils").Cluster()
    started.add_node(include_dashboard=False, num_cpus=num_cpus, **_NODE)
    return started


def _in_time(start):
    """Calls a function that starts a node, again if Ray's 30 s were too short: a busy machine."""
    before = set(psutil.Process().children())
    for _ in range(NUM_TRIES - 1):
        try:
            return start()
        except Exception as error:  # Ray raises no narrower type.
            print(f"A node has not started, once more: {error}", file=sys.stderr)
        for process in set(psutil.Process().children()) - before:
            process.kill()
    return start()


def kill_raylet(started, node=None):
    """Kills the raylet of a node that is not the first by SIGKILL, then the rest of the node."""
    node = node or next(iter(started.worker_nodes))
    node.kill_raylet(check_alive=False)
    started.remove_node(node, allow_graceful=False)


def processes_of(node):
    """Returns the processes of a node, its raylet first; none if that has died."""
    with contextlib.suppress(psutil.NoSuchProcess):
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]
    return []
