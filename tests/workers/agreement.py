"""What each worker of `test_agreement.py` runs: programs in which the workers come apart."""

import os
import time

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.data.batches import evaluation_batches

NUM_EXAMPLES, BATCH = 21, 4  # The last batch has a row: one of two workers has none.
_random = np.random.default_rng(0)
X = _random.normal(size=(NUM_EXAMPLES, 4)) + 3
Y = _random.normal(size=(NUM_EXAMPLES, 1))


def build(*layers):
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])


def parallel(*layers, **options):
    model = tfparallel.data_parallel(lambda: build(*layers), **options)
    model.compile("sgd", "mse")
    return model


def fit(model, x=X, y=Y, epochs=2, **options):
    return model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


def is_chief():
    return tfparallel.worker_index() == 0


# --- What the workers are told of -------------------------------------------------------------


def weights_of_the_chief_alone():
    model = parallel()
    if is_chief():
        model.set_weights([2 * values for values in model.get_weights()])
    fit(model)


def weights_drawn_apart():
    model = parallel()
    model.set_weights([np.random.default_rng().normal(size=w.shape) for w in model.get_weights()])
    fit(model)


def a_learning_rate_of_the_chief_alone():
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))
    fit(parallel(), callbacks=[schedule] if is_chief() else [])


def a_learning_rate_in_the_last_epoch():
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))
    fit(parallel(), epochs=1, callbacks=[schedule] if is_chief() else [])


def a_draw_of_the_chief_alone():
    dropout = keras.layers.Dropout(0.5, seed=7)
    model = parallel(dropout)
    if is_chief():
        model.layers[0](X, training=True)
    fit(model)


def own_rows(rows):
    return rows[tfparallel.worker_index() :: 2]


def rows_of_their_own_in_train_on_batch():
    model = parallel()
    model.train_on_batch(X[:8], Y[:8])
    model.train_on_batch(own_rows(X), own_rows(Y))


def rows_of_their_own_in_predict_on_batch():
    parallel().predict_on_batch(own_rows(X[:8]))


def rows_of_their_own_under_local_sgd():
    fit(parallel(sync="local_sgd:2"), own_rows(X[:16]), own_rows(Y[:16]))


class Batches(keras.utils.PyDataset):
    """Batches of which the order is another one in each epoch."""

    def __init__(self, random):
        super().__init__()
        self.random, self.order = random, np.arange(NUM_EXAMPLES)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = self.order[8 * index : 8 * index + 8]
        return X[rows], Y[rows]


def another_order_in_the_second_epoch():
    data = Batches(np.random.default_rng(tfparallel.worker_index()))
    reorder = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: data.random.shuffle(data.order)
    )
    parallel().fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[reorder])


def other_rows_to_validate_on():
    x = X + tfparallel.worker_index()
    fit(parallel(), validation_data=evaluation_batches((x, Y), 8))


class StopsInAnEpoch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if is_chief() and batch == 3:
            self.model.stop_training = True


def a_stop_within_an_epoch():
    model = parallel(sync="accumulate:3")
    model.fit(X[:20], Y[:20], batch_size=4, verbose=0, shuffle=False, callbacks=[StopsInAnEpoch()])


def loaded_by_the_chief():
    model = parallel()
    if is_chief():
        model.set_weights([2 * values for values in model.get_weights()])
    return model


def loaded_by_the_chief_and_asked_twice():
    model = loaded_by_the_chief()
    for _ in range(2):
        try:
            model.test_on_batch(X, Y)
        except RuntimeError:
            pass
    model.test_on_batch(X, Y)


def a_row_of_the_chief_alone():
    """Of 10,000 of them, near zero."""
    embedding = keras.layers.Embedding(10_000, 2)
    model = parallel(embedding, keras.layers.Flatten())
    if is_chief():
        (table,) = embedding.get_weights()
        table[7] = 0
        embedding.set_weights([table])
    fit(model, x=np.ones_like(X))


def class_weights_of_their_own():
    rows = tf.data.Dataset.from_tensor_slices((own_rows(X), own_rows(Y) > 0)).batch(4)
    weights = {0: 1.0, 1: 1.0 + tfparallel.worker_index()}
    parallel().fit(tfparallel.data.by_sample(rows), class_weight=weights, verbose=0)


