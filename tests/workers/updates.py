"""What each worker of `test_updates.py` runs."""

import collections
import contextlib
import functools
import shutil

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfparallel
from tests.workers.local_steps import between_workers
from tfparallel.callbacks.chief_only import path_of_chief
from tfparallel.collectives.compression import compression_of
from tfparallel.replication import sharding
from tfparallel.strategies.variables import copies
from tfparallel.update import whole_slots

ROWS, STEPS, WORDS = 8, 3, 6


def build(dropout=0.0):
    parts = [keras.Input((5,)), layers.Dense(16, "tanh", kernel_regularizer="l2")]
    parts += [layers.Dropout(dropout, seed=3)] if dropout else []
    return keras.Sequential([*parts, layers.Dense(2)])


def build_masked():
    x = keras.Input((WORDS,), dtype="int32")
    embedded = layers.Embedding(9, 4, mask_zero=True)(x)
    return keras.Model(x, layers.Dense(2)(layers.LSTM(5, return_sequences=True)(embedded)))


def build_normalized():
    return keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(2)])


class Counts(layers.Layer):
    """Keeps a mean of the rows."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(keras.ops.mean(x, 0))
        return x


def build_with_state():
    return keras.Sequential([keras.Input((5,)), Counts(), layers.Dense(2)])


def data(number, masked=False):
    generator = np.random.default_rng(0)
    if masked:
        x = generator.integers(1, 9, (number, WORDS))
        for row, words in enumerate(generator.integers(1, WORDS + 1, number)):
            x[row, words:] = 0
        return x, generator.normal(size=(number, WORDS, 2))
    x = generator.normal(size=(number, 5))
    return x, np.stack([x.sum(1), x.max(1)], 1)


def trained(
    model, batch_size, number=57, epochs=2, optimizer=None, callbacks=(), validates=False, **options
):
    model.compile(optimizer or keras.optimizers.Adam(0.05), "mse", metrics=["mae"], **options)
    x, y = data(number, model.input_shape == (None, WORDS))
    fitted = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    fitted |= {"validation_data": (x, y)} if validates else {}
    return model.fit(x, y, **fitted, callbacks=list(callbacks)).history


def parallel(function, sync=f"accumulate:{STEPS}", **options):
    keras.utils.set_random_seed(5)
    return tfparallel.data_parallel(function, sync=sync, **options)


def alone(function):
    keras.utils.set_random_seed(5)
    return function()


def apart(model, other):
    pairs = list(zip(model.get_weights(), other.get_weights(), strict=True))
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def largest(history, other):
    return max(float(np.abs(np.subtract(history[k], other[k])).max()) for k in other)


def refused(function, **options):
    try:
        trained(parallel(function), ROWS, **options)
    except ValueError as error:
        return str(error)
    return "trained"


def refused_data(workers):
    """Each worker shuffles in an order of its own."""
    model = parallel(build)
    model.compile("sgd", "mse")
    shuffled = tf.data.Dataset.from_tensor_slices(data(64)).shuffle(64, workers.worker_index + 1)
    try:
        model.fit(shuffled.batch(ROWS), verbose=0)
    except Exception as error:
        return str(error)
    return "trained"


class Evaluates(keras.callbacks.Callback):
    """In the middle of an epoch, and of an update."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            x, y = data(16)
            self.model.evaluate(x, y, batch_size=ROWS, verbose=0)


def larger_batch(workers, folder):
    results = {}
    for name, function in (("dense", build), ("masked", build_masked)):
        one, model = alone(function), parallel(function)
        # The last step has one row, so that a worker has none; it is an update of its own, too.
        options = {"optimizer": keras.optimizers.SGD(0.1, 0.9), "validates": function is build}
        expected = trained(one, ROWS * STEPS, **options)
        options["optimizer"] = keras.optimizers.SGD(0.1, 0.9)
        history = trained(model, ROWS, **options)
        seen = {"weights": apart(model, one)}
        if function is build:
            seen["history"] = largest(history, expected)
        seen["between workers"] = between_workers(workers, model.get_weights())
        results[name] = seen
    return results


