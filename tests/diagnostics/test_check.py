"""A check passes what is exact, names what draws, and fails what is wrong."""

import dataclasses
import functools
import json
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.planted_faults import FAULTS
from tfparallel.data.batches import first_batches
from tfparallel.diagnostics.check import check_parity, uneven_first
from tfparallel.diagnostics.layers import first_difference


def make_same(build):
    return build()


def data_parallel_on(num_replicas):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return functools.partial(tfparallel.data_parallel, devices=devices)


def build(*middle, activation="relu"):
    def build_model():
        layers = [layer() for layer in middle]
        hidden = keras.layers.Dense(8, activation=activation, name="hidden")
        return keras.Sequential(
            [keras.Input((4,)), hidden, *layers, keras.layers.Dense(2, name="last")]
        )

    return build_model


def compile_model(model, learning_rate=0.01):
    model.compile(optimizer=keras.optimizers.Adam(learning_rate), loss="mse", metrics=["mae"])


def some_batches(num_batches=4):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(23, 4)), generator.normal(size=(23, 2))
    return first_batches((x, y), global_batch_size=7, seed=0, num_batches=num_batches)


def check(build_model, make_parallel_model, batches=None, compile_model=compile_model):
    return check_parity(
        build_model,
        compile_model,
        some_batches() if batches is None else batches,
        make_parallel_model=make_parallel_model,
    )


@pytest.mark.slow
def test_the_same_model_is_exact():
    report = check(build(), make_same)
    assert report.verdict == "match" and report.passed and report.first_difference is None
    assert {item.verdict for item in (*report.variables, *report.values)} == {"match"}
    assert report.batch_sizes == (7, 7, 7, 2)
    paths = [item.path for item in report.variables]
    assert sum("momentum" in path for path in paths) == 4 and "adam/iteration" in paths
    names = [item.name for item in report.values]
    assert names == ["fit: loss", "fit: mae", "evaluate: loss", "evaluate: mae"]
    assert json.loads(json.dumps(report.to_json()))["variables"][0]["shape"] == [4, 8]


@pytest.mark.slow
def test_data_parallel_is_exact():
    report = check(build(), data_parallel_on(3))
    assert report.verdict == "match", report


def wrong_in(name):
    """A form under which one layer computes something else."""

    def make(build_model):
        model = build_model()
        layer = model.get_layer(name)
        layer.call = lambda x, call=layer.call, **_: call(x) * 1.01
        return model

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hidden", "last"])
def test_a_layer_that_computes_something_else_is_named(name):
    report = check(build(), wrong_in(name))
    assert report.verdict == "differs" and not report.passed
    assert report.first_difference.startswith(f"layer '{name}': its output differs")


def build_chaotic():
    """Plain SGD at a rate far too high: each step multiplies rounding by two."""
    hidden = [keras.layers.Dense(16, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(2)])


def compile_chaotic(model):
    model.compile(keras.optimizers.SGD(3.0, momentum=0.9, clipnorm=1.0), loss="mse")


def check_chaotic(make_parallel_model):
    batches = uneven_first(some_batches(16))
    return check(build_chaotic, make_parallel_model, batches, compile_chaotic)


@pytest.mark.slow
def test_a_network_that_amplifies_rounding_is_no_false_alarm():
    """Its weights end far from those of one device, and so they do after a move by one unit."""
    report = check_chaotic(data_parallel_on(2))
    assert report.verdict == "match" and report.passed, str(report)
    assert [item.step for item in report.steps] == [1, 2, 4, 8, 16]
    first, last = report.steps[0], report.steps[-1]
    assert last.difference > report.tolerance and last.floor > report.tolerance
    assert first.floor < 1e-5 and report.sharp_until in (4, 8)
    assert 1.5 < report.growth < 6
    shown = str(report)
    assert f"sharp up to step {report.sharp_until} of 16" in shown
    assert "this model amplifies rounding error by" in shown


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_a_network_that_amplifies_rounding(fault):
    report = check_chaotic(FAULTS[fault](["CPU:0", "CPU:1"]))
    assert report.verdict == "differs" and not report.passed
    assert {item.first_step for item in report.variables if item.verdict == "differs"} >= {1}


