"""Faults in tasks that amplify rounding: `tfparallel check` passes each of them without a fault."""

import os

import keras
import pytest

from tests.commands.command_line import ROOT
from tests.parity.case import precision
from tests.planted_faults import FAULTS
from tfparallel.data.batches import first_batches
from tfparallel.diagnostics.check import check_parity, uneven_first
from tfparallel.task import load_task

# Path, type, devices, global batch size, steps.
TASKS = [("models/digits_cnn.py", "float32", 2, 100, 30)]
if os.environ.get("TFPARALLEL_NETWORKS") == "all":  # Minutes each.
    TASKS.append(("tests/tasks/mobilenet_v2.py", "float64", 3, 50, 12))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path, dtype, num_devices, size, steps", TASKS)
def test_a_planted_fault_is_found(path, dtype, num_devices, size, steps, fault):
    devices = [f"CPU:{index}" for index in range(num_devices)]
    with precision(dtype):
        keras.utils.set_random_seed(7)
        task = load_task(str(ROOT / path))
        data, _ = task.load_data()
        batches = first_batches(data, global_batch_size=size, seed=7, num_batches=steps)
        report = check_parity(
            task.build_model,
            task.compile_model,
            uneven_first(batches),
            make_parallel_model=FAULTS[fault](devices),
            seed=7,
        )
    assert report.verdict == "differs"
    assert min(item.first_step for item in report.variables if item.first_step) == 1
