"""What each worker of a large job runs for `test_many.py`, over TensorFlow's ring.

TensorFlow ranks workers by the text of their indices: 0, 1, 10, 2, … Here is all that goes by rank.
"""

import keras
import numpy as np
import tensorflow as tf

import tfparallel


def main(part):
    if tfparallel.Cluster.from_env().num_workers > 1:
        tfparallel.init(all_reduce="ring")
    return {"collectives": collectives, "training": training}[part]()


def collectives():
    """What each collective makes of the workers' indices."""
    workers = tfparallel.MultiWorkerMirroredStrategy().workers
    worker, ascending = workers.worker_index, tf.range(2.0 * workers.num_workers)
    return {
        "ranks": workers._worker_of_rank,
        "all_gather": tfparallel.all_gather(tf.constant([worker])).numpy().tolist(),
        "uneven": tfparallel.all_gather(tf.fill([worker % 3], worker)).numpy().tolist(),
        "exchange": workers.exchange(worker, "a test"),
        "reduce_scatter": tfparallel.reduce_scatter(ascending).numpy().tolist(),
    }


def column():
    return tf.fill([2, 1], tf.distribute.get_replica_context().replica_id_in_sync_group)


def of_all_rows(y_true, y_pred):
    """A loss that is not a sum of the rows'."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def build():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(1)])


def training():
    """What comes of uneven batches, in plain Keras where there is one worker."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x = np.random.default_rng(0).normal(size=(50, 3))
    gathered = None
    if tfparallel.num_workers() == 1:
        model = build()
    else:
        model = tfparallel.data_parallel(build, shard="optimizer")
        strategy = model.distribute_strategy
        gathered = tf.function(lambda: strategy.gather(strategy.run(column), 1))().numpy().tolist()
    model.compile(keras.optimizers.Adam(0.1), of_all_rows)
    history = model.fit(x, x.sum(1, keepdims=True), 25, epochs=2, shuffle=False, verbose=0)
    return {
        "gathered": gathered,
        "losses": history.history["loss"],
        "weights": [weight.tolist() for weight in model.get_weights()],
        "predictions": model.predict(x[:25], 25, verbose=0).tolist(),
    }