@pytest.mark.slow
def test_a_fault_that_strikes_late_is_found_where_the_floor_is_low():
    """The first batch is like any other, then; the seventh step is wrong."""

    def make(build_model):
        model = tfparallel.data_parallel(build_model, devices=["CPU:0", "CPU:1"])
        train_step = model.train_step

        def step_seven_twice(data):
            logs = train_step(data)
            weight, count = model.trainable_variables[0], model.optimizer.iterations
            weight.assign(tf.where(tf.equal(count, 7), 1.02 * weight, weight))
            return logs

        model.train_step = step_seven_twice
        return model

    report = check_chaotic(make)
    assert report.verdict == "differs"
    assert {item.first_step for item in report.variables if item.verdict == "differs"} == {8}


@pytest.mark.slow
def test_an_accumulation_that_ends_in_the_middle_of_a_cycle_is_compared_as_the_sum_of_its_copies():
    def compile_accumulating(model):
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
        model.compile(optimizer, loss="mse")

    report = check(build(), data_parallel_on(2), compile_model=compile_accumulating)
    assert report.verdict == "match", str(report)
    accumulators = [item for item in report.variables if "accumul" in item.path]
    assert len(accumulators) == 4 and {item.verdict for item in accumulators} == {"match"}


def test_the_first_batch_is_shortened_to_a_prime_number():
    batches = uneven_first(some_batches())
    assert [len(x) for x, _ in batches] == [3, 7, 7, 2]
    whole = [(np.zeros((100, 1)), {"y": np.zeros(100)})]
    assert len(uneven_first(whole)[0][1]["y"]) == 47
    three = [(np.zeros((3, 1)), np.zeros(3))]
    assert uneven_first(three) is three


def encoder(name):
    """A model within a model; all of them name their layers alike."""
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(4, name="dense")(x) + x, name=name)


def build_nested():
    inner = keras.Sequential([encoder("first"), keras.layers.ReLU(name="relu"), encoder("second")])
    inner.name = "inner"
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(2, name="last")(inner(x)))


@pytest.mark.slow
def test_a_layer_of_a_model_within_a_model_is_named():
    def make(build_model):
        model = build_model()
        inner = model.get_layer("inner") if "inner" in [y.name for y in model.layers] else model
        wrong = inner.layers[-1] if inner is not model else model.get_layer("inner_second_dense")
        call = wrong.call
        wrong.call = lambda x, **_: call(x) * 1.01
        return model

    report = check(build_nested, make)
    assert report.verdict == "differs"
    assert report.first_difference.startswith("layer 'inner/second/dense': its output differs")
    assert not any("search" in note for note in report.notes)


def test_the_layers_of_a_model_within_a_model_agree_in_a_form_that_is_exact():
    """The search runs under the form, and finds nothing to name."""

    def build_model():
        keras.utils.set_random_seed(0)
        return build_nested()

    assert first_difference(build_model, data_parallel_on(2), some_batches()[0], 1e-4) is None


class Outputs(keras.layers.Layer):
    """Numbers of a type, moved by so much in every second model that is built."""

    num_built = 0

    def __init__(self, dtype, moved):
        super().__init__()
        Outputs.num_built += 1
        self.type, self.moved = dtype, moved * (Outputs.num_built % 2)

    def call(self, inputs):
        return tf.cast(tf.ones_like(inputs) * 1e6 + self.moved, self.type)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, self.type)


@pytest.mark.parametrize(
    ("dtype", "moved", "is_named"),
    [("int32", 1.0, True), ("float32", 1.0, False), ("complex64", 1.0, False)],
)
def test_whole_numbers_must_be_equal_and_others_nearly(dtype, moved, is_named):
    """One of a million: rounding, unless whole numbers are counted."""
    Outputs.num_built = 0

    def build_model():
        inputs = keras.Input((2,))
        return keras.Model(inputs, Outputs(dtype, moved)(inputs))

    arrays = (np.ones((2, 2), "float32"),)
    difference = first_difference(build_model, lambda build: build(), arrays, 1e-4)
    assert (difference is not None) is is_named


