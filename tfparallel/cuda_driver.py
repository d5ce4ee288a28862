"""Properties of a GPU that only the CUDA driver knows, or TensorFlow only after it has started.

GPUs are numbered like TensorFlow's physical devices, in the order of CUDA_VISIBLE_DEVICES.
"""

import ctypes


def num_gpus() -> int:
    """Returns the number of GPUs that this process may use; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def memory_mib(index: int) -> int | None:
    """Returns the memory of a GPU in MiB, or None if the driver does not report it."""
    driver, device = device_of(index)
    size_bytes = ctypes.c_size_t()
    if device is None or driver.cuDeviceTotalMem_v2(ctypes.byref(size_bytes), device):
        return None
    return size_bytes.value // 2**20


def uuid(index: int) -> str | None:
    """Returns the UUID of a GPU, or None if the driver does not report it."""
    driver, device = device_of(index)
    code = (ctypes.c_char * 16)()
    if device is None or driver.cuDeviceGetUuid(ctypes.byref(code), device):
        return None
    return bytes(code).hex()


def device_of(index: int) -> tuple:
    """Returns the driver and its handle of a GPU; None for what does not exist."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None
    device = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)
    return driver, None if failed else device