def words_in_another_order():
    words = ["a", "b"] if is_chief() else ["b", "a"]

    def build_lookup():
        lookup = keras.layers.StringLookup(vocabulary=words, output_mode="one_hot")
        return keras.Sequential([keras.Input((1,), dtype="string"), lookup, keras.layers.Dense(1)])

    keras.utils.set_random_seed(3)
    model = tfparallel.data_parallel(build_lookup)
    model.compile("sgd", "mse")
    fit(model, x=tf.constant([["a"], ["b"], ["c"]] * 7))


def another_loss():
    model = parallel()
    model.compile("sgd", "mse" if is_chief() else "mae")
    fit(model)


def an_error_that_one_worker_caught():
    def fails(epoch, logs):
        raise KeyError("mine")

    model = parallel()
    try:
        fails_here = keras.callbacks.LambdaCallback(on_epoch_end=fails)
        fit(model, callbacks=[fails_here] if is_chief() else [])
    except KeyError:
        fit(model)


def a_prediction_of_the_chief_alone():
    """Story: it made Keras's seed, for which the other worker, in `fit`, did not wait."""
    model = parallel()
    if is_chief():
        model.predict_on_batch(X[:4])
    fit(model)


def ragged_rows_of_their_own():
    ragged = tf.RaggedTensor.from_row_lengths([1.0, 2.0, 3.0], [1, 2])
    data = tf.data.Dataset.from_tensor_slices((ragged, Y[:2])).batch(2)
    tfparallel.data.by_sample(data)


DIFFERENCES = {
    "a prediction of the chief alone": a_prediction_of_the_chief_alone,
    "evaluate": lambda: loaded_by_the_chief().evaluate(X, Y, verbose=0),
    "predict": lambda: loaded_by_the_chief().predict(X, verbose=0),
    "weights before train_on_batch": lambda: loaded_by_the_chief().train_on_batch(X, Y),
    "test_on_batch, again": loaded_by_the_chief_and_asked_twice,
    "a row of the chief alone": a_row_of_the_chief_alone,
    "class weights of their own": class_weights_of_their_own,
    "words in another order": words_in_another_order,
    "another loss": another_loss,
    "an error that one worker caught": an_error_that_one_worker_caught,
    "weights of the chief alone": weights_of_the_chief_alone,
    "weights drawn apart": weights_drawn_apart,
    "a learning rate of the chief alone": a_learning_rate_of_the_chief_alone,
    "a learning rate in the last epoch": a_learning_rate_in_the_last_epoch,
    "a draw of the chief alone": a_draw_of_the_chief_alone,
    "train_on_batch": rows_of_their_own_in_train_on_batch,
    "predict_on_batch": rows_of_their_own_in_predict_on_batch,
    "local_sgd": rows_of_their_own_under_local_sgd,
    "other rows to validate on": other_rows_to_validate_on,
    "another order": another_order_in_the_second_epoch,
    "a stop within an epoch": a_stop_within_an_epoch,
    "ragged rows of their own": ragged_rows_of_their_own,
}

# --- What goes well ---------------------------------------------------------------------------


class StopsAfterAnEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = is_chief() and epoch == 1


def a_stop_of_one_worker():
    return len(fit(parallel(), epochs=5, callbacks=[StopsAfterAnEpoch()]).epoch)


class WritesSlowly(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(1)
        super().on_epoch_end(epoch, logs)


def a_file_that_the_chief_writes(folder):
    """Loaded at once behind `fit`, by all."""
    path = os.path.join(folder, "it.weights.h5")
    model, same = parallel(keras.layers.Dense(500)), []
    for _ in range(2):
        writes = WritesSlowly(path, save_weights_only=True)
        fit(model, epochs=1, callbacks=[writes] if is_chief() else [])
        weights = model.get_weights()
        model.load_weights(path)
        same.append(all(map(np.array_equal, weights, model.get_weights())))
    return same


def what_is_no_difference():
    """More objects of Keras's on one worker; seeds that a worker without rows does not move on."""
    if is_chief():
        build(keras.layers.Dropout(0.5))
    fit(parallel(keras.layers.Dropout(0.5)))
    model = parallel(keras.layers.Dropout(0.5), sync="local_sgd:2")
    evaluates = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: model.evaluate(X, Y, verbose=0)
    )
    for _ in range(2):
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[evaluates])
    model.train_on_batch(X[:8], Y[:8])  # After which the workers' weights are apart.
    model.test_on_batch(X[:8], Y[:8])
    model.evaluate(X, Y, verbose=0)
    return "nothing"


class Standardized(keras.layers.Layer):
    """Each row by itself; of a row of ones there would be nothing but NaN."""

    def call(self, x):
        return (x - keras.ops.mean(x, -1, keepdims=True)) / keras.ops.std(x, -1, keepdims=True)