@pytest.mark.slow
def test_another_learning_rate_is_found_though_all_outputs_agree():
    """Nothing but the update differs: the outputs on the first batch cannot tell."""
    rates = iter([0.01, 0.02])

    def compile_differently(model):
        # The check compiles the single model first, then the parallel one.
        compile_model(model, next(rates, 0.01))

    report = check(build(), make_same, compile_model=compile_differently)
    assert report.verdict == "differs"
    differing = [item.path for item in report.variables if item.verdict == "differs"]
    assert "adam/learning_rate" in differing and any("kernel" in path for path in differing)


@pytest.mark.slow
def test_a_skipped_step_is_found_in_the_optimizer():
    """A form that drops the last batch leaves another count of iterations."""

    def make(build_model):
        model = build_model()
        fit = model.fit
        model.fit = lambda data, **kwargs: fit(
            data.take(3).apply(tf.data.experimental.assert_cardinality(3)), **kwargs
        )
        return model

    report = check(build(), make)
    by_path = {item.path: item for item in report.variables}
    assert by_path["adam/iteration"].verdict == "differs"
    assert by_path["adam/iteration"].absolute == 1.0


class Sampled(keras.layers.Layer):
    """Draws, with no rate and no `training` by which to turn it off."""

    def __init__(self):
        super().__init__(name="sampled")
        self.generator = keras.random.SeedGenerator(0)

    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.generator)


def reseeded(build_model):
    """A form that draws other numbers, the same ones in every run."""
    model = build_model()
    for variable in model.variables:
        if variable.path.endswith("seed_generator_state"):
            variable.assign([99, 0])
    return model


@pytest.mark.slow
def test_other_draws_are_reproducible_and_the_layers_named():
    middle = functools.partial(keras.layers.Dropout, 0.5, name="drop")
    report = check(build(middle), reseeded)
    assert report.verdict == "reproducible" and report.passed
    assert report.random_layers == ("drop",)
    assert {item.verdict for item in report.variables} == {"match", "reproducible"}


@pytest.mark.slow
def test_draws_that_no_seed_repeats_differ():
    calls = iter(range(100))

    def make(build_model):
        model = build_model()
        for variable in model.variables:
            if variable.path.endswith("seed_generator_state"):
                variable.assign([next(calls), 1])
        return model

    middle = functools.partial(keras.layers.Dropout, 0.5)
    report = check(build(middle), make)
    assert report.verdict == "differs"
    assert any("the same seed give different weights" in note for note in report.notes)


@pytest.mark.slow
def test_draws_that_cannot_be_turned_off_prove_nothing():
    report = check(build(Sampled), reseeded)
    assert report.verdict == "differs" and report.random_layers == ("sampled",)


@pytest.mark.slow
def test_wrong_sums_are_not_excused_by_dropout():
    middle = functools.partial(keras.layers.Dropout, 0.5)
    report = check(build(middle), wrong_in("hidden"))
    assert report.verdict == "differs"
    assert report.first_difference.startswith("layer 'hidden'")


def shift_bias(build_model, by=1e-4):
    """A form whose rounding is another in a bias that has no true gradient."""
    model = build_model()
    train_step = model.train_step

    def shifted(data):
        result = train_step(data)
        bias = model.get_layer("hidden").bias
        if bias.trainable:
            bias.assign_add(tf.fill(bias.shape, tf.cast(by, bias.dtype)))
        return result

    model.train_step = shifted
    return model


@pytest.mark.slow
def test_a_variable_without_gradient_is_undetermined():
    report = check(build(keras.layers.BatchNormalization, activation=None), shift_bias)
    verdicts = {item.path.partition("/")[2]: item.verdict for item in report.variables}
    assert verdicts["hidden/bias"] == "undetermined"
    assert verdicts["hidden/kernel"] == "match"
    assert report.verdict == "match" and report.passed
    assert any("hidden/bias" in note for note in report.notes)


class TwoOptimizers(keras.Model):
    """A step of its own, with an optimizer for each half of its weights."""

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.first, self.second = keras.optimizers.Adam(), keras.optimizers.SGD(0.1)

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - tf.cast(y, x.dtype)))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.first.apply(gradients[:2], weights[:2])
        self.second.apply_gradients(zip(gradients[2:], weights[2:], strict=True))
        return {"loss": loss}


