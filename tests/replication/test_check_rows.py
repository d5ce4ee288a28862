"""A model that mixes examples is refused before it trains to other weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfparallel
from tests.parity.cases.rows import AddsLoss, Centred, Constant, Doubled, KeepsState
from tfparallel.replication import replicated_layer

TWO = ["CPU:0", "CPU:1"]
X = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Always(layers.Layer):
    """Draws whatever `training` says, as the sampling layer of a VAE does."""

    def build(self, shape):
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=self.seed_generator)


class Gathered(layers.Layer):
    """Subtracts the mean of the global batch: the way out that the error names."""

    def call(self, x):
        return x - ops.mean(tfparallel.all_gather(x), axis=0)


class GatheredByTensorFlow(layers.Layer):
    """The same, by what TensorFlow tells a replica."""

    how = "gather"

    def call(self, x):
        replica = tf.distribute.get_replica_context()
        if replica is None or not tf.distribute.has_strategy():
            return x - ops.mean(x, axis=0)
        if self.how == "gather":
            return x - ops.mean(replica.all_gather(x, 0), axis=0)
        local_sums = tf.reduce_sum(x, 0), tf.cast(tf.shape(x)[0], x.dtype)
        total, number = replica.all_reduce("sum", local_sums)
        return x - total / number


class SummedByTensorFlow(GatheredByTensorFlow):
    how = "sum"


class ScaledByLargest(layers.Layer):
    def call(self, x):
        return x / tfparallel.all_reduce(ops.max(ops.abs(x)), "max")


class MinusLargest(layers.Layer):
    """Subtracts the largest of the batch, for each feature."""

    def call(self, x):
        largest = ops.max(x, 0)
        is_replica = tf.distribute.has_strategy()
        return x - (tfparallel.all_reduce(largest, "max") if is_replica else largest)


class LargestSum(layers.Layer):
    def call(self, x):
        return x / tfparallel.all_reduce(ops.max(ops.sum(x, 0)), "max")


class ScaledByWeight(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * tfparallel.all_reduce(self.scale)


class CountsWithNumber(layers.Layer):
    """Adds up a number that is no tensor beside a sum of rows."""

    def call(self, x):
        total, number = tfparallel.all_reduce((ops.sum(x, 0), 1.0))
        return x - total / ops.cast(number, x.dtype)


class DropsInFunction(layers.Layer):
    """Its function is traced by the judge, and that trace would be taken in the step."""

    def build(self, shape):
        self.dropout = layers.Dropout(0.5)

    @tf.function
    def call(self, x, training=None):
        return self.dropout(x, training=training)


class AlwaysDropsInFunction(DropsInFunction):
    """Keras traces its function when the model is built, before anybody judges it."""

    @tf.function
    def call(self, x):
        return self.dropout(x, training=True)


class JoinsInFunction(layers.Layer):
    @tf.function
    def call(self, x):
        return x - ops.mean(tfparallel.all_gather(x), axis=0)


class JoinedAlongFeatures(layers.Layer):
    def call(self, x):
        replica = tf.distribute.get_replica_context()
        mean = ops.mean(x, axis=0, keepdims=True)
        if replica is not None and tf.distribute.has_strategy():
            mean = replica.all_gather(mean, axis=1)
        return x / ops.max(mean)


class HiddenByZeros(layers.Layer):
    """Mixes examples in what a weight multiplies that is zero at first."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="zeros", name="scale")

    def call(self, x):
        return x + self.scale * ops.mean(x, axis=0)


