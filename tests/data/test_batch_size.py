"""How many rows a full batch has, before one is read."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.data import EpochBatches
from tfparallel.data.batch_size import full_batch_size

X = np.ones((17, 3))


class Read(keras.utils.PyDataset):
    """Batches of a size that nobody knows ahead."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[:8], X[:8]


ROWS = tf.data.Dataset.from_tensor_slices((X, X))
EIGHT = ROWS.batch(8)


@pytest.mark.parametrize(
    ("x", "options", "expected"),
    [
        (X, {}, 17),
        (X, {"batch_size": 8}, 8),
        (np.ones((40, 3)), {}, 32),
        (X, {"validation_split": 0.3}, 11),
        ({"a": X, "b": [X]}, {"batch_size": 8}, 8),
        (tf.ragged.constant([[1], [2, 3]]), {"batch_size": 8}, 2),
        ((pair for pair in [(X, X)]), {}, None),
        (Read(), {}, None),
        (EpochBatches((X, X), global_batch_size=5, seed=0).dataset, {}, 5),
        (EpochBatches(Read(), global_batch_size=5, seed=0).dataset, {}, None),
        (tf.data.Dataset.from_tensors((X, X)), {}, 17),
        (ROWS.batch(8, drop_remainder=True), {}, 8),
        (EIGHT, {}, 8),
        (EIGHT.shuffle(2).repeat().take(5).skip(1).cache().prefetch(2), {}, 8),
        (ROWS.repeat().padded_batch(8).shard(2, 0).with_options(tf.data.Options()), {}, 8),
        (EIGHT.apply(tf.data.experimental.assert_cardinality(3)), {}, 8),
        (EIGHT.map(lambda x, y: (x[:2], y[:2])), {}, None),
        (EIGHT.unbatch().batch(4), {}, 4),
        (tf.data.Dataset.from_generator(lambda: [1], output_types=tf.int32), {}, None),
    ],
    ids=map(str, range(19)),
)
def test_of_what_fit_takes(x, options, expected):
    assert full_batch_size(x, **options) == expected
