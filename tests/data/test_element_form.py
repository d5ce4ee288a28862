"""Examples and batches that differ in dtype, shape or parts from the first one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.data import EpochBatches, Examples
from tfparallel.data.batches import batches_dataset, evaluation_batches, first_batches

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


def labels(*values):
    """The labels as read: one of each example, then of each batch of two."""
    examples = Examples([(ROW, value) for value in values])
    dataset = Listed(*((np.stack([ROW] * 2), np.stack([value] * 2)) for value in values))
    (_, of_examples) = examples.read(tf.range(len(values), dtype=tf.int64))
    of_batches = tf.stack([y[0] for _, y in evaluation_batches(dataset, 2)])
    assert of_examples.dtype == of_batches.dtype
    np.testing.assert_array_equal(of_examples, of_batches)
    return of_examples


# --- Dtypes -----------------------------------------------------------------------------------

CHANGED = [
    (0, 0.5, "float64", "int64", "'float64'"),
    (0, np.nan, "float64", "int64", "'float64'"),
    (np.int32(0), 2**40, "int64", "int32", "'int64'"),
    (np.uint64(0), -1, "int64", "uint64", "'float64'"),
    (0.5, 2**53 + 1, "int64", "float64", "'float64'"),
    (True, 2, "int64", "bool", "'int64'"),
]


@pytest.mark.parametrize("first, other, dtype, of_first, fix", CHANGED)
def test_a_cast_that_changes_a_value_is_refused(first, other, dtype, of_first, fix):
    """A label of 0.5 became 0 if that of the first example was the integer 0."""
    message = (
        rf"Received: y of dtype {dtype} in %s, and {of_first} in the first one.*"
        rf"numpy.asarray\(y, {fix}\)"
    )
    examples = Examples([(ROW, first), (ROW, first), (ROW, other)])
    with pytest.raises(ValueError, match=message % "example 2 of list"):
        examples.read(tf.constant([0, 2], tf.int64))
    first, other = [(ROW[None], np.array([value])) for value in (first, other)]
    with pytest.raises(ValueError, match=message % "batch 1 of Listed"):
        EpochBatches(Listed(first, other), global_batch_size=1)
    later = evaluation_batches(Listed(first, first, other), 1)
    with pytest.raises(tf.errors.OpError, match=message % "batch 2 of Listed"):
        list(later)


@pytest.mark.parametrize(
    "first, other",
    [
        (np.float32(1), 0.1),
        (np.float64(1), np.float32(0.1)),
        (np.float16(1), np.nan),
        (np.int32(1), 2),
        (1, np.int8(2)),
        (1, 2.0),
        (0.5, 2),
        (1, True),
        (np.array(1, tf.bfloat16.as_numpy_dtype), np.float32(0.1)),
    ],
)
def test_a_value_that_the_dtype_holds_and_a_float_that_is_rounded_are_read(first, other):
    dtype = np.asarray(first).dtype
    read = labels(first, other)
    expected = tf.constant(np.stack([np.asarray(each).astype(dtype) for each in (first, other)]))
    if read.dtype.is_floating:
        expected = tf.cast(expected, keras.config.floatx())
    np.testing.assert_array_equal(read, expected)


def test_texts_keep_their_lengths():
    """The texts of later batches were cut to the longest text of the first batch."""
    assert labels("a", "abc").numpy().tolist() == [b"a", b"abc"]
    with pytest.raises(ValueError, match="y of dtype int64 in example 1.*in all examples.$"):
        labels("a", 5)


def test_the_array_is_named_by_its_keys():
    rows = [({"image": ROW, "sizes": (1, size)}, 0.0) for size in (1, 1.5)]
    with pytest.raises(ValueError, match=r"Received: x\['sizes'\]\[1\] of dtype float64"):
        Examples(rows).read(tf.constant([1], tf.int64))


# --- Shapes -----------------------------------------------------------------------------------


def padded(*lengths):
    """Batches of two sequences of vectors, padded to another length in each batch."""
    draw = np.random.default_rng(0)
    return Listed(
        *((draw.normal(size=(2, n, 3)).astype("float32"), np.arange(2.0)) for n in lengths)
    )


def test_batches_may_be_padded_to_different_lengths():
    batches = EpochBatches(padded(4, 6, 5), global_batch_size=2)
    x, y = batches.dataset.element_spec
    assert x.shape.as_list() == [None, None, 3] and y.shape.as_list() == [None]
    assert sorted(len(x[0]) for x, _ in batches.dataset) == [4, 5, 6]
    batches.start_at(0, 2)
    assert [len(x) for x, _ in batches.dataset] == [0, 0, 2]
    x, _ = EpochBatches(padded(4, 4, 4), global_batch_size=2).dataset.element_spec
    assert x.shape.as_list() == [None, 4, 3]
    few = first_batches(padded(4, 6, 5), global_batch_size=2, seed=0, num_batches=3)
    assert [x.shape for x, _ in batches_dataset(few)] == [x.shape for x, _ in few]


def test_replicas_train_on_padded_batches():
    def build_model():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((None, 3), dtype="float64")
        outputs = keras.layers.Dense(1, dtype="float64")(
            keras.layers.GlobalMaxPooling1D(dtype="float64")(inputs)
        )
        return keras.Model(inputs, outputs)

    weights = []
    for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
        model = tfparallel.data_parallel(build_model, devices=devices)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        batches = EpochBatches(padded(4, 6, 5), global_batch_size=2)
        model.fit(batches.dataset, epochs=2, shuffle=False, verbose=0, callbacks=[batches])
        weights.append(model.get_weights())
    for one, two in zip(*weights, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)  # The replicas' sums, in float64.


def test_a_shape_that_the_first_batches_do_not_have_is_refused():
    message = (
        r"Received: x of shape \(2, 5, 3\) in batch 2 of Listed, and one of shape \(None, 4, 3\) "
        "in the first two batches.*let the first two batches differ in that axis"
    )
    with pytest.raises(tf.errors.OpError, match=message):
        list(evaluation_batches(padded(4, 4, 5), 2))
    column = Listed((ROW[None], np.ones(1)), (ROW[None], np.ones((1, 1))))
    with pytest.raises(ValueError, match=r"y of shape \(1, 1\) in batch 1 .* of shape \(None,\)"):
        EpochBatches(column, global_batch_size=1)
    with pytest.raises(ValueError, match=r"y of shape \(\) in batch 0 .* of shape \(None,\)"):
        EpochBatches(Listed((ROW[None], 1.0)), global_batch_size=1)


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


def test_parts_and_keys_are_those_of_the_first():
    examples = Examples([({"a": 1, "b": 2}, 0), ({"a": 1, "c": 2}, 0)])
    with pytest.raises(ValueError, match="same structure. Received: .*'c'.* as example 1 of list"):
        examples.read(tf.constant([1], tf.int64))
    weighted = Listed((ROW[None], ROW[None]), (ROW[None], ROW[None], np.ones(1)))
    with pytest.raises(ValueError, match="same structure. Received: .* as batch 1 of Listed"):
        EpochBatches(weighted, global_batch_size=1)
