"""Updates of several steps, and in shares, on several workers, against plain Keras."""

import pytest

from tests.parts import parts_asked_for

from .jobs import ROOT, run_workers

PROGRAM = ROOT / "tests/workers/updates.py"

DRAWS = """
import keras
import numpy as np
import tensorflow as tf
import tfparallel

class Noisy(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        noise = tf.random.normal(gradient.shape, seed=7)
        super().update_step(gradient + noise, variable, learning_rate)

def main():
    tfparallel.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(5)
    weights = []
    for sync in ("every_step", "accumulate:2"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model = tfparallel.data_parallel(model, sync=sync)
        model.compile(Noisy(0.1), "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
        weights += [weight.tolist() for weight in model.get_weights()]
    return weights
"""

pytestmark = pytest.mark.slow


@pytest.fixture(name="job", scope="module")
def run_job(request, tmp_path_factory):
    """What each worker found, by the part of the program."""
    arguments = [str(tmp_path_factory.mktemp("checkpoints")), parts_asked_for(request)]
    return run_workers(PROGRAM, 2, 2, arguments, timeout_seconds=600)


@pytest.mark.part("larger batch")
@pytest.mark.parametrize("model", ["dense", "masked"])
def test_it_is_one_step_on_a_larger_batch(job, model):
    """With a last batch of one row, of which a worker has none."""
    for seen in job:
        results = seen["larger batch"][model]
        assert results["weights"] < 1e-9 and results["between workers"] == 0
        assert results.get("history", 0) < 1e-5  # Metrics are float32.


@pytest.mark.part("options")
@pytest.mark.parametrize("option", ["jit_compile", "evaluates"])
def test_options_of_keras(job, option):
    """A callback may evaluate in the middle of an epoch, too."""
    assert all(seen["options"][option] < 1e-12 for seen in job)


@pytest.mark.part("unread inputs")
@pytest.mark.parametrize("data", ["whole batches", "by_sample"])
@pytest.mark.parametrize("sync", ["every_step", "accumulate:2", "local_sgd:1"])
def test_inputs_that_the_model_does_not_read_are_not_cut(job, data, sync):
    """A scalar, and a table of other rows whose name sorts before that of the rows."""
    assert all(seen["unread inputs"][f"{data}, {sync}"] < 1e-9 for seen in job)


@pytest.mark.part("logs of outputs")
@pytest.mark.parametrize("case", ["fit", "with test_on_batch"])
def test_the_loss_of_each_output_is_logged_over_all_rows(job, case):
    assert all(seen["logs of outputs"][case] < 1e-5 for seen in job)  # Metrics are float32.


@pytest.mark.part("dropout")
def test_dropout_draws_the_masks_of_each_batch(job):
    assert all(seen["dropout"] < 1e-9 for seen in job)


@pytest.mark.part("adascale")
def test_adascale_measures_the_rows_of_all_workers(job):
    for seen in job:
        results = seen["adascale"]
        assert 1.05 < results["gain"] < 2.95 and results["between workers"] == 0
        for shard in (None, "gradients"):
            assert results[f"weights, {shard}"] < 1e-9 and results[f"steps, {shard}"] < 1e-9
        assert results["history"] < 1e-5  # Metrics are float32.
        assert "Received: compression='bf16'. Use sync='every_step'" in results["compressed"]


@pytest.mark.part("loss scaling")
def test_loss_scaling_sees_whole_gradients(job):
    assert all(seen["loss scaling"] < 1e-9 for seen in job)


@pytest.mark.part("sums")
def test_little_is_sent(job):
    assert job[0]["sums"]["accumulate:4"] < 0.3 * job[0]["sums"]["every_step"]


@pytest.mark.part("resumed")
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(job):
    for seen in job:
        assert seen["resumed"]["step"] == 3  # A sum of gradients is in no file.
        assert seen["resumed"]["weights"] < 1e-12 and seen["resumed"]["history"] < 1e-6


@pytest.mark.part("compressed")
def test_what_is_sent_may_be_compressed(job):
    assert all(0 < seen["compressed"] < 0.1 for seen in job)


@pytest.mark.part("refused")
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("normalized", "batch normalization, with the statistics of one step"),
        ("state", "which writes 1 variables when it is called"),
        ("stops", "TerminateOnNaN, which would stop some workers but not others"),
    ],
)
def test_what_follows_from_the_rows_of_all_workers_is_refused(job, case, message):
    said = job[0]["refused"][case]
    assert message in said and "Use sync='every_step'" in said


@pytest.mark.part("refused")
def test_workers_that_shuffle_otherwise_are_told(job):
    assert all("different batches" in seen["refused"]["others' batches"] for seen in job)


@pytest.mark.part("shares")
def test_each_replica_may_keep_its_share_of_the_optimizer(job):
    for seen in job:
        results = seen["shares"]
        assert results["weights"] < 1e-9
        # Half a sum for gradients, half of one for weights, and what fills up such small shares.
        assert results["sent"]["shares"] < 1.5 * results["sent"]["whole"]
        # Two slots an element, on four replicas; the first kernel has five rows.
        assert 2 * results["elements"] / 4 <= results["held"] < 0.75 * results["elements"]


