"""An update of several steps is that of one device, whose batches are as many times as large."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tests.replication.test_sharded_optimizer import apart as weights_apart
from tfparallel.replication import sharding
from tfparallel.replication.sync.noise_scale import NoiseScale

ROWS, STEPS, NUM_EXAMPLES, WORDS = 4, 3, 37, 7  # Steps of 4 rows, the tenth of one.


def build(regularizer=None):
    x = keras.Input((5,))
    hidden = layers.Dense(6, "tanh", kernel_regularizer=regularizer)(x)
    return keras.Model(x, layers.Dense(3)(hidden))


def build_masked():
    x = keras.Input((WORDS,), dtype="int32")
    embedded = layers.Embedding(9, 4, mask_zero=True)(x)
    return keras.Model(x, layers.Dense(3)(layers.LSTM(5, return_sequences=True)(embedded)))


def build_of_two():
    x = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(x)
    return keras.Model(x, [layers.Dense(3, name="a")(hidden), layers.Dense(3, name="b")(hidden)])


def build_with_losses():
    x = keras.Input((5,))
    hidden = layers.Dense(6, "tanh", activity_regularizer="l2")(x)
    return keras.Model(x, layers.Dense(3)(hidden))


def build_normalized():
    return keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(3)])


def build_spectral():
    dense = layers.SpectralNormalization(layers.Dense(3))
    return keras.Sequential([keras.Input((5,)), dense])


def data(masked=False):
    random = np.random.default_rng(0)
    if masked:
        x = random.integers(1, 9, (NUM_EXAMPLES, WORDS))
        for row, words in enumerate(random.integers(1, WORDS + 1, NUM_EXAMPLES)):
            x[row, words:] = 0
        return x, random.normal(size=(NUM_EXAMPLES, WORDS, 3))
    return random.normal(size=(NUM_EXAMPLES, 5)), random.normal(size=(NUM_EXAMPLES, 3))


def weights_of_rows():
    return np.linspace(0.5, 2.0, NUM_EXAMPLES)


def mean_by_weights():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def sum_of_rows():
    return keras.losses.MeanSquaredError(reduction="sum")


CASES = {
    "SGD": (build, lambda: keras.optimizers.SGD(0.1), "mse", {}),
    "Adam, clipped": (build, lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1), "mse", {}),
    "regularizer": (lambda: build("l2"), lambda: keras.optimizers.SGD(0.1, 0.9), "mse", {}),
    "activity": (build_with_losses, lambda: keras.optimizers.SGD(0.1), "mse", {}),
    "mask": (build_masked, lambda: keras.optimizers.SGD(0.1), "mse", {}),
    "mean by weights": (
        lambda: build("l2"), lambda: keras.optimizers.SGD(0.1), mean_by_weights,
        {"sample_weight": weights_of_rows()},
    ),
    "sum": (build, lambda: keras.optimizers.SGD(0.01), sum_of_rows, {}),
    "two outputs": (build_of_two, lambda: keras.optimizers.Adam(0.05), ["mse", "mae"], {}),
    "moving average": (
        build, lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3), "mse", {}
    ),
    "loss scaling": (
        build, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse", {}
    ),
}  # fmt: skip


def trained(model, case, batch_size, epochs=2, **options):
    function, optimizer, loss, fit_options = CASES[case]
    loss = loss() if callable(loss) else loss  # Made now: it has the type of the moment.
    model.compile(optimizer(), loss, metrics=["mae"] if isinstance(loss, str) else None, **options)
    x, y = data(function is build_masked)
    y = [y, -y] if function is build_of_two else y
    fitted = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **fitted, **fit_options).history


def apart(model, other):
    """The largest difference of a variable, relative to the largest magnitude in it."""
    pairs = list(zip(state_of(model), state_of(other), strict=True))
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300) for a, b in pairs)


def on_replicas(case, number, steps=STEPS, **options):
    return tfparallel.data_parallel(
        lambda: seeded(CASES[case][0]),
        devices=[f"CPU:{index}" for index in range(number)],
        sync=f"accumulate:{steps}",
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "number"), [*((case, 3) for case in CASES), ("mask", 1), ("loss scaling", 1)]
)
def test_it_is_one_step_on_a_larger_batch(in_float64, case, number):
    one, model = seeded(CASES[case][0]), on_replicas(case, number)
    expected, history = trained(one, case, ROWS * STEPS), trained(model, case, ROWS)
    assert apart(model, one) < 1e-9
    if case not in ("mask", "mean by weights", "sum"):  # Whose means are not by rows.
        for name in {"loss", "mae"} & set(expected):  # Of an output Keras logs a mean of means.
            np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)


@pytest.fixture
def all_weights_are_large(monkeypatch):
    monkeypatch.setattr(sharding, "_FEWEST", 10)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize(
    ("case", "number"), [*((case, 3) for case in CASES), ("mask", 2), ("mask", 4)]
)
def test_gradients_are_added_up_in_shares(in_float64, all_weights_are_large, case, number, shard):
    one, model = seeded(CASES[case][0]), on_replicas(case, number, shard=shard)
    expected, history = trained(one, case, ROWS * STEPS), trained(model, case, ROWS)
    assert weights_apart(model, one) < 1e-9
    if case not in ("mask", "mean by weights", "sum"):
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_replica_adds_up_its_share(all_weights_are_large):
    """Beside its share: what a regularizer adds is found on the first device."""
    for shard in ("gradients", "parameters"):
        model = on_replicas("regularizer", 3, shard=shard)
        trained(model, "regularizer", ROWS, epochs=1)
        for weight, sums in model._policy._accumulators.values():
            assert [share.device[-5:] for share in sums] == ["CPU:0", "CPU:1", "CPU:2"]
            rows = weight.shape[0] if len(weight.shape) == 2 else weight.shape.num_elements()
            assert {share.shape[0] for share in sums} == {-(-rows // 3)}


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "gradients", "parameters"])
@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_keras(in_float64, all_weights_are_large, options, shard):
    one, model = seeded(build), on_replicas("SGD", 2, shard=shard)
    trained(one, "SGD", ROWS * STEPS)
    trained(model, "SGD", ROWS, **options)
    assert weights_apart(model, one) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "gradients", "parameters"])
def test_rows_of_embeddings_are_added_up_as_keras_does(in_float64, all_weights_are_large, shard):
    """Of a row that several examples read, Adam squares the sum, and not each term."""
    def build():
        x = keras.Input((4,), dtype="int32")
        return keras.Model(x, layers.Dense(3)(layers.Flatten()(layers.Embedding(9, 5)(x))))

    random = np.random.default_rng(0)
    x, y = random.integers(0, 6, (24, 4)), random.normal(size=(24, 3))
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    one = seeded(build)
    one.compile(keras.optimizers.Adam(0.05, gradient_accumulation_steps=3), "mse")
    one.fit(x, y, **options)
    model = tfparallel.data_parallel(
        lambda: seeded(build),
        devices=["CPU:0", "CPU:1", "CPU:2"],
        sync="accumulate:3",
        shard=shard,
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
    model.fit(x, y, **options)
    for weight, expected in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-9)


@pytest.mark.slow
def test_the_optimizer_counts_updates(in_float64):
    model = on_replicas("SGD", 2)
    trained(model, "SGD", ROWS, epochs=1)
    assert int(model.optimizer.iterations) == 4  # Of 3, 3, 3 and 1 of 10 steps.


@pytest.mark.slow
def test_a_step_is_an_update_where_one_is_asked_for(in_float64):
    one, model = seeded(build), on_replicas("SGD", 2, steps=1)
    trained(one, "SGD", ROWS)
    trained(model, "SGD", ROWS)
    assert apart(model, one) < 1e-9


@pytest.mark.slow
def test_dropout_draws_the_masks_of_each_batch(in_float64):
    def with_dropout():
        dropped = [layers.Dropout(0.5, seed=3), layers.Dense(3)]
        return keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), *dropped])

    models = []
    for number in (1, 3):
        model = tfparallel.data_parallel(
            lambda: seeded(with_dropout),
            devices=[f"CPU:{index}" for index in range(number)],
            sync="accumulate:3",
        )
        trained(model, "SGD", ROWS)
        models.append(model)
    assert apart(*models) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "parameters"])
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(
    in_float64, all_weights_are_large, tmp_path, shard
):
    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 8:
                raise KeyboardInterrupt

    def run(*callbacks):
        model = on_replicas("Adam, clipped", 2, shard=shard)
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        x, y = data()
        options = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, callbacks=list(callbacks), **options).history
        return history, model.get_weights()

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(tfparallel.callbacks.Checkpoint(tmp_path, every_steps=2), Interrupts())
    checkpoint = tfparallel.callbacks.Checkpoint(tmp_path, every_steps=2)
    assert_equal(run(checkpoint), whole, rtol=1e-12)
    assert checkpoint.resumed["step"] == 6  # Between two updates.


def noisy(number=256):
    """Targets that nothing explains: a larger batch always pays."""
    random = np.random.default_rng(0)
    return random.normal(size=(number, 5)), random.normal(size=(number, 3))


def clear(number=256):
    """Every example has the same gradient."""
    return np.ones((number, 5)), np.ones((number, 3))


def grown(number, rows, epochs=3, callbacks=(), shard=None):
    model = tfparallel.data_parallel(
        lambda: seeded(build),
        devices=[f"CPU:{index}" for index in range(number)],
        sync="accumulate:auto",
        shard=shard,
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = rows()
    options = {"batch_size": 8, "epochs": epochs, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=list(callbacks), **options)
    return model


@pytest.mark.slow
def test_auto_grows_where_a_larger_batch_pays(in_float64, capsys):
    model = grown(2, noisy)
    assert model.num_accumulated_steps == 8  # Doubled at the end of three epochs.
    assert "each update now accumulates 2 steps instead of 1." in capsys.readouterr().err
    assert int(model.optimizer.iterations) == 32 + 16 + 8
    # Nothing of that depends on how the rows are spread.
    assert apart(model, grown(1, noisy)) < 1e-9
    in_shares = grown(3, noisy, shard="gradients")
    assert in_shares.num_accumulated_steps == 8 and weights_apart(in_shares, model) < 1e-9
    assert grown(2, clear).num_accumulated_steps == 1


@pytest.mark.slow
def test_auto_goes_on_where_it_was(in_float64, tmp_path):
    grown(2, noisy, 2, [tfparallel.callbacks.Checkpoint(tmp_path)])
    model = grown(3, noisy, 3, [tfparallel.callbacks.Checkpoint(tmp_path)])
    assert model.num_accumulated_steps == 8
    assert apart(model, grown(2, noisy)) < 1e-9


def test_the_noise_scale_is_that_of_the_examples(in_float64):
    """Of gradients of B examples with a known mean and variance."""
    random, size, rows = np.random.default_rng(0), 400, 16
    mean, deviation = np.full(size, 0.2), 2.0
    sums = tf.Variable(np.zeros(size))
    noise = NoiseScale()
    for _ in range(400):
        gradient = mean + random.normal(size=size) * deviation / np.sqrt(rows)
        noise.see([sums], [tf.constant(gradient)])
    expected = size * deviation**2 / np.square(mean).sum() / rows
    assert noise.num_pairs == 200 and noise.ratio == pytest.approx(expected, rel=0.1)
    noise.restart()
    assert noise.num_pairs == 0


class Asks(keras.callbacks.Callback):
    """Looks at the model in the middle of an update."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.ask(self.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.get_metrics_result(),
        lambda model: model.predict(data()[0], verbose=0),
        lambda model: model.evaluate(*data(), verbose=0),
        lambda model: model.test_on_batch(*data()),
    ],
    ids=["metrics", "predict", "evaluate", "test_on_batch"],
)
def test_reading_results_between_updates_changes_nothing(in_float64, ask):
    whole, model = on_replicas("SGD", 2), on_replicas("SGD", 2)
    trained(whole, "SGD", ROWS)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    options = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(*data(), callbacks=[Asks(ask)], **options)
    assert apart(model, whole) < 1e-9


