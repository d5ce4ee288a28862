"""What Ray Train and Ray Tune run in these tests, by name.

`of_the_issue` is the script of ray#47464, the example of Ray's documentation, which fails with
Keras 3 under TensorFlow's strategy. Changed: the strategy is tfparallel's, every worker reads the
batch of all workers (`datasets_to_split=[]`), and a file of weights has Keras 3's ending.
"""

import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf

import tfparallel
from tests.ray import training


def with_data_parallel(config):
    weights = training.train(config["folder"])
    if tfparallel.worker_index() == 0:
        np.savez(pathlib.Path(config["folder"], "weights.npz"), *weights)


def build_model():
    return tf.keras.Sequential([tf.keras.layers.Dense(1, activation="linear", input_shape=(1,))])


def of_the_issue(config):
    from ray import train
    from ray.train import Checkpoint

    dataset_shard = train.get_dataset_shard("train")
    strategy = tfparallel.MultiWorkerMirroredStrategy()
    with strategy.scope():
        tf.keras.utils.set_random_seed(7)
        model = build_model()
        model.compile(optimizer="Adam", loss="mean_squared_error", metrics=["mse"])
    tf_dataset = dataset_shard.to_tf(feature_columns="x", label_columns="y", batch_size=4)
    for _ in range(config["num_epochs"]):
        model.fit(tf_dataset, verbose=0)
        checkpoint_dir = tempfile.mkdtemp()
        model.save_weights(os.path.join(checkpoint_dir, "my_checkpoint.weights.h5"))
        checkpoint = Checkpoint.from_directory(checkpoint_dir)
        train.report(
            {"weights": [weight.tolist() for weight in model.get_weights()]},
            checkpoint=checkpoint,
        )


def trial(config):
    """A trial of Ray Tune, which is a job of two workers."""
    from ray import tune

    folder = pathlib.Path(config["folder"], f"seed_{config['seed']}")
    folder.mkdir()
    weights = tfparallel.ray.fit(training.train, 2, args=[str(folder)])
    tune.report({"sum": float(sum(np.abs(weight).sum() for weight in weights))})
