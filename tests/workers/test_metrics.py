"""What several workers log is what one device logs, in every epoch."""

import json
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT

# Counts, which a mean of the workers' sums would hide: loss and accuracy are quotients.
PROGRAM = """
import json, os, sys
import keras, numpy as np
import tfparallel
keras.utils.set_random_seed(3)
def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
class Begins(keras.metrics.Metric):
    # It begins at one, and is reset to five.
    def __init__(self):
        super().__init__(name="begins")
        self.total = self.add_variable((), "ones", name="total")
    def update_state(self, y, outputs, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y - outputs)))
    def reset_state(self):
        self.total.assign(5.0)
    def result(self):
        return self.total + 0.0
strategy = tfparallel.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else None
x = np.random.default_rng(0).normal(size=(44, 2))
y = (x[:, :1] > 0) * 1.0
history = {}
# TensorFlow's sums take no uint8.
for metrics in (
    [keras.metrics.FalsePositives(), keras.metrics.AUC(), Begins()],
    [keras.metrics.BinaryIoU(dtype="uint8")],
):
    model = tfparallel.data_parallel(build, strategy, sync=sys.argv[2]) if strategy else build()
    model.compile(keras.optimizers.SGD(float(sys.argv[3])), "mse", metrics=metrics)
    validation = (x[:30], y[:30])
    history |= model.fit(
        x, y, epochs=3, batch_size=8, shuffle=False, verbose=0, validation_data=validation
    ).history
if os.environ.get("RANK", "0") == "0":
    with open(sys.argv[1], "w") as file:
        json.dump({name: [float(v) for v in values] for name, values in history.items()}, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "sync", "learning_rate"),
    [("tensorflow", "every_step", 0.01), ("mpi", "every_step", 0.01), ("mpi", "local_sgd:2", 0.0)],
)
def test_counts_are_those_of_one_device_in_every_epoch(tmp_path, transport, sync, learning_rate):
    launch = [sys.executable, "-m", "tfparallel", "launch", "--nproc_per_node=2"]
    launch += [f"--transport={transport}", "--"]
    histories = {}
    for name, head in (("one", []), ("two", launch)):
        done = subprocess.run(
            [*head, sys.executable, "-c", PROGRAM, tmp_path / name, sync, str(learning_rate)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        histories[name] = json.loads((tmp_path / name).read_text())
    assert histories["one"]["false_positives"][-1] > 0
    for name, values in histories["one"].items():
        # Float32 sums in another order.
        assert histories["two"][name] == pytest.approx(values, rel=1e-5), name