@functools.cache
def undisturbed():
    """A model that was trained, and its history."""
    model = parallel(build)
    return model, trained(model, ROWS)


def options_of_keras(workers, folder):
    differences = {}
    for name, options in (
        ("jit_compile", {"jit_compile": True, "steps_per_execution": 2}),
        ("evaluates", {"callbacks": [Evaluates()]}),
    ):
        model = parallel(build)
        trained(model, ROWS, **options)
        differences[name] = apart(model, undisturbed()[0])
    return differences


def build_outputs():
    rows = keras.Input((5,), name="rows")
    hidden = layers.Dense(4, "tanh")(rows)
    outputs = [layers.Dense(1, name="a")(hidden), layers.Dense(2, name="b")(hidden)]
    return keras.Model([rows], outputs)


def with_unread_inputs(x, y):
    unread = {"a table": tf.ones([50, 2]), "z scalar": tf.constant(2.0)}
    return {"rows": x, **unread}, (y[:, :1], y)


def unread_inputs(workers, folder):
    """How far the weights are from plain Keras's, by the data and the policy."""
    x, y = data(57)
    differences = {}
    local = slice(workers.worker_index, None, workers.num_workers)
    one = alone(build_outputs)
    one.compile(keras.optimizers.SGD(0.1), "mse")
    one.train_on_batch(x, (y[:, :1], y))
    for sync in ("every_step", "accumulate:2", "local_sgd:1"):
        for name, rows in (("whole batches", slice(None)), ("by_sample", local)):
            batches = tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(57)
            batches = batches.map(with_unread_inputs)
            if name == "by_sample":
                batches = batches.map(lambda x, y: ({k: x[k] for k in ("a table", "rows")}, y))
                batches = tfparallel.data.by_sample(batches)
            model = parallel(build_outputs, sync)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(batches, verbose=0)
            differences[f"{name}, {sync}"] = apart(model, one)
    return differences


class AsksOnce(keras.callbacks.Callback):
    """Adds a batch to the metrics in the middle of an epoch, as Keras's `test_on_batch` does."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            x, y = data(7)
            self.model.test_on_batch(x, (y[:, :1], y))


def logs_of_outputs(workers, folder):
    """How far the logs are from plain Keras's, at a learning rate of 0."""
    x, y = data(57)
    differences = {}
    for name, callbacks in (("fit", []), ("with test_on_batch", [AsksOnce()])):
        histories = []
        for model in (alone(build_outputs), parallel(build_outputs)):
            model.compile(keras.optimizers.SGD(0.0), ["mse", "mae"], metrics=[["mae"], ["mse"]])
            fitted = {"batch_size": ROWS, "epochs": 2, "verbose": 0, "callbacks": callbacks}
            histories.append(model.fit(x, (y[:, :1], y), **fitted).history)
        differences[name] = largest(*histories)
    return differences


def dropout(workers, folder):
    one_device = tfparallel.data_parallel(
        lambda: alone(lambda: build(0.5)),
        tfparallel.MirroredStrategy(["CPU:0"]),
        sync=f"accumulate:{STEPS}",
        allow_independent_workers=True,
    )
    trained(one_device, ROWS)
    model = parallel(lambda: build(0.5))
    trained(model, ROWS)
    return apart(model, one_device)


