"""Devices: names, the split, and every error on its text."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tfparallel import cuda_driver, device_memory, devices

# Made by conftest.py.
CPUS = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
without_gpu = pytest.mark.skipif(
    bool(devices.list_devices("GPU")), reason="the message names this machine's GPUs"
)


def run_python(program, **environment):
    """Runs a program in a fresh process, whose runtime has not started."""
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "name",
    ["GPU:0", "gpu:0", "/GPU:0", "/gpu:0", "/device:GPU:0", "device:gpu:0", " GPU:00 ",
     "/job:localhost/replica:0/task:0/device:GPU:0"],
)
def test_canonical_gives_one_spelling(name):
    assert devices.canonical(name) == "GPU:0"
    assert devices.to_tensorflow_name(name) == "/device:GPU:0"


@pytest.mark.parametrize(
    "name", ["GPU", "0", "", "GPU:-1", "GPU:one", "/job:worker/device:GPU:0", None, 0]
)
def test_canonical_refuses_what_is_no_name(name):
    with pytest.raises(ValueError, match=r"such as 'GPU:0' or 'CPU:1'\. Received: ") as caught:
        devices.canonical(name)
    assert repr(name) in str(caught.value)


def test_list_devices():
    assert devices.list_devices("CPU") == CPUS
    assert devices.list_devices("cpu") == CPUS
    assert devices.list_devices()[:4] == CPUS


def test_list_agrees_with_tensorflow():
    import tensorflow as tf

    listed = [device.name for device in tf.config.list_logical_devices()]
    assert [devices.to_tensorflow_name(name) for name in devices.list_devices()] == listed


def test_check_devices_keeps_the_order():
    assert devices.check_devices(["/device:CPU:2", "cpu:0"]) == ["CPU:2", "CPU:0"]
    assert devices.check_devices(("CPU:1",)) == ["CPU:1"]


@without_gpu
def test_check_devices_names_all_problems_at_once():
    with pytest.raises(ValueError) as caught:
        devices.check_devices(["gpu:7", "CPU:9", "/CPU:1", "cpu:1", "one", "CPU:9"])
    message = str(caught.value)
    assert "'one' is not a device name such as 'GPU:0'; GPU:7 does not exist; CPU:9" in message
    assert "CPU:9 does not exist; CPU:9 is listed 2 times; CPU:1 is listed 2 times." in message
    assert "one of these devices: CPU:0, CPU:1, CPU:2, CPU:3" in message
    assert "Received: devices=['gpu:7', 'CPU:9', '/CPU:1', 'cpu:1', 'one', 'CPU:9']" in message
    assert "`tfparallel.devices.split_cpu(10)`" in message
    assert "`tfparallel.devices.split_cpu(4)`" in message


def test_check_devices_refuses_none_at_all():
    with pytest.raises(ValueError, match=r"the list is empty\..* Received: devices=\[\]\.$"):
        devices.check_devices([])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("2", "Received: '2'. Pass 2.$"),
        ([0], "0 is not a device name such as 'GPU:0'; pass 'GPU:0'"),
        (["cuda:1"], "CUDA:1 does not exist; pass 'GPU:1'"),
    ],
)
def test_check_devices_translates_what_others_call_a_device(names, said):
    with pytest.raises(ValueError, match=said):
        devices.check_devices(names)


def test_check_devices_refuses_one_text():
    with pytest.raises(ValueError, match=r"Received: 'CPU:0,CPU:1'\. Pass \['CPU:0', 'CPU:1'\]"):
        devices.check_devices("CPU:0,CPU:1")


def test_splitting_again_into_as_many_does_nothing():
    assert devices.split_cpu(4) == CPUS
    assert devices.split_cpu(np.int64(4)) == CPUS


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
@pytest.mark.parametrize(
    "function",
    [devices.split_cpu, devices.split_gpu, devices.choose_devices],
    ids=lambda function: function.__name__,
)
def test_a_number_of_devices_must_be_positive(function, number):
    with pytest.raises(ValueError) as caught:
        function(number)
    assert str(caught.value) == (
        f"num_devices must be a whole number of at least 1. Received: num_devices={number!r}."
    )


@pytest.mark.slow
def test_too_late_says_what_to_move():
    finished = run_python(
        "import tfparallel, tensorflow as tf\n"
        "tfparallel.devices.split_cpu(3)\n"
        "tf.constant(1)\n"
        "tfparallel.devices.split_cpu(3)\n"
        "tfparallel.devices.choose_devices(2)\n"
        "tfparallel.devices.choose_devices(4, device_type='cpu')\n"
    )
    message = finished.stderr.splitlines()[-1]
    assert message.startswith(
        "RuntimeError: Cannot split the CPU into 4 devices: it has 3 devices, because TensorFlow's "
        "runtime has already started"
    )
    assert "Received: tfparallel.devices.split_cpu(4)." in message
    assert "Move this call to the top of the program" in message
    assert "In a notebook, restart the kernel" in message


@pytest.mark.slow
def test_listing_does_not_start_the_runtime():
    finished = run_python(
        "import tfparallel\n"
        "d = tfparallel.devices\n"
        "print(d.list_devices('CPU'), d.choose_devices(device_type='cpu'))\n"
        "print(d.choose_devices(3, device_type='cpu'), d.split_cpu(1), d.split_cpu(2))"
    )
    assert finished.stdout == (
        "['CPU:0'] ['CPU:0']\n['CPU:0', 'CPU:1', 'CPU:2'] ['CPU:0'] ['CPU:0', 'CPU:1']\n"
    ), finished.stderr


def test_choose_devices():
    assert devices.choose_devices(device_type="cpu") == CPUS
    assert devices.choose_devices(2, device_type="CPU") == CPUS[:2]
    assert devices.choose_devices(devices=["/CPU:3", "cpu:1"]) == ["CPU:3", "CPU:1"]
    assert devices.choose_devices(2, devices=["CPU:3", "CPU:1"]) == ["CPU:3", "CPU:1"]


@without_gpu
def test_choose_takes_the_cpu_where_there_is_no_gpu():
    assert devices.choose_devices() == CPUS
    assert devices.choose_devices(2) == CPUS[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_devices": 3, "devices": ["CPU:0", "CPU:1"]},
            r"contradict each other.*Received: num_devices=3, devices=\['CPU:0', 'CPU:1'\]",
        ),
        (
            {"device_type": "gpu", "devices": ["CPU:0"]},
            r"contradict each other: CPU:0 is.*Received: device_type='gpu', devices=\['CPU:0'\]",
        ),
        (
            {"device_type": "tpu"},
            r"must be one of auto, cpu, gpu\. Received: device_type='tpu'",
        ),
        ({"devices": []}, "the list is empty"),
    ],
)
def test_choose_refuses_contradictions(arguments, message):
    with pytest.raises(ValueError, match=message):
        devices.choose_devices(**arguments)


@without_gpu
def test_choose_refuses_gpus_that_do_not_exist():
    with pytest.raises(ValueError) as caught:
        devices.choose_devices(2, device_type="gpu")
    message = str(caught.value)
    assert message.startswith("No GPU can be used: TensorFlow lists none.")
    assert "Received: device_type='gpu', num_devices=2." in message
    assert "device type 'cpu'" in message


@without_gpu
def test_split_gpu_without_one():
    with pytest.raises(ValueError) as caught:
        devices.split_gpu(2, gpu="/gpu:1")
    message = str(caught.value)
    assert message.startswith("Cannot split GPU:1: TensorFlow sees 0 GPUs.")
    assert "Received: gpu='/gpu:1', num_devices=2." in message
    assert message.endswith("`tfparallel.devices.split_cpu(4)`.")
    assert devices.set_memory_growth() == []


def test_memory_limit_must_be_positive():
    with pytest.raises(ValueError, match=r"at least 1\. Received: memory_limit_mib=0\."):
        devices.split_gpu(2, memory_limit_mib=0)


class PretendGPUs:
    """Stands in for `tf.config` on a machine with two GPUs, whose runtime may have started."""

    def __init__(self, started=False):
        import tensorflow as tf

        self.physical = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in (0, 1)
        ]
        self.LogicalDeviceConfiguration = tf.config.LogicalDeviceConfiguration
        self.experimental = self
        self.started = started
        self.split = {}
        self.growth = {}
        self.visible = None

    def get_visible_devices(self, kind):
        hidden = kind == "GPU" and self.visible is not None
        return self.visible if hidden else self.list_physical_devices(kind)

    def list_physical_devices(self, kind):
        return self.physical if kind == "GPU" else []

    def set_visible_devices(self, devices, kind):
        if self.started:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = devices

    def get_logical_device_configuration(self, physical):
        return self.split.get(physical)

    def set_logical_device_configuration(self, physical, configuration):
        if self.started:
            raise RuntimeError("Virtual devices cannot be modified after being initialized")
        self.split[physical] = configuration

    def get_memory_growth(self, physical):
        return self.growth.get(physical)

    def set_memory_growth(self, physical, enabled):
        if self.started:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        self.growth[physical] = enabled


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs of 10,000 MiB; the real ones have tests marked `gpu`."""
    config = PretendGPUs()
    monkeypatch.setattr(devices.tf, "config", config)
    monkeypatch.setattr(cuda_driver, "memory_mib", lambda index: 10_000)
    return config


