"""An update of several steps is that of one device, whose batches are as many times as large."""

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of

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
    "mask": (build_masked, lambda: keras.optimizers.Adam(0.05), "mse", {}),
    "mean by weights": (
        lambda: build("l2"), lambda: keras.optimizers.SGD(0.1), mean_by_weights(),
        {"sample_weight": weights_of_rows()},
    ),
    "sum": (build, lambda: keras.optimizers.SGD(0.01), sum_of_rows(), {}),
    "two outputs": (build_of_two, lambda: keras.optimizers.Adam(0.05), ["mse", "mae"], {}),
    "moving average": (
        build, lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3), "mse", {}
    ),
    "loss scaling": (
        build, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse", {}
    ),
}  # fmt: skip


def trained(model, case, batch_size, epochs=2, **options):
    function, optimizer, loss, given = CASES[case]
    model.compile(optimizer(), loss, metrics=["mae"] if isinstance(loss, str) else None, **options)
    x, y = data(function is build_masked)
    y = [y, -y] if function is build_of_two else y
    fitted = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **fitted, **given).history


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", [1, 3])
def test_it_is_one_step_on_a_larger_batch(in_float64, case, number):
    one, model = seeded(CASES[case][0]), on_replicas(case, number)
    expected, history = trained(one, case, ROWS * STEPS), trained(model, case, ROWS)
    assert apart(model, one) < 1e-9
    if case not in ("mask", "mean by weights", "sum"):  # Whose means are not by rows.
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)  # Metrics are float32.


@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_keras(in_float64, options):
    one, model = seeded(build), on_replicas("SGD", 2)
    trained(one, "SGD", ROWS * STEPS)
    trained(model, "SGD", ROWS, **options)
    assert apart(model, one) < 1e-9


def test_the_optimizer_counts_updates(in_float64):
    model = on_replicas("SGD", 2)
    trained(model, "SGD", ROWS, epochs=1)
    assert int(model.optimizer.iterations) == 4  # Of 3, 3, 3 and 1 of 10 steps.


def test_a_step_is_an_update_where_one_is_asked_for(in_float64):
    one, model = seeded(build), on_replicas("SGD", 2, steps=1)
    trained(one, "SGD", ROWS)
    trained(model, "SGD", ROWS)
    assert apart(model, one) < 1e-9


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


def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(in_float64, tmp_path):
    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 8:
                raise KeyboardInterrupt

    def run(*callbacks):
        model = on_replicas("Adam, clipped", 2)
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        x, y = data()
        options = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, callbacks=list(callbacks), **options).history
        return history, state_of(model)

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(tfparallel.callbacks.Checkpoint(tmp_path, every_steps=2), Interrupts())
    checkpoint = tfparallel.callbacks.Checkpoint(tmp_path, every_steps=2)
    assert_equal(run(checkpoint), whole, rtol=1e-12)
    assert checkpoint.resumed["step"] == 6  # Between two updates.


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
        (OwnStep, "sgd", "mse", "a model with a `train_step` of its own"),
        (build, keras.optimizers.SGD(gradient_accumulation_steps=2), "mse", "accumulates"),
        (build, "sgd", of_the_batch, "may look at several examples"),
        (build_of_two, "sgd", [sum_of_rows(), "mse"], "a loss with reduction='sum' beside others"),
        (build_with_losses, "sgd", sum_of_rows(), "reduction='sum' beside a regularizer"),
        (build_of_two, "sgd", [mean_by_weights(), "mse"], "losses of several outputs with a mask"),
    ],
    ids=["own step", "accumulates", "joins", "sum beside a mean", "sum and losses", "divisors"],
)
def test_what_does_not_add_up_is_refused(function, optimizer, loss, message):
    model = tfparallel.data_parallel(function, devices=["CPU:0", "CPU:1"], sync="accumulate:2")
    model.compile(optimizer, loss)
    x, y = data()
    two = function is build_of_two
    weights = {"sample_weight": [weights_of_rows()] * 2} if two else {}
    with pytest.raises(ValueError, match=message) as caught:
        model.fit(x, [y, y] if two else y, batch_size=8, verbose=0, **weights)
    assert "Take sync='every_step'" in str(caught.value)
