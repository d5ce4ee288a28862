"""Examples and batches that differ in dtype, shape or parts from the first one."""

import keras
import numpy as np
import pytest

from tfparallel.data import EpochBatches, Examples

ROW = np.ones(2, "float32")


class Listed(keras.utils.PyDataset):
    """The batches of a list."""

    def __init__(self, *batches):
        super().__init__()
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


# --- Parts ------------------------------------------------------------------------------------


def test_sample_weights_do_not_become_labels():
    """The None of `(x, None, sample_weight)` was dropped. Keras refuses it, too."""
    message = r"Only the last parts .* may be None. Received: y=None in %s. Pass"
    with pytest.raises(ValueError, match=message % "batch 0 of Listed"):
        EpochBatches(Listed((ROW[None], None, np.ones(1))), global_batch_size=1)
    with pytest.raises(ValueError, match=message % "example 0 of list"):
        Examples([(ROW, None, 1.0)])
    with pytest.raises(ValueError, match=message % "the data"):
        EpochBatches((ROW, None, ROW), global_batch_size=1)
    with pytest.raises(ValueError, match="Received: x=None in batch 0"):
        EpochBatches(Listed((None, np.ones(1))), global_batch_size=1)


def test_parts_that_are_none_at_the_end_are_left_out():
    for data in (
        Listed((ROW[None], ROW[None], None)),
        Examples([(ROW, ROW, None)]),
        (ROW[None], ROW[None], None),
    ):
        (batch,) = EpochBatches(data, global_batch_size=1).dataset
        x, y = batch
        np.testing.assert_array_equal(x, [ROW])
        np.testing.assert_array_equal(y, [ROW])
