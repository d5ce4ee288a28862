"""What each worker of `test_compression.py` runs."""

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tfparallel.collectives.compression import compression_of

KINDS = ("bf16", "fp16", "topk:0.01", "powersgd:2")
RATE, STEPS, ROWS, WIDTH = 0.5, 4, 6, 128


def build():
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(WIDTH, name="dense")(inputs))


def trained(make, steps=STEPS, **of_optimizer):
    """Trains where the gradient is the same in every step, whatever the weights are."""
    keras.utils.set_random_seed(3)
    model = make(build)
    model.compile(keras.optimizers.SGD(RATE, **of_optimizer), "mae")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, WIDTH)).astype("float32")
    y = np.full((ROWS, WIDTH), -1e6, "float32")  # Below every output: each error has one sign.
    before = model.get_weights()
    sent = tfparallel.callbacks.SentBytes()
    data = tf.data.Dataset.from_tensors((x, y)).repeat(steps)
    model.fit(data, epochs=1, verbose=0, callbacks=[sent])
    return model, before, sent.in_a_step["sums"]


def left_over(compression, model, workers):
    """What all workers have not sent yet, of each weight."""
    residuals = [compression.left_over(weight) for weight in model.trainable_variables]
    values = [
        tf.zeros(weight.shape) if residual is None else tf.convert_to_tensor(residual)
        for weight, residual in zip(model.trainable_variables, residuals, strict=True)
    ]
    return [total.numpy() for total in workers.all_reduce(values)]


def accounted(workers, kind, make, **of_optimizer):
    """Whether what the weights moved by, and what is left over, is what plain steps move by."""
    workers.compression = None
    model, before, plain_bytes = trained(make, **of_optimizer)
    expected = [then - now for then, now in zip(before, model.get_weights(), strict=True)]
    workers.compression = compression_of(kind)
    model, before, sent_bytes = trained(make, **of_optimizer)
    moved = [then - now for then, now in zip(before, model.get_weights(), strict=True)]
    residuals = left_over(workers.compression, model, workers)
    # What the optimizer got is the mean of the gradients of so many steps.
    share = RATE / of_optimizer.get("gradient_accumulation_steps", 1)
    apart = [
        float(np.abs(m + share * k - w).max() / np.abs(w).max())
        for m, k, w in zip(moved, residuals, expected, strict=True)
    ]
    rows = [np.concatenate([w.ravel() for w in model.get_weights()])[None]]
    of_all = workers.all_gather([tf.constant(rows[0])], [1] * workers.num_workers)[0].numpy()
    return {
        "apart": max(apart),
        "left over": float(max(np.abs(k).max() for k in residuals)),
        "bytes": sent_bytes / plain_bytes,
        "equal on all": bool((of_all == of_all[0]).all()),
    }


def of_an_overflow(workers, kind):
    """A gradient with a number that is none on worker 1, after one without, in two buckets."""
    workers.compression, workers.bucket_bytes = compression_of(kind), 4 * WIDTH * WIDTH
    weights = [keras.Variable(np.zeros((WIDTH, WIDTH), "float32")) for _ in range(2)]
    generator = np.random.default_rng(workers.worker_index)
    gradient = tf.constant(generator.normal(size=(WIDTH, WIDTH)).astype("float32"))
    broken = gradient
    if workers.worker_index == 1:
        broken += tf.one_hot(0, WIDTH, on_value=float("inf"))

    def left_over():
        return np.array([workers.compression.left_over(weight).numpy() for weight in weights])

    first = workers.all_reduce_gradients([gradient, gradient], weights)
    before = left_over()
    second = workers.all_reduce_gradients([gradient, broken], weights)
    after = left_over()
    third = workers.all_reduce_gradients([gradient, gradient], weights)
    workers.bucket_bytes = None
    return {
        "is seen": [bool(np.isfinite(totals).all()) for totals in (first, second, third)],
        "left over is finite": bool(np.isfinite(after).all()),
        "is kept": bool((before == after).all()),
    }


def resumed(workers, kind, folder):
    """How far a run that was interrupted ends from one that was not."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(3 * ROWS, WIDTH)).astype("float32")
    y = generator.normal(size=(3 * ROWS, WIDTH)).astype("float32")

    def train(epochs, *callbacks):
        workers.compression = compression_of(kind)
        keras.utils.set_random_seed(3)
        model = tfparallel.data_parallel(build)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
        model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **options)
        return model

    whole = train(2)
    train(1, tfparallel.callbacks.Checkpoint(folder))
    model = train(2, tfparallel.callbacks.Checkpoint(folder))
    pairs = zip(whole.get_weights(), model.get_weights(), strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


def of_other_workers(workers):
    """What each worker takes of the state of three."""
    compression, weight = compression_of("topk:0.5"), keras.Variable(np.zeros((2,), "float32"))
    arrays = [np.array([[1, 2], [3, 4], [5, 6]], "float32"), np.ones((4,), "float32")]
    compression.restore(workers, [weight], ["0/left over", "0/factor of rank 3"], arrays)
    return compression.left_over(weight).numpy().tolist()


def build_attention():
    x = keras.Input((5, WIDTH))
    attended = keras.layers.MultiHeadAttention(2, WIDTH // 2)(x, x)
    return keras.Model(x, keras.layers.Dense(WIDTH)(attended))


def of_attention(workers, kind):
    """What a step sends where gradients come from `einsum`; and the size of the gradients."""
    sent = {}
    for name in (None, kind):
        workers.compression = compression_of(name)
        model = tfparallel.data_parallel(build_attention)
        model.compile("sgd", "mse")
        reads = tfparallel.callbacks.SentBytes()
        x = np.ones((3 * ROWS, 5, WIDTH), "float32")
        model.fit(x, x, batch_size=ROWS, verbose=0, callbacks=[reads])
        sent[str(name)] = reads.in_a_step["sums"]
    return sent | {"gradients": 4 * model.count_params()}


def main(transport, folder):
    strategy = tfparallel.MultiWorkerMirroredStrategy(all_reduce=transport)
    workers = strategy.workers

    def data(build):
        return tfparallel.data_parallel(build, strategy)

    def hybrid(build):
        return tfparallel.hybrid_parallel(build, tfparallel.Mesh(data=4), ["CPU:0", "CPU:1"])

    results = {}
    for kind in KINDS:
        results[kind] = accounted(workers, kind, data)
        results[f"{kind}, overflow"] = of_an_overflow(workers, kind)
    results["attention"] = of_attention(workers, "powersgd:2")
    if transport != "mpi":  # The rest does not depend on it.
        return results
    results["accumulating"] = accounted(workers, "topk:0.01", data, gradient_accumulation_steps=2)
    results["hybrid"] = accounted(workers, "powersgd:2", hybrid)
    results["of others"] = of_other_workers(workers)
    for kind in ("topk:0.01", "powersgd:2"):
        results[f"{kind}, resumed"] = resumed(workers, kind, f"{folder}/{kind}")
    workers.bucket_bytes = 256
    results["buckets"] = accounted(workers, "bf16", data)
    try:
        tfparallel.data_parallel(build, compression="bf16")
    except ValueError as error:
        results["another"] = str(error)
    return results