class RunningMax(layers.Layer):
    """Divides by the largest value it has met; by one, until there was a larger one."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
        return x / self.largest


class LessRowMean(layers.Layer):
    """Makes small numbers smaller."""

    def call(self, x):
        return (x - ops.mean(x, axis=-1, keepdims=True)) / 4


class TimeMajor(layers.Layer):
    def call(self, x):
        return ops.transpose(x, (1, 0))


def net(*middle, tail=True):
    def build():
        end = [layers.Dense(1)] if tail else []
        return keras.Sequential([keras.Input((4,)), layers.Dense(4), *[m() for m in middle], *end])

    return build


def nested():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), Centred(name="culprit")])
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1)(inner(layers.Dense(4)(inputs))))


def trained(build, **options):
    model = tfparallel.data_parallel(build, devices=TWO, **options)
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=5, verbose=0)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (net(Centred), "layer 'centred.*' of class Centred in .*output 0 .*all_gather"),
        (nested, "layer 'culprit' of class Centred"),
        (net(HiddenByZeros), "class HiddenByZeros"),
        (net(AddsLoss), "class AddsLoss in .*a loss added with `add_loss`"),
        (net(lambda: KeepsState("maximum")), r"class KeepsState in .*variable 'sequential.*/kept'"),
        (net(lambda: layers.Softmax(axis=0)), "of class Softmax"),
        (net(lambda: layers.Softmax(axis=-2)), "of class Softmax"),
        (net(lambda: layers.Dense(3, activation=lambda x: x - ops.max(x, axis=0))), "class Dense"),
        (net(Doubled, tail=False), "class Doubled"),
        (net(Constant, tail=False), "class Constant"),
        (net(TimeMajor, tail=False), "class TimeMajor"),
        (net(LessRowMean, RunningMax), "class RunningMax"),
        (net(lambda: layers.Lambda(lambda x: x - tfparallel.all_reduce(ops.mean(x), "mean"))),
         r"\(line \d+ of test_check_rows.py\) averages over replicas, which may have different"),
        (net(lambda: layers.Lambda(lambda x: x / tfparallel.all_reduce(ops.ones(())))),
         "sums a value over the replicas that is not a sum over the rows"),
        (net(lambda: layers.Lambda(lambda x: x - tfparallel.all_gather(ops.mean(x, 0))[0])),
         "gathers a tensor that does not have a row for each example"),
        (net(DropsInFunction), "class Dropout .*draws inside a `tf.function` of the layer"),
        (net(AlwaysDropsInFunction), "class Dropout .*draws inside a `tf.function`"),
        (net(JoinsInFunction), "is exchanged inside a `tf.function` of the layer"),
        (net(JoinedAlongFeatures), "gathers a tensor that does not have a row for each example"),
        (net(lambda: layers.Lambda(lambda x: x / tfparallel.all_reduce(np.float32(1)))),
         "sums a value over the replicas that is not a sum over the rows"),
        (net(ScaledByWeight), "sums a value over the replicas that is not a sum over the rows"),
        (net(CountsWithNumber), "sums a value over the replicas that is not a sum over the rows"),
        (net(lambda: layers.Lambda(lambda x: x / tfparallel.all_reduce(ops.mean(x), "max"))),
         "takes the maximum of values that are not maxima of a replica's rows"),
        (net(LargestSum), "class LargestSum"),
    ],
    ids=[
        *("mean", "nested", "zeros", "loss", "state", "softmax", "axis -2", "activation"),
        *("double", "constant", "time", "largest", "mean of means", "number", "joined means"),
        *("draw in a function", "always", "exchange in a function", "joined features"),
        *("array", "weight", "number beside a sum", "largest mean", "largest sum"),
    ],
)
def test_a_layer_that_mixes_examples_is_named(build, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        trained(build)


@pytest.mark.slow
@pytest.mark.parametrize(
    "middle", [Gathered, Always, lambda: KeepsState("mean"), layers.BatchNormalization]
)
def test_a_layer_that_does_not_is_trained(middle):
    trained(net(middle))


class Clipped(layers.Layer):
    """Moves a trained weight in each call, as spectral normalization does."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        self.scale.assign(self.scale * 0.9)
        return x * self.scale


class OfEachRow(layers.Layer):
    """Reads a table once for each row, with indices that only the number of rows decides."""

    def build(self, shape):
        self.table = layers.Embedding(3, shape[-1])
        self.table.build(None)

    def call(self, x):
        return x + self.table(ops.zeros((ops.shape(x)[0],), "int32"))


