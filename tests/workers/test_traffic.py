"""What a step hands to the other workers: gradients, and no predictions unless they must meet."""

import json

import keras
import numpy as np
import pytest

from tests.commands.command_line import TASKS, tfparallel
from tfparallel.callbacks import SentBytes

from .jobs import run_workers

pytestmark = pytest.mark.slow

NUM_WORKERS, ROWS, CLASSES, WORDS, WIDTH = 2, 6, 500, 40, 4
PROGRAM = f"""
import keras
import numpy as np
import tensorflow as tf

import tfparallel

COLLECTIVES = ("CollectiveReduceV2", "CollectiveGatherV2", "PyFunc")


class OfTheBatch(keras.losses.Loss):
    def call(self, y, outputs):
        return keras.ops.mean((y - outputs) ** 2, -1) + 0 * keras.ops.max(outputs)


def main():
    strategy = tfparallel.MultiWorkerMirroredStrategy()

    def build():
        return keras.Sequential([
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding({WORDS}, {WIDTH}),
            keras.layers.Flatten(),
            keras.layers.Dense({CLASSES}),
        ])

    x = np.arange({3 * ROWS}).reshape({ROWS}, 3) % {WORDS}
    y = np.ones(({ROWS}, {CLASSES}), "float32")
    results = {{}}
    for name, loss in {{"keras": keras.losses.MeanSquaredError(), "own": OfTheBatch()}}.items():
        model = tfparallel.data_parallel(build, strategy)
        model.compile("sgd", loss=loss, metrics=["mae"])
        sent = tfparallel.callbacks.SentBytes()
        model.fit(x, y, batch_size={ROWS}, verbose=0, callbacks=[sent])
        results[name] = [sent.in_a_step, bool(model.why_joined)]
    x, y = np.ones(({ROWS}, 3), "float32"), np.ones(({ROWS}, 2), "float32")
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        results[reduction] = in_a_step(strategy, reduction, x, y, np.arange(1.0, 1.0 + {ROWS}))
    return results


def in_a_step(strategy, reduction, *data):
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), strategy
    )
    model.compile(
        keras.optimizers.SGD(global_clipnorm=1.0),
        keras.losses.MeanSquaredError(reduction=reduction),
        metrics=["mae", keras.metrics.AUC()],
    )
    model.fit(*data[:2], sample_weight=data[2], verbose=0)

    @tf.function(autograph=False)
    def step(*data):
        with strategy.program():
            return model.train_step(data)

    # Fingerprints of the first batches are compared in a branch, a graph of its own.
    operations = step.get_concrete_function(*data).graph.get_operations()
    return [operation.type in COLLECTIVES for operation in operations].count(True)
"""


@pytest.mark.parametrize("transport", ["ring_tuned", "mpi"])
def test_predictions_cross_only_where_they_must(transport):
    by_worker = run_workers(PROGRAM, NUM_WORKERS, environment={"TFPARALLEL_ALL_REDUCE": transport})
    dense = 4 * (3 * WIDTH * CLASSES + CLASSES)
    # A length that only the step knows is rounded up, by a quarter at most.
    own_slices = 3 * ROWS // NUM_WORKERS * (4 * WIDTH + 4)
    predictions = 4 * ROWS // NUM_WORKERS * CLASSES
    for seen in by_worker:
        sent, joined = seen["keras"]
        assert not joined and sent["rows"] == 0
        assert dense <= sent["sums"] <= dense + 1024
        assert own_slices <= sent["slices"] <= 1.3 * own_slices
        # Losses and metrics go with the gradients; what weights divide by goes ahead of them.
        assert (seen["sum_over_batch_size"], seen["mean_with_sample_weight"]) == (1, 2)
        sent, joined = seen["own"]
        assert joined and predictions <= sent["rows"] <= 1.25 * predictions


def test_predictions_larger_than_all_weights_stay_where_they_are(tmp_path):
    report = tmp_path / "check.json"
    code, output, errors = tfparallel(
        *("check", TASKS / "wide_vocabulary.py", "--num_workers=2", "--num_devices=1"),
        *("--global_batch_size=8", "--steps=2", f"--report={report}"),
        deadline_seconds=200,
    )
    assert code == 0, output + errors
    assert "of slices and no rows" in output
    content = json.loads(report.read_text())
    sent, weights = content["sent_bytes_in_a_step"], 4 * (2 * 32_768 * 16)
    assert content["joined_outputs"] is False and sent["rows"] == 0
    assert sum(sent.values()) < weights  # The logits of a worker's 4 rows are 32 MiB.


def test_one_process_hands_nothing_to_others():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    sent = SentBytes()
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[sent])
    assert sent.in_a_step is None
