"""Plain Keras code that `test_keras_fit.py` runs on one device and on the workers of a job.

`main` is what each worker runs: the same functions, in the scope of the drop-in strategy.
"""

import contextlib
import pathlib
import traceback

import keras
import numpy as np
import tensorflow as tf

NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES = 45, 6, 3


def examples():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_EXAMPLES, NUM_FEATURES))
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)


def build_dense():
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.1)),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Dropout(0.3),
            layers.Dense(NUM_CLASSES),
        ]
    )


def compile_with(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)


def outcome(model, history, x, y):
    """All that a user could look at: losses and metrics, predictions, weights."""
    return {
        "history": history.history,
        "evaluate": model.evaluate(x, y, batch_size=8, verbose=0),
        "predict": model.predict(x, batch_size=8, verbose=0).tolist(),
        "weights": [variable.numpy().tolist() for variable in model.variables],
    }


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Has no config, as the one in TensorFlow's tutorial on transformers."""

    def __call__(self, step):
        return 0.05 / tf.sqrt(tf.cast(step, "float32") + 10.0)


# --- Without files ----------------------------------------------------------------------------


def uneven_batches_clipping_and_validation(scope):
    """36 of 45 examples in batches of 8, the last of 4; 9 to validate on, shuffled by Keras."""
    x, y = examples()
    with scope():
        model = build_dense()
        compile_with(model, keras.optimizers.Adam(OwnSchedule(), global_clipnorm=0.5))
    history = model.fit(x, y, batch_size=8, epochs=3, validation_split=0.2, verbose=0)
    return outcome(model, history, x, y)


def gradient_accumulation(scope):
    """6 batches an epoch of which 4 make an update; the epoch's end falls between."""
    x, y = examples()
    with scope():
        model = build_dense()
        compile_with(model, keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=4))
    history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0)
    return outcome(model, history, x, y)


def several_steps_an_execution(scope):
    """6 steps an epoch, of which the last has 5 examples; from a data set."""
    x, y = examples()
    with scope():
        model = build_dense()
        compile_with(model, keras.optimizers.RMSprop(0.01, clipnorm=0.2), steps_per_execution=3)
    history = model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), epochs=3, verbose=0)
    return outcome(model, history, x, y)


def sample_weights_and_class_weights(scope):
    x, y = examples()
    with scope():
        model = build_dense()
        compile_with(model, keras.optimizers.SGD(0.1, use_ema=True))
    weights = np.linspace(0.1, 2.0, NUM_EXAMPLES)
    history = model.fit(
        x, y, sample_weight=weights, batch_size=10, epochs=2, shuffle=False, verbose=0
    )
    more = model.fit(x, y, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, batch_size=10, verbose=0)
    history.history["more"] = more.history["loss"]
    return outcome(model, history, x, y)


def a_distributed_data_set(scope):
    """From what all workers have, and then from every second example (on one device, all)."""
    x, y = examples()
    with scope():
        strategy = tf.distribute.get_strategy()
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((NUM_FEATURES,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        )
        compile_with(model, keras.optimizers.SGD(0.1, momentum=0.9))
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    distributed = strategy.experimental_distribute_dataset(whole.batch(8))

    def of_worker(context):
        share = whole.shard(context.num_input_pipelines, context.input_pipeline_id)
        return share.batch(context.get_per_replica_batch_size(8))

    history = model.fit(distributed, validation_data=distributed, epochs=2, verbose=0)
    more = model.fit(
        strategy.distribute_datasets_from_function(of_worker), epochs=2, verbose=0
    )
    history.history["more"] = more.history["loss"]
    return outcome(model, history, x, y)


WITHOUT_FILES = {
    function.__name__: function
    for function in [
        uneven_batches_clipping_and_validation,
        gradient_accumulation,
        several_steps_an_execution,
        sample_weights_and_class_weights,
        a_distributed_data_set,
    ]
}


def pure_bfloat16(scope):
    """Weights, activations and slots; the first values of all of them are broadcast."""
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_dtype_policy("bfloat16")
    keras.utils.set_random_seed(3)
    x, y = examples()
    try:
        with scope():
            model = keras.Sequential(
                [keras.Input((NUM_FEATURES,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
            )
            compile_with(model, keras.optimizers.SGD(0.05, momentum=0.5))
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
    assert {str(weight.dtype) for weight in model.weights} == {"bfloat16"}
    weights = [weight.numpy().astype("float32").tolist() for weight in model.weights]
    return {"loss": history.history["loss"], "weights": weights}


# --- With callbacks that write ----------------------------------------------------------------


class StopsTheProgram(keras.callbacks.Callback):
    """As if the job were stopped."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise InterruptedError


def train_with_callbacks(scope, folder, epochs=4, more=()):
    """Returns the outcome; the callbacks are a user's own list."""
    x, y = examples()
    folder = pathlib.Path(folder)
    with scope():
        model = build_dense()
        compile_with(model, keras.optimizers.Adam(0.01))
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(folder / "{epoch:02d}.keras")),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.TensorBoard(str(folder / "board")),
        keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),  # A path.
        *more,
    ]
    history = model.fit(
        x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    return outcome(model, history, x, y)


def interrupted_and_resumed(scope, folder):
    """Stopped after 2 epochs of 4 and started again, from a model that is built anew."""
    with contextlib.suppress(InterruptedError):
        train_with_callbacks(scope, folder, more=[StopsTheProgram()])
    return train_with_callbacks(scope, folder)


def compiled_outside_the_scope(scope):
    with scope():
        model = build_dense()
    compile_with(model, "sgd")
    model.fit(*examples(), verbose=0)


class Autoencoder(keras.Model):
    """A model whose step calls a model inside it."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x - self.inner(x, training=True)) ** 2)
        weights = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def part_compiled_outside_the_scope(scope):
    x = np.ones((4, 3))
    with scope():
        model = Autoencoder()
        model.compile("sgd")
    model.fit(x, batch_size=4, verbose=0)
    model.inner.compile("sgd", "mse")
    model.inner.fit(x, x, batch_size=4, verbose=0)


# Those that write files: each worker in a folder of its own, or all in one, as on a shared file
# system.
WITH_FILES = {
    "with callbacks": lambda scope, local, shared: train_with_callbacks(scope, local / "straight"),
    "resumed": lambda scope, local, shared: interrupted_and_resumed(scope, local / "interrupted"),
    "shared": lambda scope, local, shared: train_with_callbacks(scope, shared),
}
OTHERS = {
    "bfloat16": pure_bfloat16,
    "outside": compiled_outside_the_scope,
    "part outside": part_compiled_outside_the_scope,
}


def main(folder, parts):
    keras.config.set_floatx("float64")
    import tfparallel

    scope = tfparallel.MultiWorkerMirroredStrategy().scope
    folder = pathlib.Path(folder)
    own_folder, shared = folder / f"worker_{tfparallel.worker_index()}", folder / "shared"
    results = {}
    for part in parts:
        if part in WITH_FILES:
            results[part] = attempt(lambda part=part: WITH_FILES[part](scope, own_folder, shared))
        else:
            results[part] = attempt(lambda part=part: (WITHOUT_FILES | OTHERS)[part](scope))
    return results


def attempt(function):
    """One that fails on all workers is no reason not to see the others."""
    try:
        return function()
    except Exception:
        return traceback.format_exc()