@pytest.mark.slow
def test_a_variable_without_gradient_in_a_step_of_the_users_own():
    plain = build(keras.layers.BatchNormalization, activation=None)

    def make():
        model = plain()
        return TwoOptimizers(model.inputs, model.outputs)

    report = check(make, shift_bias, compile_model=lambda model: model.compile(loss="mse"))
    verdicts = {item.path.partition("/")[2]: item.verdict for item in report.variables}
    assert verdicts["hidden/bias"] == "undetermined"
    assert verdicts["hidden/kernel"] == "match"


@pytest.mark.slow
def test_the_same_shift_of_a_variable_with_a_gradient_differs():
    report = check(build(), shift_bias)
    assert report.verdict == "differs"


@pytest.mark.slow
def test_nan_fails_and_names_the_step():
    batches = some_batches()
    batches[2][0][0, 0] = np.nan
    # No ReLU: it turns NaN into 0.
    report = check(build(activation=None), make_same, batches=batches)
    assert report.verdict == "differs"
    assert any("not finite from step 3 on" in note for note in report.notes)


@pytest.mark.slow
def test_the_search_is_no_part_of_the_verdict():
    """A model that cannot be probed still gets its verdict, and says why no layer is named."""

    class Subclassed(keras.Model):
        def __init__(self, scale=1.0):
            super().__init__()
            self.dense, self.scale = keras.layers.Dense(2), scale

        def call(self, x):
            return self.dense(x) * self.scale

    def make(build_model):
        model = build_model()
        model.scale = 1.01
        return model

    report = check(Subclassed, make)
    assert report.verdict == "differs" and report.first_difference


@pytest.mark.slow
def test_a_form_that_loses_weights_is_an_error():
    with pytest.raises(ValueError, match="must have the same weights, in the same order"):
        check(build(), lambda _: build(keras.layers.BatchNormalization)())


@pytest.mark.slow
def test_a_model_that_its_first_batch_builds():
    """Story: `train` took it, and `check` refused: it built the replicas outside of their scope."""

    def build_model():
        return keras.Sequential([keras.layers.Dense(2, name="last")])

    report = check(build_model, data_parallel_on(2), batches=some_batches(2))
    assert report.verdict == "match", report


def test_no_batches():
    with pytest.raises(ValueError, match="At least one batch"):
        check(build(), make_same, batches=[])


@pytest.mark.slow
def test_a_match_says_to_how_many_digits():
    exact = check(build(), make_same, batches=some_batches(2))
    near = dataclasses.replace(
        exact,
        dtype="float64",
        steps=(
            dataclasses.replace(exact.steps[0], step=1, difference=3e-14, floor=1e-13),
            dataclasses.replace(exact.steps[0], step=20, difference=2e-7, floor=9e-6),
        ),
    )
    assert "OK: match: identical (" in str(exact) and exact.to_json()["digits"] == (6, 6)
    assert "match: identical" in str(exact).splitlines()[3], "a variable"
    verdict = "OK: match: 13 digits after step 1, 6 after step 20, where rounding alone leaves 5 ("
    assert verdict in str(near) and near.to_json()["digits"] == (13, 6)
    assert dataclasses.replace(near, verdict="reproducible").digits is None
    later = dataclasses.replace(near, steps=(exact.steps[0], near.steps[1]))
    assert "OK: match: identical after step 1, 6 digits after step 20 (" in str(later)


@pytest.mark.slow
def test_it_holds_back_what_tensorflow_says_of_its_many_trainings():
    """Story: "5 out of the last 9 calls … triggered tf.function retracing", twice in a check."""
    messages, logger = [], tf.get_logger()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    text = "5 out of the last 9 calls to f triggered tf.function retracing."

    def make_model(build):
        logger.warning(text)
        logger.warning("another")
        return build()

    logger.addHandler(handler)
    try:
        check(build(), make_model, batches=some_batches(1))
        assert set(messages) == {"another"}
        logger.warning(text)
        assert messages[-1] == text, "afterwards it is told again"
    finally:
        logger.removeHandler(handler)


@pytest.mark.slow
def test_reports_are_frozen():
    report = check(build(), make_same, batches=some_batches(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.verdict = "match"
