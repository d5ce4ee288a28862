"""A custom training loop on several workers, the way TensorFlow's tutorial does it."""

import os

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

GLOBAL_BATCH_SIZE = 48
NUM_EPOCHS, STEPS_PER_EPOCH = 2, 6


def digits_arrays():
    digits = load_digits()
    num_examples = GLOBAL_BATCH_SIZE * STEPS_PER_EPOCH
    x = (digits.data / np.float32(16)).astype("float64")[:num_examples]
    return x, digits.target.astype("int64")[:num_examples]


def dataset_of_worker(input_context):
    """Each worker's own share, in batches of a replica."""
    batch_size = input_context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
    dataset = tf.data.Dataset.from_tensor_slices(digits_arrays()).repeat()
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size).prefetch(2)


def global_dataset():
    return tf.data.Dataset.from_tensor_slices(digits_arrays()).repeat().batch(GLOBAL_BATCH_SIZE)


def build_model():
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def main(folder, from_function):
    keras.config.set_floatx("float64")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        if from_function:
            dataset = strategy.distribute_datasets_from_function(dataset_of_worker)
        else:
            dataset = strategy.experimental_distribute_dataset(global_dataset())
        model = build_model()
        optimizer = keras.optimizers.RMSprop(learning_rate=0.005)
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)(
                y, predictions
            )
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, predictions)
        return loss

    @tf.function
    def train_step(iterator):
        losses = strategy.run(step, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    epoch = tf.Variable(0, dtype=tf.int64, name="epoch")
    checkpoint = tf.train.Checkpoint(model=model, epoch=epoch)
    resolver = strategy.cluster_resolver
    task_id = resolver.task_id if resolver else 0
    manager = tf.train.CheckpointManager(
        checkpoint, os.path.join(folder, f"checkpoints_{task_id}"), max_to_keep=1
    )
    losses, accuracies = [], []
    iterator = iter(dataset)
    while epoch < NUM_EPOCHS:
        total = 0.0
        for _ in range(STEPS_PER_EPOCH):
            total += train_step(iterator)
        losses.append(float(total) / STEPS_PER_EPOCH)
        accuracies.append(float(accuracy.result()))
        epoch.assign_add(1)
        accuracy.reset_state()
        manager.save()
    restored = build_model()
    tf.train.Checkpoint(model=restored).restore(manager.latest_checkpoint).expect_partial()
    return {
        "losses": losses,
        "accuracies": accuracies,
        "weights": [weight.numpy().tolist() for weight in model.weights],
        "restored": [weight.numpy().tolist() for weight in restored.weights],
    }
