"""What each worker of `test_data.py` runs: its own examples, or those of all, or the wrong ones."""

import contextlib
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tfparallel


def texts(worker):
    """Batches of padded token rows: other sizes, numbers and lengths on each worker."""
    generator = np.random.default_rng(worker)
    shapes = [[(4, 6), (4, 9), (3, 5)], [(3, 8), (2, 4)]][worker]
    batches = []
    for rows, length in shapes:
        tokens = generator.integers(1, 20, size=(rows, length))
        tokens[0, length // 2 :] = 0  # Padding.
        batches.append((tokens, generator.normal(size=(rows, 1))))
    return batches


def joined():
    """The same, as one device would be given it: each step's batches one after the other."""
    first, second = texts(0), texts(1)
    steps = []
    for index, (tokens, y) in enumerate(first):
        others = second[index] if index < len(second) else (tokens[:0], y[:0])
        length = max(tokens.shape[1], others[0].shape[1])
        rows = [np.pad(t, [(0, 0), (0, length - t.shape[1])]) for t in (tokens, others[0])]
        steps.append((np.concatenate(rows), np.concatenate([y, others[1]])))
    return steps


def dataset(batches):
    signature = (tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None, 1], tf.float64))
    unsized = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return unsized.apply(tf.data.experimental.assert_cardinality(len(batches)))


def of_the_batch(y, outputs):
    """A loss that compares examples, so that the outputs of all rows meet."""
    each = keras.ops.mean((y - outputs) ** 2, -1)
    return each * (1 + keras.ops.mean(each))


def build(loss="mse"):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int64"),
            keras.layers.Embedding(20, 4, mask_zero=True),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.GlobalAveragePooling1D(),  # Of the tokens that are no padding.
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), loss, metrics=["mae"])
    return model


def by_sample(strategy, loss="mse"):
    """Trains on shares of unequal size, and on one device on what they amount to."""
    keras.utils.set_random_seed(7)
    alone = build(loss)
    expected = alone.fit(dataset(joined()), epochs=3, shuffle=False, verbose=0).history
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = build(loss)
    local_batches = tfparallel.data.by_sample(dataset(texts(tfparallel.worker_index())))
    sent = tfparallel.callbacks.SentBytes()
    seen = model.fit(local_batches, epochs=3, shuffle=False, verbose=0, callbacks=[sent]).history
    weights = zip(model.get_weights(), alone.get_weights(), strict=True)
    evaluated = np.subtract(
        model.evaluate(local_batches, verbose=0), alone.evaluate(dataset(joined()), verbose=0)
    )
    return {
        "weights": max(float(np.abs(a - b).max()) for a, b in weights),
        "history": max(float(np.abs(np.subtract(seen[k], expected[k])).max()) for k in expected),
        "evaluate": float(np.abs(evaluated).max()),
        "rows sent": sent.in_a_step["rows"],
    } | predictions(model, local_batches, alone.predict(dataset(joined()), verbose=0))


def predictions(model, local_batches, expected):
    """What each worker gets, by where it was to go: what is off by how much, or nothing."""

    def received(gather_to, worker=None):
        predicted = model.predict(local_batches, verbose=0, gather_to=gather_to)
        rows = slice(None) if worker is None else _rows_of(worker)
        return None if predicted is None else float(np.abs(predicted - expected[rows]).max())

    return {
        "all": received("all"),
        "chief": received("chief"),
        "own": received(None, tfparallel.worker_index()),
        "chief again": received("chief"),
    }


def _rows_of(worker):
    """Which rows of `joined()` a worker brought."""
    sizes = np.array([[4, 3], [4, 2], [3, 0]])  # As `texts` has them, by step and worker.
    return np.repeat(np.tile([0, 1], len(sizes)), sizes.ravel()) == worker


