"""Objects with `__len__` and `__getitem__` as sources, those of Grain and Hugging Face too."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.data import EpochBatches, Examples
from tfparallel.data.batches import evaluation_batches, first_batches
from tfparallel.data.example_order import epoch_order
from tfparallel.data.sources import as_source

NUM_EXAMPLES = 10


class Numbered:
    """A dataset as PyTorch has them, without batched reads."""

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, index):
        if not 0 <= index < NUM_EXAMPLES:
            raise IndexError(index)
        return np.full(2, index, "float64"), index


class Batched(Numbered):
    """Reads several at once, as Hugging Face's."""

    def __init__(self):
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(indices)
        return [self[index] for index in indices]


def seen(dataset):
    return [x.numpy()[:, 0].astype(int).tolist() for x, *_ in dataset]


def test_single_examples_come_in_our_order_and_in_batches():
    batches = EpochBatches(Numbered(), global_batch_size=4, seed=3)
    order = epoch_order(NUM_EXAMPLES, 3, 0).tolist()
    assert seen(batches.dataset) == [order[:4], order[4:8], order[8:]]
    x, y = next(iter(batches.dataset))
    assert x.shape == (4, 2) and x.dtype == keras.config.floatx() and y.dtype == tf.int64
    batches.start_at(0, 2)  # As a run that resumes.
    assert seen(batches.dataset) == [[], [], order[8:]]
    assert seen(evaluation_batches(Numbered(), 7)) == [[*range(7)], [7, 8, 9]]
    assert [
        len(x) for x, _ in first_batches(Numbered(), global_batch_size=4, seed=0, num_batches=3)
    ] == [4, 4, 2]


def test_a_batch_is_one_read_where_the_object_can():
    data = Batched()
    batches = EpochBatches(data, global_batch_size=4, seed=3)
    data.calls.clear()
    list(batches.dataset)
    assert sorted(map(len, data.calls)) == [2, 4, 4]
    assert "Batched of 10 examples" == batches.report()["source"]


def test_dicts_and_texts_are_mapped():
    rows = [{"text": "a" * n, "label": float(n), "image": {"pixels": [n, n]}} for n in range(3)]
    source = Examples(rows, lambda row: (row["image"] | {"text": row["text"]}, row["label"], 1))
    x, y, weight = source.read(tf.constant([2, 0], tf.int64))
    assert x["text"].numpy().tolist() == [b"aa", b""]
    assert x["pixels"].numpy().tolist() == [[2, 2], [0, 0]]
    assert y.numpy().tolist() == [2.0, 0.0] and weight.numpy().tolist() == [1, 1]


def test_what_holds_no_examples_is_refused():
    with pytest.raises(ValueError, match=r"must be \(x, y\).*Received: {'x': 1} .* element 0 of"):
        Examples([{"x": 1}])
    with pytest.raises(ValueError, match="a length from 1 to 2\\^40. Received: \\[\\]"):
        Examples([])
    with pytest.raises(ValueError, match="needs an object with `__getitem__`.*generator"):
        Examples(each for each in [1])
    ragged = Examples([(np.ones(2), 1), (np.ones(3), 1)])
    with pytest.raises(ValueError, match=r"shape \(3,\) in example 1 .* of shape \(2,\)"):
        ragged.read(tf.constant([0, 1], tf.int64))
    for data in ("path", {"x": np.ones(3)}, np.ones((3, 2))):
        with pytest.raises(ValueError, match=r"Data must be \(x, y\)"):
            as_source(data)


# --- Grain ------------------------------------------------------------------------------------


@pytest.fixture(name="grain")
def import_grain():
    return pytest.importorskip("grain", reason="needs Grain: pip install grain")


def test_a_map_dataset_of_grain_is_read_at_random(grain):
    data = grain.MapDataset.range(NUM_EXAMPLES).map(lambda i: (np.full(2, i, "float32"), i))
    batches = EpochBatches(data, global_batch_size=4, seed=3)
    assert seen(batches.dataset) == seen(
        EpochBatches(Numbered(), global_batch_size=4, seed=3).dataset
    )


def test_what_a_loader_reads_in_its_order_can_be_read_at_random(grain):
    """docs/data_sources.md: the source and the operations of a `grain.DataLoader`."""

    class Numbers(grain.transforms.Map):
        def map(self, index):
            return np.full(2, index, "float32"), index

    source, operations = range(NUM_EXAMPLES), [Numbers()]
    sampler = grain.samplers.IndexSampler(NUM_EXAMPLES, num_epochs=1)
    loader = grain.DataLoader(data_source=source, sampler=sampler, operations=operations)
    examples = Examples(grain.MapDataset.source(source).apply(operations))
    x, y = examples.read(tf.range(NUM_EXAMPLES, dtype=tf.int64))
    expected = list(loader)
    np.testing.assert_array_equal(x, [each for each, _ in expected])
    np.testing.assert_array_equal(y, [each for _, each in expected])


def drawn(data, epoch, start=0):
    """The batches of an epoch, in a run that resumes at `start`."""
    batches = EpochBatches(data, global_batch_size=4, seed=3)
    batches.on_epoch_begin(epoch)
    batches.start_at(epoch, start)
    return np.concatenate([x.numpy() for x, _ in batches.dataset])


def test_what_grain_draws_is_new_in_each_epoch_and_again_in_a_resumed_one(grain):
    data = grain.MapDataset.range(NUM_EXAMPLES).seed(1)
    data = data.random_map(lambda i, generator: (generator.normal(size=2), i))
    first, second = drawn(data, 0), drawn(data, 1)
    assert not np.isin(first, second).any()
    np.testing.assert_array_equal(drawn(data, 1), second)
    np.testing.assert_array_equal(drawn(data, 1, start=1), second[4:])


def test_what_is_no_whole_map_dataset_is_refused(grain):
    numbers = grain.MapDataset.range(NUM_EXAMPLES).map(lambda i: (i, i))
    with pytest.raises(ValueError, match="Drop `repeat` from it"):
        EpochBatches(numbers.repeat(), global_batch_size=4)
    with pytest.raises(ValueError, match="leave out the elements that are missing"):
        EpochBatches(numbers.filter(lambda pair: pair[0] > 0), global_batch_size=4)
    loader = grain.DataLoader(
        data_source=list(numbers), sampler=grain.samplers.IndexSampler(NUM_EXAMPLES, num_epochs=1)
    )
    with pytest.raises(ValueError, match="Data must be .* Received: .*DataLoader"):
        EpochBatches(loader, global_batch_size=4)


# --- Hugging Face -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [None, "numpy"])
def test_a_dataset_of_hugging_face_is_read_by_columns(form):
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    columns = {"x": [[i, i + 0.5] for i in range(NUM_EXAMPLES)], "label": list(range(NUM_EXAMPLES))}
    data = datasets.Dataset.from_dict(columns).with_format(form)
    with pytest.raises(ValueError, match=r"lambda row: \(row\['x'\], row\['y'\]\)"):
        EpochBatches(data, global_batch_size=4)
    examples = Examples(data, lambda row: (row["x"], row["label"]))
    batches = EpochBatches(examples, global_batch_size=4, seed=3)
    order = epoch_order(NUM_EXAMPLES, 3, 0).tolist()
    assert seen(batches.dataset) == [order[:4], order[4:8], order[8:]]
    x, y = next(iter(batches.dataset))
    np.testing.assert_array_equal(x[:, 1], y.numpy() + 0.5)
