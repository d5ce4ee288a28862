"""One worker of a contender of `sync.py`: trains a task by one policy, from one seed at a time.

{"kind": "powersgd:2", "cores": [0], …}                   ->  {"tensorflow": "2.21.0", …}
{"task": "digits_cnn", "seed": 0, "num_steps": 320, …}    ->  {"losses": [2.1, …], …}

At every eighth step, where under all policies all workers have equal weights, a copy of the weights
is kept. Plain Keras evaluates the copies after the training: `evaluate` in the middle of it would
average the weights of workers that take local steps, and change the result.
"""

import functools
import importlib
import time
from typing import NamedTuple

import contender
import dialog

EVALUATED_EVERY = 8


class Task(NamedTuple):
    """A task file of this project, and how it is trained.

    Attributes:
        module: The file's module.
        global_batch_size: Examples of a step, of both workers together.
        num_validation: Examples that are held out, the first ones of the file's.
        num_steps: How long it is trained.
    """

    module: str
    global_batch_size: int
    num_validation: int
    num_steps: int

    def load(self):
        return importlib.import_module(self.module)


TASKS = {
    "digits_cnn": Task(
        "models.digits_cnn", global_batch_size=64, num_validation=359, num_steps=320
    ),
    "transformer": Task(
        "models.transformer", global_batch_size=32, num_validation=128, num_steps=192
    ),
}


@functools.cache
def evaluated(name):
    """Returns a function that computes the loss and the accuracy of a task with some weights."""
    task = TASKS[name]
    _, (x, y) = task.load().load_data()
    x, y = x[: task.num_validation], y[: task.num_validation]
    model = task.load().build_model()
    task.load().compile_model(model)

    def evaluate(weights):
        model.set_weights(weights)
        return model.evaluate(x, y, batch_size=len(x), verbose=0)

    return evaluate


def make_record(traffic):
    """Returns a callback that times each step, and copies the weights at every eighth."""
    import keras

    class Record(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.seconds, self.sent_bytes, self.weights = [], [], []
            self.before = sum(traffic.read().values())
            self.last = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.seconds.append(time.perf_counter() - self.last)
            if len(self.seconds) % EVALUATED_EVERY == 0:
                self.sent_bytes.append(sum(traffic.read().values()) - self.before)
                self.weights.append(self.model.get_weights())
            self.last = time.perf_counter()  # The time of a copy is not part of a step.

    return Record()


def train(workers, policy, name, seed, num_steps, num_epochs):
    """Trains a task; returns its figures, as JSON holds them."""
    import keras
    import tensorflow as tf

    import tfparallel

    task = TASKS[name]
    keras.utils.set_random_seed(seed)
    model = tfparallel.data_parallel(task.load().build_model, **policy)
    task.load().compile_model(model)
    (x, y), _ = task.load().load_data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed).repeat()
    dataset = dataset.batch(task.global_batch_size).prefetch(2)
    record, num_sums = make_record(workers.traffic), workers.traffic.num_sums
    model.fit(
        dataset,
        epochs=num_epochs,
        steps_per_epoch=num_steps // num_epochs,
        verbose=0,
        callbacks=[record],
    )
    loss, accuracy = evaluated(name)(model.get_weights())
    looks = [evaluated(name)(weights) for weights in record.weights]
    return {
        "losses": [loss for loss, _ in looks],
        "accuracies": [accuracy for _, accuracy in looks],
        "seconds": record.seconds,
        "sent_bytes": record.sent_bytes,
        "sent_bytes_in_all": sum(workers.traffic.read().values()) - record.before,
        "num_reductions": workers.traffic.num_sums - num_sums,
        "loss": loss,
        "accuracy": accuracy,
    }


def main():
    order, reply = dialog.begin()  # Before TensorFlow makes its threads.
    import keras
    import tensorflow as tf

    import tfparallel

    policy = contender.POLICIES[order["kind"]]
    strategy = tfparallel.MultiWorkerMirroredStrategy(compression=policy.get("compression"))
    reply(tensorflow=tf.__version__, keras=keras.__version__, sums=strategy.workers.implementation)
    for request in dialog.requests():
        name = request.pop("task")
        reply(**train(strategy.workers, policy, name, **request))


if __name__ == "__main__":
    main()