def test_split_gpu_numbers_the_parts_through(two_gpus):
    assert devices.split_gpu(3, gpu="GPU:1") == ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
    # 90% of 10,000 MiB in three parts.
    limits = [part.memory_limit for part in two_gpus.split[two_gpus.physical[1]]]
    assert limits == [3000, 3000, 3000]
    two_gpus.started = True
    assert len(devices.split_gpu(3, gpu="GPU:1")) == 4
    with pytest.raises(RuntimeError) as caught:
        devices.split_gpu(2, memory_limit_mib=512, gpu="GPU:1")
    assert "Cannot split the GPU into 2 devices: it has 3 devices" in str(caught.value)
    assert "split_gpu(2, memory_limit_mib=512, gpu='GPU:1')" in str(caught.value)


def test_split_gpu_refuses_an_unknown_one(two_gpus):
    with pytest.raises(ValueError, match=r"GPU:2: TensorFlow sees 2 GPUs\..*one of GPU:0, GPU:1\."):
        devices.split_gpu(2, gpu="GPU:2")


def test_which_gpu_a_device_is_the_whole_of(two_gpus):
    assert [devices.whole_gpu(name) for name in ("GPU:0", "gpu:1", "GPU:2", "CPU:0")] == [
        *(0, 1, None, None)
    ]
    devices.split_gpu(2, gpu="GPU:0")
    assert [devices.whole_gpu(f"GPU:{index}") for index in range(3)] == [None, None, 1]