class InGroups(layers.Layer):
    """Works on groups of four examples, and on no other number."""

    def call(self, x):
        groups = ops.reshape(x, (4, -1, x.shape[-1]))
        return ops.reshape(groups - ops.mean(groups, axis=0), (-1, x.shape[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Clipped, OfEachRow])
def test_batches_of_a_known_size_train_as_on_one_device(make, in_float64):
    weights = []
    for devices in (["CPU:0"], TWO, ["CPU:0", "CPU:1", "CPU:2"]):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = tfparallel.data_parallel(net(make), devices=devices)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(np.repeat(X, 4, 0), np.repeat(Y, 4, 0), batch_size=12, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, two, three in zip(*weights, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(three, one, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [GatheredByTensorFlow, SummedByTensorFlow, ScaledByLargest])
@pytest.mark.parametrize(
    ("devices", "batch_size"), [(TWO, 9), ([*TWO, "CPU:2"], 7)], ids=["two", "one without rows"]
)
@pytest.mark.parametrize("eagerly", [False, True])
def test_what_a_layer_exchanges_is_known_to_all(layer, devices, batch_size, eagerly, in_float64):
    def trained(make):
        keras.utils.set_random_seed(1)
        model = make(net(layer))
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
        model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    alone = trained(lambda build: build())
    spread = trained(lambda build: tfparallel.data_parallel(build, devices=devices))
    for one, other in zip(alone, spread, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)


def test_groups_of_examples_are_found_at_another_number_of_rows():
    with pytest.raises(ValueError, match="class InGroups"):
        trained(net(InGroups))


def test_a_refusal_is_repeated():
    model = tfparallel.data_parallel(net(Centred), devices=TWO)
    model.compile("sgd", "mse")
    for _ in range(2):
        with pytest.raises(ValueError, match="class Centred"):
            model.fit(X, Y, batch_size=3, verbose=0)


@pytest.mark.slow
def test_half_precision_is_no_difference():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        hidden = [lambda: layers.Dense(64, activation="relu")] * 6
        trained(net(lambda: KeepsState("mean"), *hidden, lambda: layers.Dense(9, dtype="float32")))
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.slow
def test_a_probe_changes_nothing():
    weights = []
    for check_rows in (True, False):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        mean = net(lambda: KeepsState("mean"), lambda: layers.Dropout(0.5, seed=2))
        weights.append(trained(mean, check_rows=check_rows).get_weights())
    for probed, unprobed in zip(*weights, strict=True):
        np.testing.assert_array_equal(probed, unprobed)


def test_one_may_train_on_all_the_same():
    trained(net(Centred), check_rows=False)


def test_prediction_is_looked_at_too():
    model = tfparallel.data_parallel(net(Centred), devices=TWO)
    with pytest.raises(ValueError, match="class Centred"):
        model.predict(X, verbose=0)


@pytest.mark.slow
def test_plain_code_under_the_strategy_is_looked_at():
    for check_rows in (True, False):
        strategy = tfparallel.MirroredStrategy(TWO)
        strategy.check_rows = check_rows
        with strategy.scope():
            model = net(Centred)()
            model.compile("sgd", "mse")
        if not check_rows:
            model.fit(X, Y, batch_size=5, verbose=0)
            continue
        with pytest.raises(ValueError, match="class Centred"):
            model.fit(X, Y, batch_size=5, verbose=0)


def test_an_eager_step_is_looked_at():
    model = tfparallel.data_parallel(net(Centred), devices=TWO)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="class Centred"):
        model.fit(X, Y, batch_size=5, verbose=0)


class MayCentre(layers.Layer):
    """Mixes examples once somebody has said so."""

    centres = False

    def call(self, x):
        return x - ops.mean(x, axis=0) if self.centres else x


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_layer_that_was_changed_is_looked_at_again(eagerly):
    model = tfparallel.data_parallel(net(MayCentre), devices=TWO)
    model.compile("sgd", "mse", run_eagerly=eagerly)
    model.fit(X, Y, batch_size=5, verbose=0)
    model.layers[1].centres = True
    model.compile("sgd", "mse", run_eagerly=eagerly)
    with pytest.raises(ValueError, match="class MayCentre"):
        model.fit(X, Y, batch_size=5, verbose=0)


@pytest.mark.slow
def test_eager_steps_are_judged_once_a_fit(monkeypatch):
    judged, check_rows = [], replicated_layer.check_rows

    def counted(*args, **kwargs):
        judged.append(1)
        check_rows(*args, **kwargs)

    monkeypatch.setattr(replicated_layer, "check_rows", counted)
    model = tfparallel.data_parallel(net(), devices=TWO)
    model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(2):
        model.fit(X, Y, batch_size=3, epochs=2, verbose=0)
    assert len(judged) == 2


class Keeps(keras.Model):
    """Reads, behind a batch normalization, what its call has kept in an attribute."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm = keras.layers.Dense(4), keras.layers.BatchNormalization()
        self.stored = None

    def call(self, x, training=False):
        self.stored = self.hidden(x)
        return self.norm(self.stored, training=training) + self.stored


@pytest.mark.slow
def test_what_an_eager_call_keeps_is_refused_behind_an_exchange():
    """There each replica runs the call, in turns, and all of them keep it in one attribute."""
    x, y = np.zeros((4, 3)), np.zeros((4, 4))
    model = tfparallel.data_parallel(Keeps, devices=["CPU:0", "CPU:1"])
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="stores a tensor in `self.stored`.*in an eager step"):
        model.fit(x, y, verbose=0)
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_micro_batches_are_looked_at(schedule):
    for check_rows in (True, False):
        model = tfparallel.pipeline_parallel(
            net(Centred), TWO, 2, schedule, balance="memory", check_rows=check_rows
        )
        model.compile("sgd", "mse")
        if not check_rows:
            model.fit(X, Y, batch_size=5, verbose=0)
            continue
        with pytest.raises(ValueError, match="class Centred"):
            model.fit(X, Y, batch_size=5, verbose=0)


@pytest.mark.slow
class Observes(layers.Layer):
    def __init__(self):
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        self.size.update_state(ops.abs(x))
        return x


@pytest.mark.parametrize("make", [lambda: KeepsState("mean"), Observes], ids=["mean", "metric"])
def test_what_has_a_single_copy_is_no_mean_of_the_replicas(make):
    """Story: of a layer that was built before the model, the first replica alone wrote."""
    layer = make()
    layer.build((None, 4))
    with pytest.raises(ValueError, match="variable of which the replicas have no copies"):
        trained(net(lambda: layer))
    trained(net(make))


def test_operations_of_a_functional_model_are_looked_at():
    def residual():
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(1)(ops.tanh(layers.Dense(4)(inputs)) + inputs))

    trained(residual)


@pytest.mark.parametrize("declared", [2, None])
def test_a_constant_with_rows_of_its_own_is_refused(declared):
    """A replica with one row would multiply it by both, and no shape would say so."""

    def build():
        inputs = keras.Input((4,), batch_size=declared)
        return keras.Model(inputs, layers.Dense(1)(inputs) * np.array([[1.0], [3.0]], "float32"))

    model = tfparallel.data_parallel(build, devices=TWO)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Mul .line .* constant that has its own rows"):
        model.fit(X[:2], Y[:2], batch_size=2, verbose=0)


class LessRunningMean(layers.Layer):
    """Moves a mean by that of the batch, and subtracts what has come of it."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - self.mean


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("kind", ["words", "ids"])
def test_rows_of_few_values_may_be_alike_once_but_not_always(kind, num_devices):
    """Five words of which a lookup knows none: each piece of them has the mean of all."""

    def build():
        if kind == "words":
            inputs = keras.Input((1,), dtype="string")
            x = layers.StringLookup(vocabulary=list("pqrs"), output_mode="one_hot")(inputs)
        else:
            inputs = keras.Input((1,), dtype="int32")
            x = layers.CategoryEncoding(4, output_mode="one_hot")(inputs)
        return keras.Model(inputs, layers.Dense(1)(LessRunningMean()(x)))

    devices = ["CPU:0", "CPU:1", "CPU:2"][:num_devices]
    model = tfparallel.data_parallel(build, devices=devices)
    model.compile("sgd", "mse")
    x = tf.constant([["p"], ["q"], ["q"], ["x"]]) if kind == "words" else np.array([[0], [1]] * 2)
    with pytest.raises(ValueError, match="class LessRunningMean"):
        model.fit(x, np.ones((4, 1)), verbose=0)


@pytest.mark.slow
def test_rows_that_tie_share_the_gradient_of_the_largest():
    """Story: the replicas shared it, whatever number of rows each had that tie."""
    x = np.tile([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]], (6, 1)).astype("float32")[:5]
    y = np.linspace(1, 3, 5, dtype="float32")[:, None]  # Whose mean moves the largest.
    weights = []
    for wrap in (lambda build: build(), lambda build: tfparallel.data_parallel(build, devices=TWO)):

        def build():
            dense = layers.Dense(3, kernel_initializer="ones")
            return keras.Sequential([keras.Input((4,)), dense, MinusLargest(), layers.Dense(1)])

        keras.utils.set_random_seed(3)
        model = wrap(build)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
