"""The form that `--parallel` names: its devices, and the model built under it."""

from collections.abc import Callable

import keras
from absl import flags

from tfparallel.devices import choose_devices
from tfparallel.replication.data_parallel import data_parallel

__all__ = ["build_under", "devices_of", "form_line"]


def devices_of(values: flags.FlagValues) -> list[str]:
    """Returns the devices that the flags ask for; the CPU is split as needed."""
    if values.devices is not None:
        return choose_devices(devices=values.devices)
    num_devices = 1 if values.parallel == "none" else values.num_devices
    return choose_devices(num_devices=num_devices, device_type=values.device_type)


def build_under(
    form: str, devices: list[str], build_model: Callable[[], keras.Model]
) -> keras.Model:
    """Returns the model, built under the form."""
    if form == "none":
        return build_model()
    return data_parallel(build_model, devices=devices)


def form_line(form: str, devices: list[str]) -> str:
    """Returns the form and its devices in words."""
    names = ", ".join(devices)
    if form == "none":
        return f"one device ({names})"
    return f"data parallel on {len(devices)} device{'s' * (len(devices) > 1)} ({names})"