def test_a_gpu_keeps_its_number_where_others_are_hidden(two_gpus):
    devices.hide_other_gpus(["GPU:1"])
    assert devices.list_devices() == ["GPU:0"] and devices.whole_gpu("GPU:0") == 1


def test_gpus_are_hidden(two_gpus):
    devices.hide_gpus()
    assert devices.list_devices() == []
    two_gpus.started = True
    devices.hide_gpus()  # There is none any more.
    two_gpus.visible = None
    with pytest.raises(RuntimeError, match=r"Cannot hide GPUs.*hide_gpus\(\)"):
        devices.hide_gpus()


def test_memory_growth(two_gpus):
    assert devices.set_memory_growth() == ["GPU:0", "GPU:1"]
    assert list(two_gpus.growth.values()) == [True, True]
    two_gpus.started = True
    devices.set_memory_growth(True)
    with pytest.raises(RuntimeError) as caught:
        devices.set_memory_growth(False)
    assert "Cannot set memory growth on GPU:0, because TensorFlow's" in str(caught.value)
    assert "Received: tfparallel.devices.set_memory_growth(False)." in str(caught.value)


def test_memory_growth_of_a_split_gpu(two_gpus):
    devices.split_gpu(2)
    with pytest.raises(ValueError, match=r"GPU:0 was split into 2 logical devices of fixed memory"):
        devices.set_memory_growth()


