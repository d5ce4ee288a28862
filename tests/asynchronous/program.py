"""What the chief of `test_asynchronous_model.py` runs, with one worker: the training of one device.

Each step reads what the one before it has written, so that nothing is stale, and all must be as in
plain Keras.
"""

import json
import sys

import keras
import numpy as np
from keras import layers

import tfparallel
from tests.workers.local_steps import OwnStep, refused

ROWS = 8


@keras.saving.register_keras_serializable()
class LargestError(keras.metrics.Metric):
    """Its state does not add up: predictions must come to the chief."""

    def __init__(self, name="largest_error", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.largest = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.largest.assign(keras.ops.maximum(self.largest, error))

    def result(self):
        return self.largest


def dense():
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(16, "tanh", kernel_regularizer="l2"), layers.Dense(2)]
    )


def normalized():
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)]
    )


def embedding():
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(words)
    return keras.Model(words, layers.Dense(2)(layers.LSTM(5)(x)))


def tokens():
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(words)
    return keras.Model(words, layers.Dense(2)(layers.LSTM(5, return_sequences=True)(x)))


@keras.saving.register_keras_serializable()
def distance(y_true, y_pred):
    """A metric that nobody knows to add up."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def two_outputs():
    x = keras.Input((5,))
    hidden = layers.Dense(8, "tanh")(x)
    outputs = [layers.Dense(2, name=name)(hidden) for name in ("one", "two")]
    return keras.Model(x, outputs)


class Subclassed(keras.Model):
    """Makes its variables when it is called."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "relu"), layers.Dense(2)

    def call(self, x):
        return self.out(self.hidden(x))


def adam(**options):
    return lambda: keras.optimizers.Adam(0.05, **options)


