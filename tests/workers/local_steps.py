"""What each worker of `test_local_steps.py` runs."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfparallel

ROWS = 8


def data(num_batches, last=ROWS):
    generator = np.random.default_rng(0)
    number = ROWS * (num_batches - 1) + last
    x = generator.normal(size=(number, 5))
    return x, (x.sum(1) > 0).astype("int64")


def build(dropout=0.0):
    layers = [keras.Input((5,)), keras.layers.Dense(16, activation="tanh")]
    layers += [keras.layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([*layers, keras.layers.Dense(2)])


def trained(
    sync,
    num_batches=5,
    last=ROWS,
    epochs=2,
    optimizer=None,
    callbacks=(),
    validates=False,
    **options,
):
    keras.utils.set_random_seed(5)
    model = tfparallel.data_parallel(build, sync=sync)
    model.compile(
        optimizer or keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    x, y = data(num_batches, last)
    history = model.fit(
        x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0,
        validation_data=(x, y) if validates else None, callbacks=list(callbacks),
    )  # fmt: skip
    return model, history.history


def by_hand(every, num_batches, last, is_outer=False, epochs=2, rate=0.1):
    """Plain Keras on the rows of each worker, averaged by hand; with outer steps, as in DiLoCo."""
    x, y = data(num_batches, last)
    keras.utils.set_random_seed(5)
    models = [build() for _ in range(2)]
    for model in models:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate), loss)
        model.set_weights(models[0].get_weights())
    rows, steps = np.zeros(len(models)), 0
    before = models[0].get_weights()
    momentum = [np.zeros_like(weight) for weight in before]

    def average():
        nonlocal rows, steps, before, momentum
        if not rows.sum():
            return
        shares = rows / rows.sum()
        by_weight = zip(*(model.get_weights() for model in models), strict=True)
        mean = [sum(s * w for s, w in zip(shares, each, strict=True)) for each in by_weight]
        if is_outer:
            moved = [weight - m for weight, m in zip(before, mean, strict=True)]
            momentum = [0.9 * b + delta for b, delta in zip(momentum, moved, strict=True)]
            mean = [
                weight - 0.7 * (delta + 0.9 * b)
                for weight, delta, b in zip(before, moved, momentum, strict=True)
            ]
            before = mean
        for model in models:
            model.set_weights(mean)
        rows, steps = np.zeros(len(models)), 0

    for _ in range(epochs):
        for start in range(0, len(x), ROWS):
            batch = slice(start, min(start + ROWS, len(x)))
            size = batch.stop - batch.start
            for w, model in enumerate(models):
                first, end = size * w // len(models), size * (w + 1) // len(models)
                local_rows = slice(batch.start + first, batch.start + end)
                if end > first:
                    model.train_on_batch(x[local_rows], y[local_rows])
                rows[w] += end - first
            steps += 1
            if steps == every:
                average()
        average()
    return models[0].get_weights()


def apart(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def largest(history, other):
    return max(float(np.abs(np.subtract(history[k], other[k])).max()) for k in other)


class Evaluates(keras.callbacks.Callback):
    """In the middle of an epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            x, y = data(2)
            self.seen.append(self.model.evaluate(x, y, batch_size=ROWS, verbose=0))