def adascale(workers, folder):
    """The gain of rows of all workers, whole or in shares, is that of one device."""
    sharding._FEWEST = 10
    sgd = lambda: keras.optimizers.SGD(0.1, 0.9)  # noqa: E731
    one = tfparallel.data_parallel(
        lambda: alone(build),
        tfparallel.MirroredStrategy(["CPU:0"]),
        sync=f"adascale:{STEPS}",
        allow_independent_workers=True,
    )
    expected = trained(one, ROWS, optimizer=sgd())
    results = {"gain": one.learning_rate_gain, "history": 0.0}
    for shard in (None, "gradients"):
        model = parallel(build, f"adascale:{STEPS}", shard=shard)
        history = trained(model, ROWS, optimizer=sgd())
        results["history"] = max(results["history"], largest(history, expected))
        results[f"weights, {shard}"] = apart(model, one)
        ahead = model.num_scale_invariant_steps - one.num_scale_invariant_steps
        results[f"steps, {shard}"] = abs(ahead)
    results["between workers"] = between_workers(workers, model.get_weights())
    workers.compression = compression_of("bf16")  # A process has one strategy.
    try:
        trained(model, ROWS, optimizer=sgd())
    except ValueError as error:
        results["compressed"] = str(error)
    workers.compression = None
    return results


def sums(workers, folder):
    bytes_by_sync = {}
    for sync in ("every_step", "accumulate:4"):
        before = workers.traffic.read()
        trained(parallel(build, sync), ROWS, number=40 * ROWS, epochs=1)
        after = workers.traffic.read()
        bytes_by_sync[sync] = after["sums"] - before["sums"]
    return bytes_by_sync


class Interrupts(keras.callbacks.Callback):
    """In the middle of an epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 5:
            raise KeyboardInterrupt


def resumed(workers, folder):
    checkpoint = tfparallel.callbacks.Checkpoint(folder, every_steps=2)
    whole, expected = undisturbed()
    try:
        trained(parallel(build), ROWS, callbacks=[checkpoint, Interrupts()])
    except KeyboardInterrupt:
        pass
    checkpoint = tfparallel.callbacks.Checkpoint(folder, every_steps=2)
    history = trained(model := parallel(build), ROWS, callbacks=[checkpoint])
    return {
        "step": checkpoint.resumed["step"],
        "weights": apart(model, whole),
        "history": largest(history, expected),
    }


def loss_scaling(workers, folder):
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    one, model = alone(build), parallel(build)
    trained(one, ROWS * STEPS, optimizer=scaled)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    trained(model, ROWS, optimizer=scaled)
    return apart(model, one)


def compressed(workers, folder):
    whole, _ = undisturbed()
    workers.compression = compression_of("bf16")  # A process has one strategy.
    trained(model := parallel(build), ROWS)
    workers.compression = None
    return apart(model, whole)


def refusals(workers, folder):
    return {
        "others' batches": refused_data(workers),
        "stops": refused(lambda: build(), callbacks=[keras.callbacks.TerminateOnNaN()]),
        "normalized": refused(build_normalized),
        "state": refused(build_with_state),
    }


CLIPPED = {
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.02},
    "global_clipnorm": {"global_clipnorm": 0.1, "momentum": 0.9},
}


def build_read():
    """Sparse gradients, dense ones, and such that no rows of the batch have a part in."""
    inputs = keras.Input((5,))
    ids = keras.ops.cast(keras.ops.abs(inputs) * 2, "int32") % 6
    read = keras.layers.Embedding(6, 3, embeddings_regularizer="l2")(ids)
    hidden = keras.layers.Dense(7, "tanh", kernel_regularizer="l2")(keras.layers.Flatten()(read))
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


class InterruptsEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


class Twice(keras.Model):
    """Whose loss looks at two calls of it."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        other = self(x / 2, training=training)
        return keras.ops.mean((y_pred - y) ** 2) + keras.ops.mean((y_pred - other) ** 2)


def build_twice():
    inputs = keras.Input((5,))
    return Twice(inputs, layers.Dense(2)(layers.Dense(16, "tanh")(inputs)))