def test_a_fit_that_is_interrupted_leaves_nothing_behind(in_float64):
    def interrupt(model):
        raise KeyboardInterrupt

    model = on_replicas("SGD", 2, steps=100)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = state_of(model)[:4]
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data(), batch_size=ROWS, verbose=0, callbacks=[Asks(interrupt)])
    model.get_metrics_result()
    for weight, expected in zip(state_of(model)[:4], before, strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_a_model_with_nothing_to_train_goes_on(in_float64):
    model = on_replicas("SGD", 2)
    model.trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        model.fit(*data(), batch_size=ROWS, verbose=0)


@pytest.mark.slow
def test_sums_of_half_precision_are_kept_in_float32():
    def half():
        policy = keras.mixed_precision.DTypePolicy("bfloat16")
        return keras.Sequential([keras.Input((5,)), layers.Dense(1, use_bias=False, dtype=policy)])

    x, y = np.ones((2048, 5)), np.ones((2048, 1))
    kernels = []
    for rows, sync in ((2, "accumulate:1024"), (2048, "every_step")):
        model = tfparallel.data_parallel(
            lambda: seeded(half), devices=["CPU:0", "CPU:1"], sync=sync
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
        kernels.append(np.asarray(model.get_weights()[0], "float32"))
    np.testing.assert_allclose(*kernels, rtol=0.02, atol=0.01)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
def test_an_optimizer_that_accumulates_in_a_map_is_refused():
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(accumulating))
    model = tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"], sync="accumulate:2")
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="an optimizer with `gradient_accumulation_steps`"):
        model.fit(np.ones((8, 5)), np.ones((8, 3)), verbose=0)


