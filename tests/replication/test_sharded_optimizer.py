"""Replicas that each keep a share of the optimizer train as one device does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import tfparallel
from tests.comparison import seeded
from tfparallel.strategies import variables

OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.05, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.05, weight_decay=0.1),
    "RMSprop": lambda: optimizers.RMSprop(0.02, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(0.5),
    "Adamax": lambda: optimizers.Adamax(0.05),
    "Nadam": lambda: optimizers.Nadam(0.05),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lion": lambda: optimizers.Lion(0.01),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.05),
    "global_clipnorm": lambda: optimizers.Adam(0.05, global_clipnorm=0.1),
    "clipnorm": lambda: optimizers.Adam(0.05, clipnorm=0.05),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.02),
    "moving average": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "moving average at the end": lambda: optimizers.Adam(0.05, use_ema=True),
    "loss scaling": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.05)),
    "a schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.9), 0.9),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.05), {".*kernel": optimizers.SGD(0.1, 0.9)})
    ),
    "a loss scale, clipped": lambda: optimizers.SGD(0.1, loss_scale_factor=64.0, clipnorm=0.05),
}
ACCUMULATING = {
    "Adam": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=3),
    "a rest": lambda: optimizers.AdamW(0.05, weight_decay=0.1, gradient_accumulation_steps=5),
    "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=2),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.02, gradient_accumulation_steps=2),
    "global_clipnorm": lambda: optimizers.Adam(
        0.05, global_clipnorm=0.1, gradient_accumulation_steps=3
    ),
    "a loss scale": lambda: optimizers.SGD(
        0.1, loss_scale_factor=64.0, global_clipnorm=0.1, gradient_accumulation_steps=3
    ),
    "moving average": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=3
    ),
    "loss scaling": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=2)
    ),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.Adam(0.05, gradient_accumulation_steps=2),
            {".*kernel": optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=3)},
        )
    ),
}


def build(constraint=None):
    x = keras.Input((5,))
    hidden = layers.Dense(7, "tanh", kernel_constraint=constraint)(x)
    return keras.Model(x, layers.Dense(3)(hidden))  # 35, 7, 21 and 3 elements.


def build_embedding():
    x = keras.Input((4,), dtype="int32")
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(layers.Embedding(9, 5)(x))))


def data(function=build, number=29):
    random = np.random.default_rng(0)
    y = random.normal(size=(number, 3))
    if function is build_embedding:
        return random.integers(0, 6, (number, 4)), y
    return random.normal(size=(number, 5)), y


def on_replicas(number, function=build, **options):
    devices = [f"CPU:{index}" for index in range(number)]
    return tfparallel.data_parallel(
        lambda: seeded(function), devices=devices, shard="optimizer", **options
    )


def trained(model, optimizer, function=build, epochs=3, callbacks=(), **options):
    model.compile(optimizer, "mse", **options)
    if not hasattr(model, "strategy"):  # Keras builds it in each step, which begins anew.
        optimizer.build(model.trainable_variables)
    x, y = data(function)
    model.fit(
        x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


def apart(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(np.abs(a - b).max() / (np.abs(b).max() or 1) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [*OPTIMIZERS.values(), *ACCUMULATING.values()],
    ids=[*OPTIMIZERS, *(f"{name}, of several steps" for name in ACCUMULATING)],
)
def test_it_trains_as_one_device_does(in_float64, make):
    one, model = trained(seeded(build), make()), trained(on_replicas(3), make())
    assert apart(model, one) < 1e-9
    for weight in model.trainable_variables:  # Every copy of it.
        copies = [np.asarray(copy) for copy in variables.copies(weight)]
        assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_keras(in_float64, options):
    one = trained(seeded(build), optimizers.Adam(0.05))
    model = trained(on_replicas(2), optimizers.Adam(0.05), **options)
    assert apart(model, one) < 1e-9


@pytest.mark.slow
def test_embeddings_and_constraints(in_float64):
    one = trained(seeded(build_embedding), optimizers.Adam(0.05), build_embedding)
    model = trained(on_replicas(3, build_embedding), optimizers.Adam(0.05), build_embedding)
    assert apart(model, one) < 1e-9

    def constrained():
        return build(keras.constraints.UnitNorm(axis=0))

    one = trained(seeded(constrained), optimizers.Adam(0.05))
    assert apart(trained(on_replicas(3, constrained), optimizers.Adam(0.05)), one) < 1e-9


@pytest.mark.slow
def test_weights_that_others_write_count(in_float64):
    class Writes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.set_weights([weight / 2 for weight in self.model.get_weights()])

    one = trained(seeded(build), optimizers.Adam(0.05), callbacks=[Writes()])
    model = trained(on_replicas(2), optimizers.Adam(0.05), callbacks=[Writes()])
    assert apart(model, one) < 1e-9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_moving_averages_are_of_weights_that_others_write_too(in_float64):
    class Book(keras.Model):
        """A weight that no gradient reaches, and a callback writes."""

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def build(self, shape):
            self.code = self.add_weight(shape=(4,), initializer="ones", name="code")
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    class Writes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.code.assign(np.full(4, 8.0))

    def book():
        model = Book()
        model.build((None, 5))
        return model

    models = []
    for model in (seeded(book), on_replicas(2, book)):
        optimizer = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
        models.append(trained(model, optimizer, callbacks=[Writes()]))
    assert apart(*models) < 1e-9


def test_averages_in_shares_are_not_swapped():
    model = on_replicas(2)
    model.compile(optimizers.SGD(0.1, use_ema=True), "mse")
    with pytest.raises(ValueError, match="SwapEMAWeights with `shard`"):
        model.fit(*data(), callbacks=[keras.callbacks.SwapEMAWeights()], verbose=0)


@pytest.mark.slow
def test_an_optimizer_may_be_built_twice(in_float64):
    one, model = seeded(build), on_replicas(2)
    optimizer = optimizers.Adam(0.05)
    model.compile(optimizer, "mse")
    for _ in range(2):
        optimizer.build(model.trainable_variables)
    model.fit(*data(), batch_size=8, epochs=3, shuffle=False, verbose=0)
    assert apart(model, trained(one, optimizers.Adam(0.05))) < 1e-9


@pytest.mark.slow
def test_decay_leaves_out_what_it_is_told_to(in_float64):
    models = []
    for model in (seeded(build), on_replicas(2)):
        optimizer = optimizers.AdamW(0.05, weight_decay=0.3)
        optimizer.exclude_from_weight_decay(model.trainable_variables[:1], ["bias"])
        models.append(trained(model, optimizer))
    assert apart(*models) < 1e-9


@pytest.mark.parametrize("name", ["last", "^kernel", "first/kernel:0"])
def test_decay_leaves_out_names_as_one_device_has_them(in_float64, name):
    """Story: a share is called `kernel:0`, so the name of its layer was not found."""

    def named():
        x = keras.Input((5,))
        return keras.Model(x, layers.Dense(3, name="last")(layers.Dense(7, name="first")(x)))

    models = []
    for model in (seeded(named), on_replicas(2, named)):
        optimizer = optimizers.AdamW(0.05, weight_decay=0.3)
        optimizer.exclude_from_weight_decay(var_names=[name])
        models.append(trained(model, optimizer, epochs=1))
    assert apart(*models) < 1e-9


@pytest.mark.slow
def test_accumulated_steps(in_float64):
    one = seeded(build)
    one.compile(optimizers.Adam(0.05), "mse")
    x, y = data()
    one.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    model = trained(on_replicas(2, sync="accumulate:2"), optimizers.Adam(0.05))
    assert apart(model, one) < 1e-9


def test_gradients_may_be_arrays():
    """As plain Keras takes them."""
    model = trained(on_replicas(2), optimizers.SGD(0.5), epochs=1)
    ones = [np.ones(weight.shape, weight.dtype) for weight in model.trainable_variables]
    for as_given in (np.asarray, np.ndarray.tolist, tf.constant):
        before = model.get_weights()
        model.optimizer.apply(list(map(as_given, ones)), model.trainable_variables)
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_allclose(new, old - 0.5, rtol=1e-5)


@pytest.mark.slow
def test_a_replica_holds_its_share_of_the_slots():
    def larger():
        return keras.Sequential([keras.Input((5,)), layers.Dense(400), layers.Dense(3)])

    model = trained(on_replicas(4, larger), optimizers.Adam(0.05, gradient_accumulation_steps=2))
    slots = [v for v in model.optimizer.variables if hasattr(v, "_sharded")]
    whole = 3 * sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    for device in range(4):
        num_elements = sum(variables.copies(slot)[device].shape.num_elements() for slot in slots)
        assert 0.25 <= num_elements / whole < 0.35  # The kernel of the first layer has five rows.


@pytest.mark.slow
def test_a_file_holds_whole_slots_and_is_read_anywhere(in_float64, tmp_path):
    whole = trained(seeded(build), optimizers.Adam(0.05), epochs=2)
    first = trained(on_replicas(2), optimizers.Adam(0.05), epochs=1)
    first.save(tmp_path / "first.keras")
    plain = keras.saving.load_model(tmp_path / "first.keras")
    x, y = data()
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert apart(plain, whole) < 1e-9
    checkpoint = tmp_path / "checkpoint"
    trained(
        on_replicas(3),
        optimizers.Adam(0.05),
        epochs=1,
        callbacks=[tfparallel.callbacks.Checkpoint(checkpoint)],
    )
    resumed = tfparallel.callbacks.Checkpoint(checkpoint)
    model = trained(on_replicas(4), optimizers.Adam(0.05), epochs=2, callbacks=[resumed])
    assert resumed.resumed["epoch"] == 1 and apart(model, whole) < 1e-9
    # And with whole slots on every replica.
    trained(
        on_replicas(3),
        optimizers.Adam(0.05),
        epochs=1,
        callbacks=[tfparallel.callbacks.Checkpoint(tmp_path / "another")],
    )
    model = tfparallel.data_parallel(lambda: seeded(build), devices=["CPU:0", "CPU:1"])
    resumed = tfparallel.callbacks.Checkpoint(tmp_path / "another")
    trained(model, optimizers.Adam(0.05), epochs=2, callbacks=[resumed])
    assert apart(model, whole) < 1e-9


@pytest.mark.slow
def test_what_was_accumulated_goes_on(in_float64, tmp_path):
    """Three epochs of four steps, in updates of five: files are written between two of them."""
    make = ACCUMULATING["a rest"]
    whole = trained(seeded(build), make())
    checkpoint = tfparallel.callbacks.Checkpoint(tmp_path / "checkpoint")
    first = trained(on_replicas(3), make(), epochs=1, callbacks=[checkpoint])
    first.save(tmp_path / "first.keras")
    plain = keras.saving.load_model(tmp_path / "first.keras")
    plain.fit(*data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert apart(plain, whole) < 1e-9
    resumed = tfparallel.callbacks.Checkpoint(tmp_path / "checkpoint")
    assert apart(trained(on_replicas(4), make(), callbacks=[resumed]), whole) < 1e-9
    assert resumed.resumed["epoch"] == 1


@pytest.mark.slow
def test_a_model_that_was_trained_goes_on(in_float64):
    whole = trained(seeded(build), optimizers.Adam(0.05), epochs=2)
    first = trained(seeded(build), optimizers.Adam(0.05), epochs=1)
    model = tfparallel.data_parallel(first, devices=["CPU:0", "CPU:1"], shard="optimizer")
    x, y = data()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert apart(model, whole) < 1e-9


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: optimizers.Lamb(0.1), "Received: Lamb, which uses whole weights"),
        (lambda: optimizers.Muon(0.1), "Received: Muon"),
    ],
    ids=["Lamb", "Muon"],
)
def test_what_needs_whole_weights_is_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        on_replicas(2).compile(optimizer(), "mse")


def test_local_steps_need_the_whole_optimizer():
    with pytest.raises(ValueError, match="Received: shard='optimizer', sync='local_sgd:8'"):
        on_replicas(2, sync="local_sgd:8")


def test_gradients_are_shared_out_where_they_are_added_up():
    with pytest.raises(ValueError, match="Received: shard='gradients', sync='every_step'"):
        tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"], shard="gradients")


def test_on_one_device_there_is_nothing_to_share():
    model = on_replicas(1)
    assert type(trained(model, optimizers.Adam(0.05)).optimizer) is optimizers.Adam