class Seen(keras.layers.Layer):
    """Keeps whether it was called."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False)

    def call(self, x):
        self.seen.assign(True)
        return x


def batches(x):
    rows = slice(0, 5) if is_chief() else slice(5, None)
    data = tf.data.Dataset.from_tensor_slices((x[rows], Y[rows])).batch(BATCH)
    return tfparallel.data.by_sample(data)


def outcome(model, history):
    return [w.tolist() for w in model.get_weights()], history.history["loss"]


LOOKUPS = {
    # Without an index for what is in no vocabulary: a made-up row would be an error.
    "lookup": (
        "int64", lambda: keras.layers.IntegerLookup(vocabulary=[2, 3, 4, 5], num_oov_indices=0)
    ),
    "words": ("string", lambda: keras.layers.StringLookup(vocabulary=list("2345"))),
}  # fmt: skip


def rows_that_one_worker_lacks(how, is_plain=False):
    """Of batches of 4 of 21 rows, the last has one."""
    kind = how.partition(" ")[0]
    x = X if kind not in LOOKUPS else np.round(np.clip(X, 2, 5)).astype("int64")
    if kind == "words":
        x = x.astype("str")

    def make():
        keras.utils.set_random_seed(3)
        layers = [keras.Input((4,)), Standardized(), Seen()]
        if kind in LOOKUPS:
            layers = [keras.Input((4,), dtype=LOOKUPS[kind][0]), LOOKUPS[kind][1]()]
            layers += [keras.layers.Embedding(5, 2), keras.layers.Flatten()]
        return keras.Sequential([*layers, keras.layers.Dense(1)])

    model = make() if is_plain else tfparallel.data_parallel(make)
    model.compile("sgd", "mse", metrics=["mae"])
    if how.endswith("by_sample") and not is_plain:
        history = model.fit(batches(x), epochs=1, verbose=0)
    elif how.endswith("by_sample"):
        # The batches of both workers one after the other, and then what the second has left.
        starts = [(0, 5), (4, 9), (8, 13), (12, 17)]
        local_rows, other = np.split(np.arange(NUM_EXAMPLES), [5])
        steps = [np.r_[local_rows[a : a + 4], other[a : a + 4]] for a, _ in starts]
        data = tf.data.Dataset.from_generator(
            lambda: ((x[rows], Y[rows]) for rows in steps),
            output_signature=(
                tf.TensorSpec([None, 4], tf.string if kind == "words" else x.dtype),
                tf.TensorSpec([None, 1], Y.dtype),
            ),
        )
        history = model.fit(data, epochs=1, verbose=0)
    else:
        history = model.fit(x, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return outcome(model, history)


def a_step_without_rows(is_plain=False):
    """Of any worker, between two others; a row of ones stands for them, which gives NaN."""
    steps = [np.arange(0, 8), np.arange(0), np.arange(8, 16)]
    if not is_plain:
        steps = [own_rows(rows) for rows in steps]
    data = tf.data.Dataset.from_generator(
        lambda: ((X[rows], Y[rows]) for rows in steps),
        output_signature=(tf.TensorSpec([None, 4], X.dtype), tf.TensorSpec([None, 1], Y.dtype)),
    ).apply(tf.data.experimental.assert_cardinality(len(steps)))
    model = build(Standardized()) if is_plain else parallel(Standardized())
    model.compile("sgd", "mse")
    model.fit(data if is_plain else tfparallel.data.by_sample(data), verbose=0)
    return [weights.tolist() for weights in model.get_weights()]


LACKING = ("arrays", "by_sample", "lookup", "lookup by_sample", "words by_sample")


def main(folder):
    keras.config.set_floatx("float64")
    errors = {}
    for name, program in DIFFERENCES.items():
        try:
            program()
            errors[name] = "nothing"
        except (RuntimeError, ValueError) as error:
            errors[name] = str(error)
    errors["what is no difference"] = what_is_no_difference()
    stopped, same = a_stop_of_one_worker(), a_file_that_the_chief_writes(folder)
    lacking = {how: rows_that_one_worker_lacks(how) for how in LACKING}
    model = parallel(Standardized(), sync="accumulate:2")
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    finite = bool(all(np.isfinite(w).all() for w in model.get_weights()))
    return {
        "errors": errors, "stopped": stopped, "same": same, "lacking": lacking, "finite": finite,
        "empty": a_step_without_rows(),
    }  # fmt: skip