def shares(workers, folder):
    """Each of four replicas keeps its share of the optimizer."""
    one = alone(build)
    trained(one, ROWS, optimizer=keras.optimizers.Adam(0.05, global_clipnorm=0.1))
    sent = {}
    for name, in_shares in (("whole", False), ("shares", True)):
        model = parallel(build, "every_step", shard="optimizer" if in_shares else None)
        before = workers.traffic.read()["sums"]
        trained(model, ROWS, optimizer=keras.optimizers.Adam(0.05, global_clipnorm=0.1))
        sent[name] = workers.traffic.read()["sums"] - before
    slots = [v for v in model.optimizer.variables if hasattr(v, "_sharded")]
    num_held = sum(copies(slot)[0].shape.num_elements() for slot in slots)
    elements = sum(int(np.prod(w.shape)) for w in model.trainable_variables)
    added = {shard: num_shape_operations(shard) for shard in ("optimizer", "parameters")}
    return {
        "weights": apart(model, one),
        "held": num_held,
        "sent": sent,
        "elements": elements,
        "added": added,
    }


def num_shape_operations(shard):
    """By type, how many operations that only cut or pad a further layer adds to a step."""
    numbers, fewest, sharding._FEWEST = [], sharding._FEWEST, 20
    for num_layers in (2, 3):
        graphs = []

        def loss(targets, outputs, graphs=graphs):
            graphs.append(tf.compat.v1.get_default_graph())
            return tf.reduce_mean(tf.square(targets - outputs), axis=-1)

        def build_deep(num_layers=num_layers):
            hidden = [layers.Dense(8) for _ in range(num_layers)]  # The replicas divide its rows.
            return keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(2)])

        model = parallel(build_deep, "every_step", shard=shard)
        model.compile("adam", loss)
        model.fit(*data(ROWS), batch_size=ROWS, verbose=0)
        step = max((graph.get_operations() for graph in graphs), key=len)
        numbers.append(collections.Counter(op.type for op in step))
    sharding._FEWEST = fewest
    added = numbers[1] - numbers[0]
    return {kind: added[kind] for kind in ("Pack", "Pad", "Split", "SplitV", "StridedSlice")}


def clipped_shares(workers, folder):
    sharding._FEWEST = 10  # The table has 18 elements.
    return apart_in_shares(CLIPPED)


def apart_in_shares(cases):
    """How far from one device shares end, by what is shared and by the case's options of SGD."""
    differences = {}
    for name, options in cases.items():
        trained(one := alone(build_read), ROWS, optimizer=keras.optimizers.SGD(0.1, **options))
        for shard in ("optimizer", "parameters"):
            other = parallel(build_read, "every_step", shard=shard)
            trained(other, ROWS, optimizer=keras.optimizers.SGD(0.1, **options))
            differences[f"{shard}, {name}"] = apart(other, one)
    return differences


def noise_of(shard):
    """What the gradient noise scale has seen of four updates."""
    model = parallel(build_read, "accumulate:auto", shard=shard)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    for _ in range(4):
        model.train_on_batch(*data(ROWS))
    seen = model.kept_between_updates()
    return np.array([float(seen[name]) for name in ("noise", "signal", "pairs")])


def accumulated_shares(workers, folder):
    """Each of four replicas adds up its share of the gradients of several steps."""
    sharding._FEWEST = 10
    momentum = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    expected = trained(one := alone(build_read), ROWS * STEPS, optimizer=momentum())
    results, rows = {}, set()
    for shard in ("gradients", "parameters"):
        model = parallel(build_read, shard=shard)
        history = trained(model, ROWS, optimizer=momentum())
        rows.add(float(model.metrics[0].count.numpy()))  # Of which a mean says nothing.
        results[f"{shard}, by the step"] = apart(model, one)
        results["history"] = max(results.get("history", 0), largest(history, expected))
    results["rows"] = list(rows)
    sizes = [pieces[0].shape.num_elements() for _, pieces in model._policy._accumulators.values()]
    results["held"] = [sum(sizes), sum(int(np.prod(w.shape)) for w in model.weights)]
    scaled = lambda: keras.optimizers.LossScaleOptimizer(momentum())  # noqa: E731
    trained(model := parallel(build_read, shard="parameters"), ROWS, optimizer=scaled())
    results["loss scaling"] = apart(model, one)
    results["noise"] = float(np.abs(noise_of("parameters") / noise_of(None) - 1).max())
    sent = []
    for steps in (None, STEPS):
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        before = workers.traffic.read()["sums"]
        trained(parallel(build_read, "every_step", shard="optimizer"), ROWS, optimizer=optimizer)
        sent.append(workers.traffic.read()["sums"] - before)
    results["sent"] = sent[1] / sent[0]
    cases = CLIPPED | {"loss scale": {"loss_scale_factor": 8.0}}
    accumulating = {"gradient_accumulation_steps": STEPS}
    return results | apart_in_shares({name: case | accumulating for name, case in cases.items()})


