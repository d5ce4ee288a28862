"""What a user's own `train_step` does in several tests."""

import tensorflow as tf


def updated(model, data):
    """Takes a step on the mean squared error, and returns it."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return loss
