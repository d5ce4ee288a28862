"""What each worker of `test_outside_data.py` runs: data of other packages, interrupted or not."""

import pathlib

import keras
import numpy as np

import tfparallel
from tfparallel.callbacks import Checkpoint

NUM_EXAMPLES, BATCH, EPOCHS = 22, 4, 3
STOPS_AT = (1, 3)  # The epoch, and the step in it, before which the job is interrupted.
WRITTEN_AT = (1, 2)  # The last checkpoint.


def row(index):
    return np.array([index, index % 5, 1.0]) / NUM_EXAMPLES


def of_grain():
    """With noise that Grain draws by the index, and anew in each epoch."""
    import grain

    def example(index, generator):
        return row(index) + 0.1 * generator.normal(size=3), index / NUM_EXAMPLES

    return grain.MapDataset.range(NUM_EXAMPLES).seed(1).random_map(example)


def of_hugging_face():
    import datasets

    columns = {"x": [row(i) for i in range(NUM_EXAMPLES)], "y": np.arange(NUM_EXAMPLES) / 10}
    data = datasets.Dataset.from_dict(columns).with_format("numpy")
    return tfparallel.data.Examples(data, lambda one: (one["x"], one["y"]))


def of_grain_loader():
    """A stream: `fit` takes it as it is, and a resumed run reads what it has seen again."""
    import grain

    examples = [(row(i), np.array([i / NUM_EXAMPLES])) for i in range(NUM_EXAMPLES)]
    return grain.DataLoader(
        data_source=examples,
        sampler=grain.samplers.IndexSampler(NUM_EXAMPLES, shuffle=True, seed=2, num_epochs=1),
        operations=[grain.transforms.Batch(BATCH)],
    )


SOURCES = {
    "grain": (of_grain, "grain"),
    "loader": (of_grain_loader, "grain"),
    "datasets": (of_hugging_face, "datasets"),
}


class Interrupts(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, batch) == STOPS_AT:
            raise InterruptedError


def train(source, folder, strategy=None, interrupts=False):
    """Returns the weights and losses; None if interrupted."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(4)
    # Two devices, since on one of them Keras counts a step too many of data of unknown size.
    devices = {"devices": ["CPU:0", "CPU:1"]} if strategy is None else {"strategy": strategy}
    model = tfparallel.data_parallel(
        lambda: keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)]
        ),
        **devices,
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
    data = SOURCES[source][0]()
    batches = None
    if source != "loader":
        batches = tfparallel.data.EpochBatches(data, global_batch_size=BATCH, seed=6)
        data = batches.dataset
    callbacks = [] if batches is None else [batches]
    callbacks += [Interrupts()] if interrupts else []
    callbacks.append(Checkpoint(pathlib.Path(folder, source), every_steps=2, batches=batches))
    try:
        history = model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    except InterruptedError:
        return None
    return {
        "losses": history.history["loss"],
        "weights": [weight.numpy().tolist() for weight in model.weights],
        "resumed": callbacks[-1].resumed,
    }


def main(folder, sources):
    strategy = tfparallel.MultiWorkerMirroredStrategy()
    results = {name: train(name, folder, strategy, interrupts=True) for name in sources}
    return results | {"whole": {name: train(name, f"{folder}/whole", strategy) for name in sources}}
