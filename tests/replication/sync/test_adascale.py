"""AdaScale against NumPy on gradients of plain Keras, on any number of devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.comparison import assert_equal, seeded
from tests.replication.sync import test_accumulated_steps as accumulated
from tests.replication.sync.test_accumulated_steps import all_weights_are_large  # noqa: F401
from tfparallel.replication.sync.adascale import Gain
from tfparallel.replication.sync.option import Synchronization

ROWS, STEPS, EPOCHS = accumulated.ROWS, accumulated.STEPS, 3  # Updates of 3, 3, 3 and 1 steps.
RATE, MOMENTUM = 0.125, 0.875  # Of few bits: Keras keeps both in float32, in float64 models too.
FITTED = {"batch_size": ROWS, "epochs": EPOCHS, "shuffle": False, "verbose": 0}


def data(masked=False):
    """Targets that can be learned in part."""
    x, y = accumulated.data(masked)
    return x, y + 0.3 * x[..., None] if masked else y + 2 * x[:, :3]


def cosine():
    return keras.optimizers.schedules.CosineDecay(np.float64(RATE), 60)  # Else float32.


@keras.saving.register_keras_serializable("tests")
class Halves(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of the user's own: of whole steps."""

    def __call__(self, step):
        return tf.constant(RATE, tf.float64) * 0.5 ** tf.cast(step // 8, tf.float64)


def by_hand(build, rate, masked=False, steps=STEPS):
    """Returns the weights, τ and the gain of a run, in NumPy."""
    model, loss = seeded(build), keras.losses.MeanSquaredError()
    x, y = data(masked)
    moved = variance = signal = count = 0
    tau = 0.0
    batches = [slice(start, start + ROWS) for start in range(0, len(x), ROWS)]
    updates = [batches[start : start + steps] for start in range(0, len(batches), steps)]
    for update in EPOCHS * updates:
        gradients = np.array([gradient(model, loss, x[rows], y[rows]) for rows in update])
        divisors = np.array(
            [np.count_nonzero(x[rows]) if masked else len(x[rows]) for rows in update]
        )
        mean = divisors @ gradients / divisors.sum()
        number = len(update)
        if number > 1:
            spread = (divisors @ np.square(gradients - mean).sum(1)) / (number - 1)
            of_step = spread * number / divisors.sum()
            count += 1
            share = max(1 / count, number / 1000)
            variance += share * (of_step - variance)
            signal += share * (mean @ mean - of_step / number - signal)
        noise, clear = max(variance, 0), max(signal, 0)
        gain = (noise + clear) / (noise / number + clear)
        size = rate(np.floor(tau)) if callable(rate) else rate
        moved = MOMENTUM * moved - gain * float(size) * mean
        pieces = np.split(moved, np.cumsum([w.size for w in model.get_weights()])[:-1])
        pairs = zip(model.get_weights(), pieces, strict=True)
        model.set_weights([weight + piece.reshape(weight.shape) for weight, piece in pairs])
        tau += gain
    return model.get_weights(), tau, (noise + clear) / (noise / steps + clear)


def gradient(model, loss, x, y):
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        value = loss(y, outputs)
    gradients = tape.gradient(value, [weight.value for weight in model.trainable_weights])
    return np.concatenate([tf.convert_to_tensor(each).numpy().ravel() for each in gradients])


def parallel(build=accumulated.build, number=2, sync=f"adascale:{STEPS}", **options):
    return tfparallel.data_parallel(
        lambda: seeded(build),
        devices=[f"CPU:{index}" for index in range(number)],
        sync=sync,
        **options,
    )


def trained(model, rate=RATE, masked=False, callbacks=(), **options):
    model.compile(keras.optimizers.SGD(rate, momentum=MOMENTUM), "mse", **options)
    history = model.fit(*data(masked), callbacks=list(callbacks), **FITTED).history
    return history, model.get_weights()


def check(model, expected):
    weights, tau, gain = expected
    for value, by_hand in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(value, by_hand, rtol=1e-9, atol=1e-12)
    assert model.num_scale_invariant_steps == pytest.approx(tau, rel=1e-9)
    assert model.learning_rate_gain == pytest.approx(gain, rel=1e-9)
    assert 1.05 < gain < 2.95 and int(model.optimizer.iterations) == 4 * EPOCHS


@pytest.mark.parametrize("number", [1, 2, 4])
def test_it_is_the_paper_on_any_number_of_devices(in_float64, number):
    model = parallel(number=number)
    trained(model, cosine())
    check(model, by_hand(accumulated.build, cosine()))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [lambda: RATE, Halves], ids=["number", "own schedule"])
