"""The algorithm that is named sums the gradients in training, and no other."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.collectives import algorithm_selection, profile

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


@pytest.fixture(autouse=True)
def own_profiles(tmp_path, monkeypatch):
    monkeypatch.setenv("TFPARALLEL_PROFILES", str(tmp_path))


def build_model():
    words = keras.Input((4,), dtype="int32")
    numbers = keras.Input((6,))
    # A sparse gradient beside dense ones.
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(words))
    joined = keras.layers.Concatenate()([rows, numbers])
    hidden = keras.layers.Dense(5, "tanh")(joined)
    return keras.Model([words, numbers], keras.layers.Dense(2)(hidden))


def data():
    random = np.random.default_rng(0)
    x = [random.integers(0, 9, (22, 4)), random.standard_normal((22, 6), np.float32)]
    return x, random.standard_normal((22, 2), np.float32)


def trained(make_model, **options):
    keras.utils.set_random_seed(3)
    model = make_model()
    model.compile(keras.optimizers.Adam(0.01, **options), "mse")
    # The last batch has 6 rows.
    model.fit(*data(), batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"global_clipnorm": 0.1}, {"gradient_accumulation_steps": 2}], ids=str
)
def test_weights_are_those_of_one_device(options):
    plain = trained(build_model, **options)
    names = ["ring"] if options else ["double_binary_tree", "tf_ring"]
    for name in names:
        strategy = tfparallel.MirroredStrategy(DEVICES, all_reduce=name)
        ours = trained(lambda s=strategy: tfparallel.data_parallel(build_model, s), **options)
        for one, other in zip(plain.weights, ours.weights, strict=True):
            # Sums in another order, and Adam's division by their square root.
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)


def traced_step(model):
    x, y = data()
    specs = tf.nest.map_structure(lambda a: tf.TensorSpec((8, *a.shape[1:]), a.dtype), (x, y))
    with model.strategy.program():
        step = tf.function(lambda *batch: model.train_step(batch), autograph=False)
        return step.get_concrete_function(*specs).graph


def additions(graph):
    return [op.device[-5:] for op in graph.get_operations() if op.type == "AddN"]


def origins(op, types):
    """The operations of these types that an operation is computed from, the nearest."""
    operations, waiting = set(), [op]
    while waiting:
        for tensor in waiting.pop().inputs:
            if tensor.op.type in types:
                operations.add(tensor.op)
            else:
                waiting.append(tensor.op)
    return operations


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clipnorm": 0.1}], ids=str)
def test_each_device_adds_its_blocks_and_updates_with_its_own_sum(options):
    strategy = tfparallel.MirroredStrategy(DEVICES, all_reduce="ring")
    model = tfparallel.data_parallel(build_model, strategy)
    model.compile(keras.optimizers.SGD(0.01, **options), "mse")
    graph = traced_step(model)
    # Each of the three ranks adds a block in each of the n−1 steps.
    for device in DEVICES:
        assert additions(graph).count(device) >= 2
    updates = [op for op in graph.get_operations() if op.type == "AssignSubVariableOp"]
    dense = [op for op in updates if origins(op, {"ConcatV2"})]
    assert len(dense) == 3 * 4
    for op in dense:
        # The blocks are put together where the copy of the variable is.
        joined = [o for o in origins(op, {"ConcatV2"}) if o.inputs[0].shape.rank == 1]
        assert joined and {o.device[-5:] for o in joined} == {op.device[-5:]}


@pytest.mark.slow
def test_auto_measures_once_and_says_why():
    model = trained(lambda: tfparallel.data_parallel(build_model, devices=DEVICES,
                                                     all_reduce="auto"))  # fmt: skip
    report = algorithm_selection.all_reduce_report(model)
    assert report["source"] == "calibration" and report["algorithm"] in report["microseconds"]
    assert "4 tensors on 3 devices" in report["why"]
    assert algorithm_selection.all_reduce_report(trained(build_model)) is None


def test_a_profile_decides_and_another_machines_is_an_error():
    times = {
        "tf_reduce_to_one": [(100, 2e-3), (10000, 2e-3)],
        "tree": [(100, 1e-3), (10000, 4e-3)],
    }
    path = profile.save(DEVICES, times)
    loaded = profile.load(DEVICES)
    small, large = [(25, tf.float32)], [(2500, tf.float32)]
    assert algorithm_selection.choose(DEVICES, small, loaded).algorithm == "tree"
    choice = algorithm_selection.choose(DEVICES, large, loaded)
    assert choice.algorithm == "tf_reduce_to_one" and choice.source == "profile"
    # By a straight line of logarithms, half-way: 1 ms and 4 ms give 2 ms. A tie is the default's.
    assert (
        algorithm_selection.choose(DEVICES, [(250, tf.float32)], loaded).algorithm
        == "tf_reduce_to_one"
    )
    content = json.loads(path.read_text())
    content["key"]["host"] = "elsewhere"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="measured elsewhere.*host 'elsewhere' instead of.*delete"):
        tfparallel.MirroredStrategy(DEVICES, all_reduce="auto")
    assert profile.load(DEVICES[:2]) is None


def test_without_a_profile_and_without_measuring_it_is_the_default():
    choice = algorithm_selection.choose(DEVICES, [(10, tf.float32)], None, calibrate=False)
    assert (choice.algorithm, choice.source) == ("tf_reduce_to_one", "default")


@pytest.mark.slow
def test_a_loop_refuses_what_cannot_run_in_it():
    strategy = tfparallel.MirroredStrategy(DEVICES, all_reduce="tf_ring")
    model = tfparallel.data_parallel(build_model, strategy)
    with pytest.raises(ValueError, match="steps_per_execution=2, all_reduce='tf_ring'. Use"):
        model.compile("sgd", "mse", steps_per_execution=2)
    strategy = tfparallel.MirroredStrategy(DEVICES, all_reduce="hierarchical")
    model = tfparallel.data_parallel(build_model, strategy)
    model.compile("sgd", "mse", steps_per_execution=2)
    model.fit(*data(), batch_size=8, verbose=0)


def test_mistakes():
    with pytest.raises(ValueError, match="It must be one of .*ring.*Received: gloo"):
        tfparallel.MirroredStrategy(DEVICES, all_reduce="gloo")
    with pytest.raises(ValueError, match="Received: gloo"):
        tfparallel.data_parallel(build_model, devices=["CPU:0"], all_reduce="gloo")
    with pytest.raises(ValueError, match="pass only one of them"):
        ops = tf.distribute.ReductionToOneDevice()
        tfparallel.MirroredStrategy(DEVICES, cross_device_ops=ops, all_reduce="ring")
    strategy = tfparallel.MirroredStrategy(DEVICES)
    with pytest.raises(ValueError, match="defines its devices.*all_reduce='ring'"):
        tfparallel.data_parallel(build_model, strategy, all_reduce="ring")