def compiled():
    """As a file is read: it has an optimizer before anybody says that it is shared out."""
    model = build_masked()
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def shares_that_go_on(workers, folder):
    """Beside accumulated gradients, from checkpoints and backups, under a loss of two calls."""
    differences = {}
    accumulating = parallel(build, shard="optimizer")
    trained(accumulating, ROWS)
    whole = alone(build)
    trained(whole, ROWS * STEPS)
    differences["accumulated"] = apart(accumulating, whole)
    checkpoint = tfparallel.callbacks.Checkpoint(folder + "/sharded")
    trained(parallel(build, shard="optimizer"), ROWS, epochs=1, callbacks=[checkpoint])
    resumed = parallel(build)  # With whole slots.
    checkpoint = tfparallel.callbacks.Checkpoint(folder + "/sharded")
    trained(resumed, ROWS, callbacks=[checkpoint])
    differences["resumed"] = apart(resumed, whole)
    backed = parallel(build, "every_step", shard="optimizer")
    trained(backed, ROWS, epochs=1, optimizer=keras.optimizers.Adam(0.05))
    backup = keras.callbacks.BackupAndRestore(folder + "/backup")  # With nothing to restore.
    fitted = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    backed.fit(*data(57), callbacks=[backup], **fitted)
    trained(one := alone(build), ROWS, optimizer=keras.optimizers.Adam(0.05))
    differences["backed up"] = apart(backed, one)
    for interrupted in (True, False):  # And with something: the chief alone reads the file.
        restored = parallel(build, "every_step", shard="optimizer")
        backup = keras.callbacks.BackupAndRestore(folder + "/restored")
        callbacks = [backup, InterruptsEpoch()] if interrupted else [backup]
        with contextlib.suppress(KeyboardInterrupt):
            trained(restored, ROWS, optimizer=keras.optimizers.Adam(0.05), callbacks=callbacks)
    differences["restored"] = apart(restored, one)
    trained(one := alone(build_twice), ROWS)
    trained(twice := parallel(build_twice, "every_step", shard="optimizer"), ROWS)
    differences["called twice"] = apart(twice, one)
    one, other = alone(compiled), parallel(compiled, "every_step", shard="optimizer")
    for model in (one, other):
        model.fit(*data(57, masked=True), **fitted)
    differences["compiled by its function"] = apart(other, one)
    return differences