@pytest.mark.part("shares")
@pytest.mark.parametrize(("shard", "num_cuts"), [("optimizer", 4), ("parameters", 2)])
def test_shares_are_cut_only_for_the_devices_of_a_worker(job, shard, num_cuts):
    """Two devices: whole weights are cut for each, gradients of a kernel and a bias split once."""
    expected = {"Pack": 0, "Pad": 0, "Split": 2, "SplitV": 0, "StridedSlice": num_cuts}
    for seen in job:
        assert seen["shares"]["added"][shard] == expected


@pytest.mark.part("parameters")
@pytest.mark.parametrize(
    "case", ["clipnorm", "loss scale", "global_clipnorm", "file", "resumed"]
)
def test_each_replica_may_keep_its_share_of_the_weights(job, case):
    assert all(seen["parameters"][case] < 1e-9 for seen in job)


@pytest.mark.part("parameters")
def test_what_is_logged_of_an_epoch_that_was_resumed_is_the_same_on_all_workers(job):
    """Story: all but the chief forgot what the metrics had seen before the checkpoint."""
    assert all(seen["parameters"]["history"] < 1e-5 for seen in job)  # Metrics are float32.


@pytest.mark.part("parameters")
def test_shares_of_weights_are_told_from_one_workers_own(job):
    for seen in job:
        num_held, elements = seen["parameters"]["held"]
        assert elements / 4 <= num_held < 0.5 * elements  # The first kernel has five rows.
        assert "The workers hold different weights" in seen["parameters"]["loaded by one"]
        assert "Use Checkpoint" in seen["parameters"]["backup"]
        assert "could not be written" in seen["parameters"]["disk"]


@pytest.mark.part("parameters")
def test_a_file_that_all_want_is_written_by_the_chief(job):
    """The canary of `seams/saving.py`: Keras's walk over a model is that of its file."""
    for worker, seen in enumerate(job):
        for has_written, difference in seen["parameters"]["writers"]:
            assert has_written is (worker == 0)
            assert difference < 1e-9


@pytest.mark.part("parameters")
def test_a_save_by_one_worker_does_not_wait_for_ever(job):
    said = [seen["parameters"]["saved by one"] for seen in job]
    assert all("all workers must save together" in each for each in said)
    assert "worker 0 arrived, worker 1 did not" in said[0] and "arrived too late" in said[1]


@pytest.mark.part("clipped shares")
@pytest.mark.parametrize("clipping", ["clipnorm", "clipvalue", "global_clipnorm"])
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_gradients_are_clipped_in_shares_too(job, clipping, shard):
    """Those of a table that a batch reads rows of, too."""
    assert all(seen["clipped shares"][f"{shard}, {clipping}"] < 1e-12 for seen in job)


@pytest.mark.part("accumulated shares")
def test_gradients_of_several_steps_are_added_up_in_shares(job):
    for seen in job:
        results = dict(seen["accumulated shares"])
        num_held, elements = results.pop("held")
        assert elements / 4 <= num_held < 0.5 * elements  # Small weights are filled up.
        assert results.pop("history") < 1e-5  # Metrics are float32.
        assert results.pop("rows") == [57]
        # Gradients are sent in each step, weights with an update alone: (1 + 1/3) / 2.
        assert results.pop("sent") < 0.8
        assert len(results) == 12 and max(results.values()) < 1e-9


@pytest.mark.part("shares that go on")
@pytest.mark.parametrize(
    "case",
    ["accumulated", "resumed", "backed up", "restored", "called twice", "compiled by its function"],
)
def test_shares_go_on_as_the_whole_does(job, case):
    assert all(seen["shares that go on"][case] < 1e-9 for seen in job)


def test_an_update_that_draws_is_the_same_on_all_workers():
    first, second = run_workers(DRAWS, 2)
    assert first == second


APART = """
import keras
import numpy as np
import tensorflow as tf
import tfparallel

class Noise(keras.layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x), seed=4)

def main():
    tfparallel.MultiWorkerMirroredStrategy()
    seen = []

    def loss(y, outputs):
        tf.py_function(lambda x: seen.extend(x.numpy().ravel().tolist()), [outputs], [])
        return keras.ops.mean(keras.ops.square(y - outputs), -1)

    keras.utils.set_random_seed(5)
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((1,)), Noise(), keras.layers.Rescaling(1.0)]),
        sync="accumulate:2",
    )
    model.compile("sgd", loss)
    model.fit(np.zeros((8, 1)), np.zeros((8, 1)), batch_size=4, verbose=0)
    return seen
"""


def test_workers_that_are_apart_draw_other_numbers_by_a_seed_of_tensorflows():
    first, second = map(set, run_workers(APART, 2))
    assert first and second and not (first & second) - {0.0}
