"""The runs of `adascale.py`: one model for each batch size, which is trained again and again."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import numpy as np
import tensorflow as tf

import tfparallel


class Cosine(keras.optimizers.schedules.LearningRateSchedule):
    """Half a cosine from `rate` to 0 over `num_steps`, which may be set between two runs."""

    def __init__(self):
        self.rate, self.num_steps = tf.Variable(0.0), tf.Variable(1.0)

    def __call__(self, step):
        done = tf.minimum(tf.cast(step, tf.float32) / self.num_steps, 1.0)
        return self.rate * 0.5 * (1.0 + tf.cos(np.pi * done))


class Ends(keras.callbacks.Callback):
    """Ends a run when its updates stand for enough steps of the small batch."""

    def __init__(self, num_steps):
        super().__init__()
        self.num_steps = num_steps

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.model.num_scale_invariant_steps >= self.num_steps


class Study:
    """Trains a dense network by any rule.

    Args:
        train: Rows and labels.
        validation: The same, held out.
        batch_size: The small batch.
        num_steps: Its number of steps.
        momentum: Of SGD.
    """

    versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__}

    def __init__(self, train, validation, batch_size, num_steps, momentum):
        self.train, self.validation = train, validation
        self.batch_size, self.num_steps, self.momentum = batch_size, num_steps, momentum
        self._models = {}

    def _model(self, scale, sync):
        """A model, its schedule, and all that a run changes, with the values before it."""
        if (scale, sync) not in self._models:
            model = tfparallel.data_parallel(self._build, devices=["CPU:0"], sync=sync)
            schedule = Cosine()
            model.compile(
                keras.optimizers.SGD(schedule, momentum=self.momentum),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
            model.optimizer.build(model.trainable_variables)
            variables = [*model.optimizer.variables, *model.kept_between_updates().values()]
            self._models[scale, sync] = model, schedule, [(v, v.numpy()) for v in variables]
        return self._models[scale, sync]

    def _build(self):
        hidden = keras.layers.Dense(64, "relu")
        return keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)])

    def run(self, seed, scale, rate, num_updates=None):
        """Trains from a seed, and returns the figures of the last weights.

        Args:
            seed: Of the weights and of the order of the examples.
            scale: S.
            rate: The first learning rate.
            num_updates: The number of updates; None for AdaScale's own.
        """
        follows_gain = num_updates is None
        sync = f"adascale:{scale}" if follows_gain else "every_step"
        model, schedule, state = self._model(scale, sync)
        for variable, value in state:
            variable.assign(value)
        keras.utils.set_random_seed(seed)
        model.set_weights(self._build().get_weights())
        schedule.rate.assign(rate)
        schedule.num_steps.assign(self.num_steps if follows_gain else num_updates)
        examples = tf.data.Dataset.from_tensor_slices(self.train)
        examples = examples.shuffle(len(self.train[0]), seed=seed).repeat()
        model.fit(
            examples.batch(self.batch_size * (1 if follows_gain else scale), drop_remainder=True),
            steps_per_epoch=self.num_steps * scale if follows_gain else num_updates,
            callbacks=[Ends(self.num_steps)] if follows_gain else [],
            shuffle=False,
            verbose=0,
        )
        updates = int(model.optimizer.iterations)
        of_train, of_validation = (self._evaluate(model, *data) for data in self.both)
        return {
            "loss": of_train[0],
            "validation_loss": of_validation[0],
            "accuracy": of_validation[1],
            "num_updates": updates,
            "gain": model.num_scale_invariant_steps / updates,
        }

    @property
    def both(self):
        """The examples to train on, and those that are held out."""
        return self.train, self.validation

    def _evaluate(self, model, x, y):
        small, _, _ = self._model(1, "every_step")  # One trace serves all.
        small.set_weights(model.get_weights())
        return small.evaluate(x, y, batch_size=len(x), verbose=0)