class OwnStep(keras.Model):
    """Whatever it does in a step."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return super().train_step(data)


def of_the_batch(y, outputs):
    return keras.ops.mean((outputs - keras.ops.mean(outputs, 0)) ** 2, -1)


@pytest.mark.parametrize(
    ("function", "optimizer", "loss", "message"),
    [
        (OwnStep, "sgd", "mse", "a model with a custom `train_step`"),
        (build, keras.optimizers.SGD(gradient_accumulation_steps=2), "mse", "accumulation_steps"),
        (build, "sgd", of_the_batch, "might mix examples"),
        (build_of_two, "sgd", [sum_of_rows(), "mse"], "losses with reduction='sum' combined"),
        (build_with_losses, "sgd", sum_of_rows(), "reduction='sum' combined with a regularizer"),
        (build_of_two, "sgd", [mean_by_weights(), "mse"], "several outputs whose losses each have"),
        # These trained to weights of no batch at all.
        (build_normalized, "sgd", "mse", "with the statistics of one step"),
        (build_spectral, "sgd", "mse", "which writes 2 variables when it is called"),
    ],
    ids=[
        "own step", "accumulates", "joins", "sum beside a mean", "sum and losses", "divisors",
        "moments", "state",
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused(function, optimizer, loss, message):
    model = tfparallel.data_parallel(function, devices=["CPU:0", "CPU:1"], sync="accumulate:2")
    model.compile(optimizer, loss)
    x, y = data()
    two = function is build_of_two
    weights = {"sample_weight": [weights_of_rows()] * 2} if two else {}
    with pytest.raises(ValueError, match=message) as caught:
        model.fit(x, [y, y] if two else y, batch_size=8, verbose=0, **weights)
    assert "Use sync='every_step'" in str(caught.value)