def refused(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return "trained"


class OwnStep(keras.Model):
    """Whatever it does in a step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return super().train_step(data)


def masks():
    """The loss of ones behind a dropout layer, before any average: of this worker's rows."""
    keras.utils.set_random_seed(5)
    model = tfparallel.data_parallel(lambda: build(0.5), sync="local_sgd:100")
    model.compile(keras.optimizers.SGD(0.0), "mse")
    losses = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(float(logs["loss"]))

    x = np.ones((2 * ROWS, 5))
    model.fit(
        x, np.zeros((2 * ROWS, 2)), batch_size=ROWS, verbose=0, callbacks=[Reads()]
    )
    return losses


def between_workers(workers, values):
    """How far the values of a worker are from those of worker 0, at most."""
    flat = np.concatenate([np.ravel(v) for v in values]).astype("float64")[None]
    of_all = workers.all_gather([tf.constant(flat)], [1] * workers.num_workers)[0].numpy()
    return float(np.abs(of_all - of_all[0]).max())


@functools.cache
def exact():
    return trained("every_step", last=5, validates=True)


def every_step(workers, folder):
    """Averaged after each step."""
    model, history = trained("local_sgd:1", last=5, validates=True)
    validation = {k: v for k, v in exact()[1].items() if k.startswith("val")}
    return {
        "weights": apart(exact()[0].get_weights(), model.get_weights()),
        "validation": largest(history, validation),
    }


def averaged(workers, every, last, policy="local_sgd"):
    model, history = trained(f"{policy}:{every}", last=last)
    expected = by_hand(every, 5, last, is_outer=policy == "diloco")
    return {
        "by hand": apart(model.get_weights(), expected),
        "between workers": between_workers(workers, model.get_weights()),
        "history": history,
        "examples": 4 * ROWS + last,
    }


def post_local_sgd(workers, folder):
    until_it_begins, _ = trained("post_local_sgd:10,4", last=5)
    longer, _ = trained("every_step", last=5, epochs=3)
    model, history = trained("post_local_sgd:7,2", last=5, epochs=3)
    return {
        "until it begins": apart(exact()[0].get_weights(), until_it_begins.get_weights()),
        "from exact": apart(longer.get_weights(), model.get_weights()),
        "history": history,
        "examples": 4 * ROWS + 5,
    }


def sent_bytes(workers, folder):
    by_sync = {}
    for name, sync in (("every step", "every_step"), ("local", "local_sgd:4")):
        before = workers.traffic.read()["sums"]
        model, _ = trained(sync, num_batches=40, epochs=1)
        by_sync[name] = workers.traffic.read()["sums"] - before
    before = workers.traffic.read()["sums"]
    model.evaluate(*data(1), verbose=0)  # Nothing was trained since the end of the epoch.
    by_sync["evaluate"] = workers.traffic.read()["sums"] - before
    by_sync["of weights"] = sum(w.nbytes for w in model.get_weights())
    return by_sync


def in_the_middle(workers, folder):
    reads = Evaluates()
    _, history = trained("local_sgd:2", callbacks=[reads])
    return {"evaluated": reads.seen, "history": history}


def resumed(workers, folder, every, policy="local_sgd"):
    def with_adam(epochs, *callbacks):
        optimizer = keras.optimizers.Adam(0.05)
        sync = f"{policy}:{every}"
        return trained(sync, epochs=epochs, optimizer=optimizer, callbacks=callbacks)[0]

    checkpoints = f"{folder}/{policy}-{every}"
    whole = with_adam(2)
    with_adam(1, tfparallel.callbacks.Checkpoint(checkpoints))
    model = with_adam(2, tfparallel.callbacks.Checkpoint(checkpoints))
    return {
        "weights": apart(whole.get_weights(), model.get_weights()),
        "state": between_workers(workers, [v.numpy() for v in whole.optimizer.variables]),
    }


class Interruption(Exception):
    pass


class Interrupts(keras.callbacks.Callback):
    """Before a step of the first epoch, once."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self._step:
            self._step = None
            raise Interruption


def resumed_within_an_epoch(workers, folder):
    """12 steps: 3 exact, then averages every 4, and one for the checkpoint before the sixth."""
    x, y = data(12)

    def new_model():
        keras.utils.set_random_seed(5)
        model = tfparallel.data_parallel(build, sync="post_local_sgd:3,4")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
        return model

    def run(model, name, *callbacks):
        checkpoint = tfparallel.callbacks.Checkpoint(f"{folder}/{name}", every_steps=5)
        callbacks = [checkpoint, *callbacks]
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=callbacks)
        return checkpoint

    whole, differences = new_model(), {}
    run(whole, "whole")
    for name, makes_anew in (("new model", True), ("same model", False)):
        model = new_model()
        try:
            run(model, name, Interrupts(7))
        except Interruption:
            # No `fit` begins with the weights that it left, which differ by worker.
            model.set_weights(new_model().get_weights())
            model = new_model() if makes_anew else model
        checkpoint = run(model, name)
        differences[name] = {
            "passed": checkpoint.num_passed,
            "weights": apart(whole.get_weights(), model.get_weights()),
            "history": largest(model.history.history, whole.history.history),
        }
    return differences


def options_of_keras(workers, folder):
    plain, differences = trained("diloco:2")[0].get_weights(), {}
    for option, value in (("jit_compile", True), ("steps_per_execution", 2)):
        model, _ = trained("diloco:2", **{option: value})
        differences[option] = apart(model.get_weights(), plain)
    return differences


def of_a_map(workers, folder):
    """How far apart a map of two optimizers ends from one; a worker has no rows in the last step.

    Both have a momentum, which is averaged, and a schedule, which counts the steps.
    """

    def sgd(**options):
        falls = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
        return keras.optimizers.SGD(falls, 0.9, **options)

    def by_map(default, **others):
        table = keras.optimizers.OptimizerMap(default, others)
        return keras.optimizers.MultiOptimizer(table)

    several = by_map(sgd(), **{".*kernel": sgd()})
    models = [trained("local_sgd:2", 3, 1, optimizer=each)[0] for each in (sgd(), several)]
    accumulating = by_map(sgd(gradient_accumulation_steps=2))
    return {
        "apart": apart(*(model.get_weights() for model in models)),
        "steps": [int(each.iterations) for each in (several, *several.optimizers)],
        "refused": refused(lambda: trained("local_sgd:2", optimizer=accumulating)),
    }


def refusals(workers, folder):
    sgd = keras.optimizers.SGD
    scaled = keras.optimizers.LossScaleOptimizer(sgd(0.1))
    accumulating = sgd(0.1, gradient_accumulation_steps=2)
    messages = {
        "scales": refused(lambda: trained("local_sgd:2", optimizer=scaled)),
        "accumulates": refused(lambda: trained("local_sgd:2", optimizer=accumulating)),
    }

    def of_the_batch(y, outputs):
        return keras.ops.mean((outputs - keras.ops.mean(outputs, 0)) ** 2, -1)

    for name, function, loss in (("joins", build, of_the_batch), ("own step", OwnStep, "mse")):
        model = tfparallel.data_parallel(function, sync="local_sgd:2")
        model.compile("sgd", loss)
        messages[name] = refused(lambda model=model: model.fit(*data(2), verbose=0))
    return messages


PARTS = {
    "every step": every_step,
    "2, 5": lambda workers, folder: averaged(workers, 2, 5),
    "3, 1": lambda workers, folder: averaged(workers, 3, 1),
    "100, 8": lambda workers, folder: averaged(workers, 100, ROWS),
    "diloco: 2, 5": lambda workers, folder: averaged(workers, 2, 5, "diloco"),
    "diloco: 3, 1": lambda workers, folder: averaged(workers, 3, 1, "diloco"),
    "post_local_sgd": post_local_sgd,
    "bytes": sent_bytes,
    "in the middle": in_the_middle,
    # The epoch's last step, the fifth, is none that averages, or one.
    "every 3": lambda workers, folder: resumed(workers, folder, 3),
    "every 5": lambda workers, folder: resumed(workers, folder, 5),
    "diloco: every 3": lambda workers, folder: resumed(workers, folder, 3, "diloco"),
    "within an epoch": resumed_within_an_epoch,
    "options": options_of_keras,
    "masks": lambda workers, folder: masks(),
    "of a map": of_a_map,
    "refused": refusals,
}


def main(folder, parts):
    keras.config.set_floatx("float64")
    workers = tfparallel.MultiWorkerMirroredStrategy().workers
    return {part: PARTS[part](workers, folder) for part in parts}