def without_biases():
    optimizer = keras.optimizers.AdamW(0.05, 0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


class Slows(keras.callbacks.Callback):
    """Sets the learning rate before a batch, by the logs of the one before."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch > 3:
            self.model.optimizer.learning_rate = 0.001 * self.loss

    def on_train_batch_end(self, batch, logs=None):
        self.loss = float(logs["loss"])


CASES = {
    "SGD": (dense, lambda: keras.optimizers.SGD(0.1, 0.9), {}),
    "clipping": (dense, adam(global_clipnorm=0.1), {}),
    "averages": (dense, adam(use_ema=True, ema_overwrite_frequency=3), {}),
    "decay": (dense, lambda: keras.optimizers.AdamW(0.05, 0.1), {}),
    "accumulation": (dense, adam(gradient_accumulation_steps=3), {}),
    "schedule": (
        dense,
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
        {},
    ),
    "by name": (dense, lambda: "rmsprop", {}),
    "Nadam": (dense, lambda: keras.optimizers.Nadam(0.05), {}),
    "Muon": (dense, lambda: keras.optimizers.Muon(0.05, adam_weight_decay=0.9), {}),
    "loss_scale_factor": (dense, lambda: keras.optimizers.SGD(0.1, loss_scale_factor=64.0), {}),
    "decay without biases": (dense, without_biases, {}),
    "callbacks of batches": (dense, adam(), {"callbacks": [Slows()]}),
    "masked metrics": (tokens, adam(), {}),
    "batch normalization": (normalized, adam(), {}),
    "sparse gradients": (embedding, adam(), {}),
    "two outputs": (two_outputs, adam(), {}),
    "subclassed": (Subclassed, adam(), {}),
    "sample weights": (dense, adam(), {"sample_weight": np.linspace(0, 2, 57)}),
    "steps_per_execution": (dense, adam(), {"steps_per_execution": 3}),
}


def data(model_of):
    generator = np.random.default_rng(0)
    if model_of in (embedding, tokens):
        shape = (57, 6, 2) if model_of is tokens else (57, 2)
        return generator.integers(0, 9, (57, 6)), generator.normal(size=shape)
    x = generator.normal(size=(57, 5))
    y = np.stack([x.sum(1), x.max(1)], 1)
    return x, [y, -y] if model_of is two_outputs else y


def trained(model, model_of, optimizer, epochs=2, callbacks=(), steps_per_execution=1, **options):
    metrics = ["mae", LargestError(), distance]
    metrics = [["mae"], [LargestError()]] if model_of is two_outputs else metrics
    model.compile(optimizer(), "mse", metrics=metrics, steps_per_execution=steps_per_execution)
    fitted = {"batch_size": ROWS, "epochs": epochs, "shuffle": False, "verbose": 0}
    x, y = data(model_of)
    callbacks = list(callbacks)
    return model.fit(x, y, validation_data=(x, y), callbacks=callbacks, **fitted, **options).history


def parallel(model_of):
    keras.utils.set_random_seed(5)
    return tfparallel.data_parallel(model_of, sync="async")


def alone(model_of):
    keras.utils.set_random_seed(5)
    return model_of()


def apart(one, other):
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


class Named(keras.Model):
    """Has a name that the extended class takes."""

    staleness = 3


def one_case(name):
    model_of, optimizer, options = CASES[name]
    model, one = parallel(model_of), alone(model_of)
    history = trained(model, model_of, optimizer, **options)
    expected = trained(one, model_of, optimizer, **options)
    assert set(history) == set(expected), (set(history), set(expected))
    return {
        "weights": apart(model, one),
        "logs": max(float(np.abs(np.subtract(history[k], expected[k])).max()) for k in history),
        "largest staleness": model.staleness["largest"],
    }


def a_run(folder):
    """Interrupted, resumed, saved in the middle and at the end; and that of a built model."""
    results = {}
    model, one = parallel(dense), alone(dense)

    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    checkpoint = tfparallel.callbacks.Checkpoint(folder, every_steps=2)
    try:
        trained(model, dense, adam(), callbacks=[checkpoint, Interrupts()])
    except KeyboardInterrupt:
        pass
    resumed = parallel(dense)
    trained(resumed, dense, adam(), callbacks=[tfparallel.callbacks.Checkpoint(folder)])
    trained(one, dense, adam())
    results["resumed"] = apart(resumed, one)
    every_third = keras.callbacks.ModelCheckpoint(f"{folder}/at_{{batch}}.keras", save_freq=3)
    saved = [parallel(dense), alone(dense)]
    for each in saved:
        trained(each, dense, adam(), epochs=1, callbacks=[every_third])
        each.at_third = keras.models.load_model(f"{folder}/at_3.keras")
    results["in the middle"] = apart(*(each.at_third for each in saved))
    resumed.save(f"{folder}/saved.keras")
    loaded = keras.models.load_model(f"{folder}/saved.keras")
    x, _ = data(dense)
    results["saved"] = {
        "class": type(loaded).__module__,
        "apart": float(np.abs(loaded.predict(x, verbose=0) - resumed.predict(x, verbose=0)).max()),
    }
    keras.utils.set_random_seed(5)
    built = tfparallel.data_parallel(alone(dense), sync="async")
    trained(built, dense, adam())
    results["built"] = apart(built, one)
    return results | {"layout": str(built.layout), "bytes": built.bytes_of_a_step}


def refusals():
    x, y = data(dense)
    model, compiled = parallel(dense), alone(dense)
    model.compile("sgd", "mse")
    compiled.compile("sgd", "mse")

    def own_step():
        model = parallel(OwnStep)
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)

    return {
        "train_on_batch": refused(lambda: model.train_on_batch(x, y)),
        "own step": refused(own_step),
        "XLA": refused(lambda: model.compile("sgd", "mse", jit_compile=True)),
        "compiled": refused(lambda: tfparallel.data_parallel(compiled, sync="async")),
        "beside": refused(
            lambda: tfparallel.data_parallel(dense, sync="async", compression="bf16")
        ),
        "names": refused(lambda: parallel(Named)),
        "scaled": refused(
            lambda: model.compile(keras.optimizers.LossScaleOptimizer(adam()()), "mse")
        ),
    }


def main(folder, *parts):
    """Writes what is asked for: the names of cases, "a run", "refused"."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    results = {}
    for part in parts:
        if part == "a run":
            results |= a_run(folder)
        else:
            results[part] = refusals() if part == "refused" else one_case(part)
    with open(f"{folder}/found.json", "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
