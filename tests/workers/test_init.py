"""Programs as people write them, on two workers: the weights of one process."""

import json
import sys

import keras
import numpy as np
import pytest

from tests.commands.command_line import tfparallel
from tfparallel.replication import init as replication_init

pytestmark = pytest.mark.slow

PROGRAM = """
import sys

import keras
import numpy as np
import tensorflow as tf

import tfparallel
{first}
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(16)
scale = tf.constant(1.0)


def build_model():
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((4,)), dense(8, "relu"), dense(1)])


{model}
model.fit(dataset, epochs=2, verbose=0)
model.save(sys.argv[1])
"""
INIT = "tfparallel.init()"
WRAPPED = 'model = tfparallel.data_parallel(build_model)\nmodel.compile("adam", "mse")'
IN_SCOPE = """
strategy = tfparallel.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = build_model()
    model.compile("adam", "mse")
"""


def run(tmp_path, first, model, *launch):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(first=first, model=model))
    saved = tmp_path / f"{len(launch)}.keras"
    code, shown, errors = tfparallel("launch", *launch, "--", sys.executable, program, saved)
    return code, shown + errors, saved


@pytest.mark.parametrize("model", [WRAPPED, IN_SCOPE], ids=["wrapped", "in scope"])
def test_a_program_that_makes_its_data_first(tmp_path, model):
    first = INIT
    weights = []
    for launch in ([], ["--nproc_per_node=2"]):
        one = WRAPPED if not launch else model
        code, said, saved = run(tmp_path, first, one, *launch)
        assert code == 0, said
        weights.append(keras.models.load_model(saved).get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_what_came_first_is_named_with_its_line(tmp_path):
    code, said, _ = run(tmp_path, "", WRAPPED, "--nproc_per_node=2")
    assert code == 1
    assert "The workers of a job must connect before TensorFlow's runtime starts" in said
    assert f"Received: `dataset`, a data set, created in {tmp_path}/train.py, line 12." in said
    assert "Call `tfparallel.init()` above it" in said


@pytest.mark.parametrize(
    ("first", "model", "message"),
    [
        (f"{INIT}\ntfparallel.init(all_reduce='ring')", WRAPPED, "all_reduce='ring'. Set these"),
        (INIT, WRAPPED.replace("model)", "model, all_reduce='ring')"), "all_reduce='ring' in a"),
        ("tfparallel.init(all_reduce='no')", WRAPPED, "must be one of"),
    ],
)
def test_arguments_that_contradict_are_refused(tmp_path, first, model, message):
    code, said, _ = run(tmp_path, first, model, "--nproc_per_node=2")
    assert code == 1 and message in said, said


def test_a_job_with_servers_has_them_serve(tmp_path):
    model = WRAPPED.replace("model)", 'model, sync="async")')
    launch = ["--nproc_per_node=1", "--num_ps=1"]
    code, said, saved = run(tmp_path, INIT, model, *launch)
    assert code == 0, said
    assert len(keras.models.load_model(saved).get_weights()) == 4


def test_what_a_job_with_servers_has_no_use_for_is_refused(monkeypatch):
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    job = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(job))
    with pytest.raises(ValueError, match=r"do not sum gradients.*: all_reduce='ring'\. Remove"):
        replication_init.init(all_reduce="ring")
