"""A worker's program for test_hybrid.py: replicas of two devices each, a replica a worker."""

import contextlib
import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel.replication import sharding
from tfparallel.variables.sharded import ShardedVariable

NUM_EXAMPLES = 23
SAVED = ("stages", "shares", "shares of parts", "shares of weights")


def network(normalizes=False):
    """Dropout, an activity regularizer, a regularized weight."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    x = layers.Dense(8, name="first", kernel_regularizer="l2")(inputs)
    x = layers.Dropout(0.3, name="drop")(x)
    if normalizes:
        x = layers.BatchNormalization(name="normalize", momentum=0.8)(x)
    x = layers.Dense(8, activation="relu", name="second", activity_regularizer="l1")(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="out")(x))


def text():
    """A mask that decides the divisor, and sparse gradients, with a dense one beside."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((None,), dtype="int32")
    read = layers.Embedding(9, 4, mask_zero=True, embeddings_regularizer="l2", name="embed")
    x = read(inputs)
    x = layers.Dense(6, activation="tanh", name="between")(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="out")(x))


class Counted(layers.Layer):
    """Has a metric of its rows, which is in the logs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean(name="mean_of_rows")

    def call(self, x):
        self.mean.update_state(x)
        return x


def counted():
    keras.utils.set_random_seed(3)
    head = layers.Dense(3, activation="softmax", name="out")
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, name="first"), Counted(), head])


def data(build):
    generator = np.random.default_rng(0)
    if build is not text:
        return generator.normal(size=(NUM_EXAMPLES, 6)), np.arange(NUM_EXAMPLES) % 3
    x = generator.integers(1, 9, size=(NUM_EXAMPLES, 7))
    x[np.arange(7) >= generator.integers(1, 8, size=(NUM_EXAMPLES, 1))] = 0
    return x.astype("int32"), generator.integers(0, 3, size=x.shape)


def compares(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(y_pred, 0)))


def cases():
    """By name: what builds the model, axes, options, the optimizer, the loss, the metrics."""
    adam = lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5)  # noqa: E731
    sgd = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    cross = "sparse_categorical_crossentropy"
    pipeline, tensor = {"pipeline": 2}, {"tensor": 2}
    return {
        "stages": (network, pipeline, {}, adam, cross, ["accuracy"]),
        "parts": (network, tensor, {}, adam, cross, ["accuracy"]),
        "a layout map": (network, tensor, {}, adam, cross, ["accuracy"]),
        "a mask, sparse gradients": (text, pipeline, {}, sgd, cross, ["accuracy"]),
        "shares": (network, pipeline, {"shard": "optimizer"}, adam, cross, ["accuracy"]),
        "shares of parts": (network, tensor, {"shard": "optimizer"}, adam, cross, []),
        "shares of weights": (text, pipeline, {"shard": "parameters"}, adam, cross, ["accuracy"]),
        "a metric in a layer": (counted, pipeline, {}, "sgd", cross, []),
        "several batches": (text, pipeline, {"sync": "accumulate:3"}, "sgd", cross, ["accuracy"]),
        "joined outputs": (network, pipeline, {"schedule": "gpipe"}, adam, compares, ["accuracy"]),
        "deferred": (
            lambda: network(normalizes=True),
            pipeline,
            {"batch_normalization": "deferred"},
            adam,
            cross,
            [],
        ),
    }


def of_one_worker(mesh):
    """Keras's description of the devices of one of two workers."""
    shape = (mesh.data // 2, mesh.tensor)
    names = [f"cpu:{k}" for k in range(mesh.size // 2)]
    layouts = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh(shape, ["batch", "model"], names)
    )
    layouts["first/kernel"], layouts["out/kernel"] = (None, "model"), ("model", None)
    return keras.distribution.ModelParallel(layout_map=layouts)


def train(model, build, optimizer, loss, metrics, batch_size=10):
    """Batches of 10, 10 and 3: the last has fewer examples than there are pieces."""
    x, y = data(build)
    optimizer = keras.optimizers.SGD(0.1) if optimizer == "sgd" else optimizer()
    model.compile(optimizer, loss, weighted_metrics=metrics)
    keras.utils.set_random_seed(5)
    history = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": [value for values in history.values() for value in values],
        "evaluated": np.ravel(model.evaluate(x, y, batch_size=10, verbose=0)).tolist(),
        "predicted": np.ravel(model.predict(x, verbose=0)).tolist(),
        "weights": [float(v) for w in model.get_weights() for v in np.ravel(w)],
    }


def difference(actual, expected):
    pairs = zip(actual, expected, strict=True)
    return max(float(np.max(np.abs(np.array(a) - np.array(b)))) for a, b in pairs)


class Interrupts(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def resumed(folder, undisturbed):
    """How far a run that goes on from a checkpoint ends from the one that `cases` has trained."""
    build, axes, options, optimizer, loss, _ = cases()["shares"]
    mesh = tfparallel.Mesh(data=int(os.environ["NUM_REPLICAS"]), **axes)
    for interrupted in (True, False):
        model = tfparallel.hybrid_parallel(
            build, mesh, num_micro_batches=2, balance="memory", **options
        )
        model.compile(optimizer(), loss)
        keras.utils.set_random_seed(5)
        callbacks = [tfparallel.callbacks.Checkpoint(os.path.join(folder, "checkpoints"))]
        callbacks += [Interrupts()] * interrupted
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(
                *data(build),
                batch_size=10,
                epochs=2,
                shuffle=False,
                verbose=0,
                callbacks=callbacks,
            )
    return difference(model.get_weights(), undisturbed.get_weights())


def drawn():
    """Predictions that `tf.random` draws, by one seed on all workers."""

    def build():
        draw = layers.Lambda(lambda x: 0 * x + tf.random.normal(tf.shape(x), seed=4, dtype=x.dtype))
        return keras.Sequential([keras.Input((2,)), draw, layers.Rescaling(1.0)])

    keras.utils.set_random_seed(5)
    mesh = tfparallel.Mesh(data=int(os.environ["NUM_REPLICAS"]), pipeline=2)
    model = tfparallel.hybrid_parallel(build, mesh, num_micro_batches=1, balance="memory")
    return model.predict(np.ones((8, 2)), verbose=0).tolist()


def main(folder, names):
    from tfparallel.pipeline.batch_norm import grouped

    keras.config.set_floatx("float64")
    sharding._FEWEST = 20
    seen, sent, models = {}, {}, {}
    for name, (build, axes, options, *compiled) in cases().items():
        if names and name not in names:
            continue
        mesh = tfparallel.Mesh(data=int(os.environ["NUM_REPLICAS"]), **axes)
        how = {"num_micro_batches": 2, "balance": "memory", **options}
        if name == "a layout map":
            models[name] = tfparallel.distribute(build, of_one_worker(mesh), **how)
        else:
            models[name] = tfparallel.hybrid_parallel(build, mesh, **how)
        pieces = 2 * mesh.data
        single = grouped(build, pieces)() if "batch_normalization" in options else build()
        rows = NUM_EXAMPLES if "sync" in options else 10
        expected = train(single, build, *compiled, batch_size=rows)
        before = models[name].strategy.workers.traffic.read()["sums"]
        actual = train(models[name], build, *compiled)
        sent[name] = models[name].strategy.workers.traffic.read()["sums"] - before
        seen[name] = {
            what: float(np.max(np.abs(np.array(actual[what]) - np.array(expected[what]))))
            # Of a loss with a mask Keras's mean over the epoch depends on the batches.
            for what in expected
            if what != "history" or "sync" not in options
        }
    weights = models["shares of weights"].weights
    assert sum(isinstance(weight, ShardedVariable) for weight in weights) == 2
    first, slots = models["stages"], {}
    for name in [name for name in models if name in SAVED]:
        path = os.path.join(folder, f"{name}.keras")
        models[name].save(path)
        loaded = keras.models.load_model(path)
        seen[name]["saved"] = difference(loaded.get_weights(), models[name].get_weights())
        slots[name] = [variable.numpy() for variable in loaded.optimizer.variables]
        if name != "shares of weights":  # Of another model.
            seen[name]["slots"] = difference(slots[name], slots["stages"])
    if "shares" in models:
        seen["shares"]["resumed"] = resumed(folder, models["shares"])
    return {
        "apart": seen,
        "sent": sent,
        "drawn": drawn(),
        "layout": str(first.layout).splitlines(),
    }