def parameters(workers, folder):
    """Each of four replicas keeps its share of the weights, gathers it and writes files of it."""
    sharding._FEWEST = 20
    results = {}
    for name, optimizer in PARAMETERS.items():
        expected = trained(one := alone(build), ROWS, optimizer=optimizer())
        model = parallel(build, "every_step", shard="parameters")
        trained(model, ROWS, optimizer=optimizer())
        results[name] = apart(model, one)
    kernels = [weight for weight in model.weights if len(weight.shape) > 1]
    num_held = sum(kernel.pieces[0].shape.num_elements() for kernel in kernels)
    results["held"] = [num_held, sum(int(np.prod(kernel.shape)) for kernel in kernels)]
    with path_of_chief(folder + "/shared_out.keras", workers.worker_index == 0) as path:
        model.save(path)
        results["file"] = apart(keras.models.load_model(path), one)
    results["writers"] = [saved_by_all(model, one, f"{folder}/by_all{end}") for end in FILES]
    for interrupts in ([Interrupts()], []):
        checkpoint = tfparallel.callbacks.Checkpoint(folder + "/shared_out", every_steps=2)
        resumed = parallel(build, "every_step", shard="parameters")
        with contextlib.suppress(KeyboardInterrupt):
            callbacks = [checkpoint, *interrupts]
            history = trained(resumed, ROWS, optimizer=optimizer(), callbacks=callbacks)
    results["resumed"] = apart(resumed, one)
    results["history"] = largest(history, expected)
    # A disk that is gone where the chief is to write: the others read shares until it has failed.
    lost, failing = folder + "/lost", parallel(build, "every_step", shard="parameters")
    is_chief = workers.worker_index == 0
    removes = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: shutil.rmtree(lost) if is_chief else None
    )
    try:
        trained(failing, ROWS, callbacks=[removes, tfparallel.callbacks.Checkpoint(lost)])
    except RuntimeError as error:
        results["disk"] = str(error)
    whole = resumed.get_weights()
    if workers.worker_index == 0:
        resumed.set_weights([weight * 2 for weight in whole])
    for name, callbacks in (
        ("loaded by one", []),
        ("backup", [keras.callbacks.BackupAndRestore(folder + "/of_one")]),
    ):
        try:
            resumed.fit(*data(16), batch_size=ROWS, verbose=0, callbacks=callbacks)
        except (RuntimeError, ValueError) as error:
            results[name] = str(error)
    results |= saved_by_one(workers, resumed, folder + "/alone.weights.h5")
    return results


def saved_by_all(model, one, path):
    """Whether this worker wrote a file that all save in one place; the difference of the file."""
    opened = []
    file = h5py.File
    h5py.File = lambda *args, **kwargs: opened.append(args) or file(*args, **kwargs)
    try:
        (model.save if path.endswith(".keras") else model.save_weights)(path)
    finally:
        h5py.File = file
    if path.endswith(".keras"):
        return bool(opened), apart(keras.models.load_model(path), one)
    copy = alone(build)
    copy.load_weights(path)
    return bool(opened), apart(copy, one)


def saved_by_one(workers, model, path):
    """The chief alone saves; when it has waited long enough, the others come too late."""
    waited, whole_slots._SAVE_SECONDS = whole_slots._SAVE_SECONDS, 5.0
    messages = {}
    for worker in range(workers.num_workers):
        if workers.worker_index == worker:
            try:
                model.save_weights(path)
            except RuntimeError as error:
                messages["saved by one"] = str(error)
        workers.exchange(None, "what each has done")
    whole_slots._SAVE_SECONDS = waited
    return messages


FILES = (".keras", ".weights.h5")
PARAMETERS = {
    "clipnorm": lambda: keras.optimizers.Adam(0.05, clipnorm=0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05)),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1),
}

PARTS = {
    "parameters": parameters,
    "larger batch": larger_batch,
    "options": options_of_keras,
    "unread inputs": unread_inputs,
    "logs of outputs": logs_of_outputs,
    "dropout": dropout,
    "adascale": adascale,
    "sums": sums,
    "resumed": resumed,
    "loss scaling": loss_scaling,
    "shares": shares,
    "clipped shares": clipped_shares,
    "accumulated shares": accumulated_shares,
    "shares that go on": shares_that_go_on,
    "compressed": compressed,
    "refused": refusals,
}


def main(folder, parts):
    keras.config.set_floatx("float64")
    workers = tfparallel.MultiWorkerMirroredStrategy().workers
    return {part: PARTS[part](workers, folder) for part in parts}
