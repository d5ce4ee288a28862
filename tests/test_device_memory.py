"""How much memory a device has."""

import os
import types

import pytest
import tensorflow as tf

from tfparallel import cuda_driver
from tfparallel.device_memory import memory_bytes

HOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_logical_cpus_have_the_hosts():
    assert memory_bytes() == memory_bytes("/job:worker/task:1/device:CPU:3") == HOST


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("GPU:0", 512 * 2**20),
        ("/job:worker/replica:0/task:1/device:GPU:1", 256 * 2**20),
        ("GPU:2", 9 * 2**20),  # Whole, the second that TensorFlow sees and the third of the host.
        ("GPU:3", None),
    ],
)
def test_of_gpus_whole_and_split(device, expected, monkeypatch):
    parts = [types.SimpleNamespace(memory_limit=limit) for limit in (512, 256)]
    gpus = {
        tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU"): parts,
        tf.config.PhysicalDevice("/physical_device:GPU:2", "GPU"): None,
    }
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(gpus))
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", gpus.get)
    monkeypatch.setattr(cuda_driver, "memory_mib", {2: 9}.get)
    assert memory_bytes(device) == expected


def test_what_the_driver_does_not_tell(monkeypatch):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
    monkeypatch.setattr(cuda_driver, "memory_mib", lambda index: None)
    assert memory_bytes("GPU:0") is None