def test_any_learning_rate_is_scaled(in_float64, rate):
    model = parallel()
    trained(model, rate())
    check(model, by_hand(accumulated.build, rate()))


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "optimizer", "gradients", "parameters"])
def test_masked_steps_count_by_their_tokens(in_float64, all_weights_are_large, shard):  # noqa: F811
    model = parallel(accumulated.build_masked, 3, shard=shard)
    trained(model, cosine(), masked=True)
    check(model, by_hand(accumulated.build_masked, cosine(), masked=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_keras(in_float64, options):
    model = parallel()
    trained(model, cosine(), **options)
    check(model, by_hand(accumulated.build, cosine()))


@pytest.mark.slow
def test_the_averages_forget_what_was_long_ago(in_float64):
    """The noise is gone after a while; an average of all updates would not tell."""
    random, gain, steps, size = np.random.default_rng(0), Gain(), 50, 40
    variance = signal = 0.0
    for count in range(1, 81):
        deviation = 2.0 if count <= 40 else 0.1
        gradients = 0.2 + deviation * random.normal(size=(steps, size))
        for each in gradients:
            gain.see_step([tf.constant(each)], tf.constant(4.0, tf.float64))
        mean, share = gradients.mean(0), max(1 / count, steps / 1000)
        of_step = np.square(gradients - mean).sum() / (steps - 1)
        variance += share * (of_step - variance)
        signal += share * (mean @ mean - of_step / steps - signal)
        whole = tf.constant(4.0 * steps, tf.float64)
        gain.see_update([tf.constant(mean)], whole, tf.constant(float(steps)), None)
        gain.forget_steps()
    expected = (variance + signal) / (variance / steps + signal)
    assert float(gain.of(steps)) == pytest.approx(expected, rel=1e-9)
    assert 5 < expected < 20 and gain.num_measured == 80


def test_without_noise_it_is_accumulation_bit_for_bit():
    x, y = np.ones((32, 5), "float32"), np.ones((32, 3), "float32")
    models = [parallel(sync=sync) for sync in ("adascale:4", "accumulate:4")]
    for model in models:
        model.compile(keras.optimizers.SGD(cosine(), momentum=MOMENTUM), "mse")
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(one, other)
    assert models[0].learning_rate_gain == 1 and models[0].num_scale_invariant_steps == 4


def test_one_step_is_the_plain_step_bit_for_bit():
    models = [parallel(sync=sync) for sync in ("adascale:1", "every_step")]
    results = [trained(model, cosine()) for model in models]
    assert_equal(*results, rtol=0, atol=0)
    assert models[0].learning_rate_gain == 1 and models[0].num_scale_invariant_steps == 30


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(in_float64, tmp_path, number):
    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 8:
                raise KeyboardInterrupt

    whole = trained(parallel(), cosine())
    with pytest.raises(KeyboardInterrupt):
        checkpoint = tfparallel.callbacks.Checkpoint(tmp_path, every_steps=2)
        trained(parallel(), cosine(), callbacks=[checkpoint, Interrupts()])
    checkpoint = tfparallel.callbacks.Checkpoint(tmp_path, every_steps=2)
    resumed = parallel(number=number)
    assert_equal(trained(resumed, cosine(), callbacks=[checkpoint]), whole, rtol=1e-10)
    assert checkpoint.resumed["step"] == 6  # Between two updates.
    check(resumed, by_hand(accumulated.build, cosine()))


@pytest.mark.slow
def test_a_new_optimizer_starts_anew(in_float64):
    model = parallel()
    trained(model)
    model.set_weights(seeded(accumulated.build).get_weights())
    trained(model, cosine())
    check(model, by_hand(accumulated.build, cosine()))


@pytest.mark.slow
def test_auto_grows_by_the_noise_of_steps_at_the_same_weights(in_float64, tmp_path, capsys):
    def grown(rows, number=2, epochs=3, callbacks=()):
        model = parallel(number=number, sync="adascale:auto")
        model.compile(keras.optimizers.SGD(0.01), "mse")
        options = FITTED | {"batch_size": 8, "epochs": epochs}
        model.fit(*rows(), callbacks=list(callbacks), **options)
        return model

    model = grown(accumulated.noisy)
    assert model.num_accumulated_steps == 8  # Doubled at the end of three epochs.
    assert "adascale:auto: the gradient noise scale is" in capsys.readouterr().err
    assert int(model.optimizer.iterations) == 32 + 16 + 8
    assert 32 + 16 + 8 < model.num_scale_invariant_steps < 3 * 32
    calm = grown(accumulated.clear)
    assert calm.num_accumulated_steps == 1 and calm.learning_rate_gain == 1
    grown(accumulated.noisy, 1, 2, [tfparallel.callbacks.Checkpoint(tmp_path)])
    resumed = grown(accumulated.noisy, 1, 3, [tfparallel.callbacks.Checkpoint(tmp_path)])
    assert accumulated.apart(resumed, model) < 1e-9
    assert resumed.num_scale_invariant_steps == pytest.approx(model.num_scale_invariant_steps)


@pytest.mark.parametrize(
    ("optimizer", "loss", "message"),
    [
        ("adam", "mse", "SGD, whose steps are proportional .* Received: Adam"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "mse",
            "SGD, .* Received: LossScaleOptimizer",
        ),
        ("sgd", accumulated.sum_of_rows(), "means are required. Received: .* reduction='sum'"),
    ],
    ids=["Adam", "loss scale", "sum"],
)
def test_where_the_gain_has_no_meaning_it_is_refused(optimizer, loss, message):
    model = parallel()
    model.compile(optimizer, loss)
    with pytest.raises(ValueError, match=message):
        model.fit(*accumulated.data(), **FITTED)


@pytest.mark.parametrize("spec", ["adascale:4", "adascale:auto"])
def test_it_is_of_whole_replicas_and_prints_as_it_was_asked_for(spec):
    with pytest.raises(ValueError, match="every_step' or 'accumulate:N'. Received: "):
        tfparallel.pipeline_parallel(accumulated.build, ["CPU:0", "CPU:1"], sync=spec)
    assert str(Synchronization.parse(spec)) == spec


@pytest.mark.parametrize("spec", ["adascale", "adascale:0", "adascale:x"])
def test_invalid_numbers_of_steps_raise(spec):
    with pytest.raises(ValueError, match="`sync` must be every_step, .* adascale takes the steps"):
        Synchronization.parse(spec)