def test_choose_takes_gpus_where_there_are_any(two_gpus):
    assert devices.choose_devices() == ["GPU:0", "GPU:1"]
    assert devices.choose_devices(1) == ["GPU:0"]
    with pytest.raises(ValueError) as caught:
        devices.choose_devices(5)
    message = str(caught.value)
    assert message.startswith("Cannot use 5 GPUs: this machine has 2 (GPU:0, GPU:1).")
    assert "Received: num_devices=5, device_type='auto'. Ask for at most 2" in message


def test_a_gpu_that_tensorflow_cannot_use_is_told(monkeypatch):
    monkeypatch.setattr(devices.startup, "has_nvidia_gpu", lambda: True)
    config = PretendGPUs()
    config.physical = []
    monkeypatch.setattr(devices.tf, "config", config)
    monkeypatch.setattr(devices, "list_devices", lambda kind=None: [] if kind == "GPU" else CPUS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.warns(UserWarning, match=r"Training on the CPU.*tensorflow\[and-cuda\]"):
        assert devices.choose_devices(2) == CPUS[:2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES='-1' may hide it\.$"):
        devices.choose_devices(2, device_type="gpu")


@pytest.mark.gpu
@pytest.mark.slow
def test_a_real_gpu_is_split():
    finished = run_python(
        "import tfparallel\n"
        "print(tfparallel.devices.split_gpu(2))\n"
        "import tensorflow as tf\n"
        "with tf.device('/device:GPU:1'): print((tf.ones(2) + 1).device[-5:])",
        CUDA_VISIBLE_DEVICES="0",
    )
    assert finished.stdout == "['GPU:0', 'GPU:1']\nGPU:1\n", finished.stderr


def test_what_tensors_took_is_counted_where_tensorflow_counts():
    before = devices.peak_tensor_bytes()
    if before is None:
        pytest.skip("TensorFlow counts no memory of this CPU")
    tensor = devices.tf.zeros([(before >> 2) + (1 << 20)])
    assert devices.peak_tensor_bytes() >= before + (1 << 22)
    del tensor


def test_memory_that_nothing_counts_is_none():
    assert devices.peak_tensor_bytes("GPU:99") is None


def test_each_gpu_of_this_process_is_asked_by_its_own_name(monkeypatch):
    queried = []

    def info(name):
        queried.append(name)
        return {"peak": 10 + int(name[-1])}

    monkeypatch.setattr(device_memory.tf.config.experimental, "get_memory_info", info)
    local_gpu, other = "/job:worker/task:0/device:GPU:1", "/job:worker/task:1/device:GPU:2"
    names = ["GPU:0", "CPU:0", local_gpu, other]
    assert device_memory.peak_bytes_of_gpus(names) == {"GPU:0": 10, local_gpu: 11}
    assert queried == ["GPU:0", "GPU:1"]


def test_a_number_of_devices_may_stand_for_their_names():
    assert devices.choose_devices(devices=2) == devices.choose_devices(num_devices=2)
    assert devices.check_devices(2) == devices.choose_devices(num_devices=2)
    assert devices.choose_devices(2, devices=2) == devices.choose_devices(num_devices=2)
    for bad in (0, -1, True):
        with pytest.raises(ValueError, match="num_devices must be"):
            devices.choose_devices(devices=bad)
    with pytest.raises(ValueError, match="contradict each other.*num_devices=1, devices=2"):
        devices.choose_devices(1, devices=2)
