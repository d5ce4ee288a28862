"""What each worker of `test_own_reading.py` runs: data that can be indexed, read in shares."""

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.data.batches import evaluation_batches
from tfparallel.data.sources import Arrays

NUM_EXAMPLES, BATCH = 30, 8
CLASS_WEIGHT = {0: 0.5, 1: 2.0, 2: 1.0}


class Watched(Arrays):
    """Arrays that note which rows were read."""

    def __init__(self, data):
        super().__init__(data)
        self.seen = []

    def read(self, indices):
        def note(indices_read):
            self.seen.extend(indices_read.tolist())
            return indices_read

        indices = tf.ensure_shape(tf.numpy_function(note, [indices], tf.int64), [None])
        return super().read(indices)


def examples():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_EXAMPLES, 5))
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)


def build(loss):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05, global_clipnorm=0.5), loss, metrics=["accuracy"])
    return model


def of_the_batch(y, outputs):
    """A loss that compares examples, so that the outputs of all rows meet."""
    each = keras.losses.sparse_categorical_crossentropy(y, outputs)
    return each * (1 + keras.ops.mean(each))


def train(loss, scope=None, **options):
    """Two epochs of 4 batches, the last of 6; what a user could look at."""
    keras.utils.set_random_seed(3)
    if scope is None:
        model = build(loss)
    else:
        with scope:
            model = build(loss)
    source, validation = Watched(examples()), Watched(examples())
    batches = tfparallel.data.EpochBatches(source, global_batch_size=BATCH, seed=5)
    read = {}
    noting = keras.callbacks.LambdaCallback(
        # What was seen are rows that workers compared.
        on_train_begin=lambda logs: (source.seen.clear(), validation.seen.clear()),
        on_epoch_end=lambda epoch, logs: read.setdefault(epoch, set(source.seen))
    )
    history = model.fit(
        batches.dataset,
        epochs=2,
        validation_data=evaluation_batches(validation, 7),
        callbacks=[batches, noting],
        shuffle=False,
        verbose=0,
        **options,
    ).history
    whole = evaluation_batches(examples(), 7)
    results = {
        "history": history,
        "evaluate": model.evaluate(whole, verbose=0),
        "predict": model.predict(whole, verbose=0).tolist(),
        "weights": [variable.numpy().tolist() for variable in model.variables],
        "read": sorted(read[0]),
        "validated": sorted(set(validation.seen)),
    }
    if scope is not None:
        at_chief = model.predict(whole, verbose=0, gather_to="chief")
        results["at chief"] = None if at_chief is None else at_chief.tolist()
        results["own"] = model.predict(whole, verbose=0, gather_to=None).tolist()
    return results


CASES = {
    "keras": {"loss": "sparse_categorical_crossentropy"},
    "weighted": {"loss": "sparse_categorical_crossentropy", "class_weight": CLASS_WEIGHT},
    "joined": {"loss": of_the_batch},
}


def weighted_sample_partition(strategy=None):
    """Class weights of a sample partition: worker w has rows 15 w … of the examples."""
    x, y = examples()
    half, step = NUM_EXAMPLES // 2, BATCH // 2
    owned = [np.arange(w * half, (w + 1) * half) for w in range(2)]
    if strategy is None:
        batches = [
            np.concatenate([rows[start : start + step] for rows in owned])
            for start in range(0, half, step)
        ]
    else:
        local_rows = owned[tfparallel.worker_index()]
        batches = [local_rows[start : start + step] for start in range(0, half, step)]
    specs = (tf.TensorSpec((None, 5), x.dtype), tf.TensorSpec((None,), y.dtype))
    dataset = tf.data.Dataset.from_generator(
        lambda: ((x[rows], y[rows]) for rows in batches), output_signature=specs
    ).apply(tf.data.experimental.assert_cardinality(len(batches)))
    keras.utils.set_random_seed(3)
    if strategy is None:
        model = build("sparse_categorical_crossentropy")
    else:
        with strategy.scope():
            model = build("sparse_categorical_crossentropy")
        dataset = tfparallel.data.by_sample(dataset)
    fitted = {"class_weight": CLASS_WEIGHT, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(dataset, **fitted).history
    return [history["loss"], [variable.numpy().tolist() for variable in model.variables]]


def of_other_data(strategy, change):
    """What is said where worker 1 has something else."""
    x, y = examples()
    other = tfparallel.worker_index() == 1
    if other and change == "order":
        x = x[::-1].copy()
    with strategy.scope():
        model = build("sparse_categorical_crossentropy")
    seed = 6 if other and change == "seed" else 5
    batches = tfparallel.data.EpochBatches((x, y), global_batch_size=BATCH, seed=seed)
    try:
        model.fit(batches.dataset, callbacks=[batches], verbose=0)
    except RuntimeError as error:
        return str(error)
    return "trained"


def main():
    keras.config.set_floatx("float64")
    strategy = tfparallel.MultiWorkerMirroredStrategy()
    seen = {name: train(scope=strategy.scope(), **case) for name, case in CASES.items()}
    seen["sample partition"] = weighted_sample_partition(strategy)
    return seen | {change: of_other_data(strategy, change) for change in ("order", "seed")}