def refused(strategy, change):
    """Trains a model on arrays, with something that is another on worker 1."""
    other = tfparallel.worker_index() == 1
    x, y = np.arange(24.0).reshape(12, 2), np.ones((12, 1))
    if other and change == "order":
        x = x[::-1].copy()
    if other and change == "length":
        x, y = x[:10], y[:10]
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        momentum = 0.9 if other and change == "optimizer" else 0.0
        model.compile(keras.optimizers.SGD(0.1, momentum), "mse")
    batch_size = 6 if other and change == "batch size" else 4
    try:
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    except RuntimeError as error:
        return str(error)
    return "trained"


CHANGES = ("order", "length", "batch size", "optimizer", "nothing")


def refused_without_training(strategy):
    """Evaluates and predicts other batches on worker 1, and what is a sample partition no more."""
    x, y = np.arange(24.0).reshape(12, 2), np.ones((12, 1))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    if tfparallel.worker_index() == 1:
        x = x[::-1].copy()
    local_batches = tfparallel.data.by_sample(tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    calls = {
        "evaluate": lambda: model.evaluate(x, y, batch_size=4, verbose=0),
        "predict": lambda: model.predict(x, batch_size=4, verbose=0),
        "mapped": lambda: model.evaluate(local_batches.map(lambda x, y: (x + 1, y)), verbose=0),
    }
    said = {}
    for name, call in calls.items():
        try:
            said[name] = str(call())
        except RuntimeError as error:
            said[name] = str(error)
    said["not mapped"] = model.evaluate(local_batches, verbose=0)
    return said


class SeveralRows(keras.Model):
    """Has three rows for each example, and a step of its own that reads their order."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(6, activation="tanh")
        self.out = keras.layers.Dense(2)

    def call(self, x):
        return self.out(keras.ops.reshape(self.inner(x), (-1, 2)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            errors = tf.reduce_sum((outputs - tf.repeat(y, 3, axis=0)) ** 2, -1)
            loss = tf.reduce_mean(errors * tf.cast(tf.range(tf.shape(errors)[0]), errors.dtype))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def several_rows(strategy):
    """Trains and predicts batches of 6 and of 3 rows, of which one of 4 replicas has none."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(9, 4)), random.normal(size=(9, 1))
    results = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(7)
        with scope:
            model = SeveralRows()
            model.build((None, 4))
            model.compile(keras.optimizers.SGD(0.05))
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
        results.append([*model.get_weights(), model.predict(x, batch_size=6, verbose=0)])
    expected, actual = results
    at_chief = model.predict(x, batch_size=6, verbose=0, gather_to="chief")
    errors = [float(np.abs(a - b).max()) for a, b in zip(actual, expected, strict=True)]
    if at_chief is not None:
        errors.append(float(np.abs(at_chief - expected[-1]).max()))
    return {"rows": len(actual[-1]), "error": max(errors)}


def saved(strategy, folder):
    """Every worker saves to the same paths, without a guard."""
    with strategy.scope():
        model = build()
    folder = pathlib.Path(folder)
    worker = tfparallel.worker_index()
    model.save(folder / "shared.keras")
    model.save_weights(folder / "shared.weights.h5")
    model.save(folder / f"own_{worker}.keras")
    tfparallel.barrier()
    return sorted(path.name for path in folder.iterdir())


def main(folder):
    keras.config.set_floatx("float64")
    strategy = tfparallel.MultiWorkerMirroredStrategy()
    seen = {"by_sample": by_sample(strategy), "joined": by_sample(strategy, of_the_batch)}
    seen["several rows"] = several_rows(strategy)
    seen["saved"] = saved(strategy, folder)
    seen |= {change: refused(strategy, change) for change in CHANGES}
    seen["without training"] = refused_without_training(strategy)
    try:
        batches = dataset(texts(0))
        tfparallel.data.by_sample(batches.repeat() if tfparallel.worker_index() == 1 else batches)
    except ValueError as error:
        seen["infinite"] = str(error)
    return seen
