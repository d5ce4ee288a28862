"""Functions that workers can import by name, which a test's own module is not."""

import collections
import os
import time

from tfparallel.cluster.cluster_spec import Cluster

Place = collections.namedtuple("Place", "worker num_workers pid")


def place(*args, **kwargs):
    cluster = Cluster.from_env()
    return Place(cluster.worker_index, cluster.num_workers, os.getpid()), args, kwargs


def fail_in_worker_1():
    if Cluster.from_env().worker_index == 1:
        raise KeyError("gone")
    time.sleep(600)
