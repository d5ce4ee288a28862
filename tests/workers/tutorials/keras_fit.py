"""Multi-worker training with Keras, the way TensorFlow's tutorial does it."""

import os

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

PER_WORKER_BATCH_SIZE = 32


def digits_dataset(batch_size):
    digits = load_digits()
    x = (digits.data / np.float32(16)).astype("float64")[:700]
    y = digits.target.astype("int64")[:700]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(700, seed=1).repeat()
    dataset = dataset.batch(batch_size)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options)


def build_and_compile_model():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )
    return model


def is_chief(task_type, task_id):
    return task_type is None or task_type == "chief" or (task_type == "worker" and task_id == 0)


def write_path(path, task_type, task_id):
    """All workers save; what the others write is thrown away."""
    if is_chief(task_type, task_id):
        return path
    directory = os.path.join(os.path.dirname(path), f"temporary_{task_id}")
    os.makedirs(directory, exist_ok=True)
    return os.path.join(directory, os.path.basename(path))


def main(folder, num_workers):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(5)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    global_batch_size = PER_WORKER_BATCH_SIZE * num_workers
    dataset = digits_dataset(global_batch_size)
    with strategy.scope():
        model = build_and_compile_model()
    history = model.fit(dataset, epochs=2, steps_per_epoch=10, verbose=0)

    resolver = strategy.cluster_resolver
    task_type, task_id = (resolver.task_type, resolver.task_id) if resolver else (None, None)
    path = write_path(os.path.join(folder, "model.keras"), task_type, task_id)
    model.save(path)
    if not is_chief(task_type, task_id):
        os.remove(path)
        os.rmdir(os.path.dirname(path))
    return {
        "losses": history.history["loss"],
        "accuracies": history.history["accuracy"],
        "weights": [weight.numpy().tolist() for weight in model.weights],
        "task": [task_type, task_id],
    }
