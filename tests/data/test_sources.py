"""Sources that can be indexed: files, and the batches of a PyDataset."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.data import EpochBatches, NPZShards, TFRecords
from tfparallel.data.batches import evaluation_batches, first_batches
from tfparallel.data.example_order import batch_indices, window_order
from tfparallel.task import load_task

SIZES = [5, 1, 7, 0, 4]
NUM_EXAMPLES = sum(SIZES)


@pytest.fixture(name="digits", scope="module")
def load_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.data[:NUM_EXAMPLES] / 16.0, digits.target[:NUM_EXAMPLES]


def parts(arrays):
    starts = np.cumsum([0, *SIZES])
    return [
        [array[start:end] for array in arrays]
        for start, end in zip(starts, starts[1:], strict=False)
    ]


def parse(record):
    fields = {"x": tf.io.FixedLenFeature([64], tf.float32), "y": tf.io.FixedLenFeature([], "int64")}
    example = tf.io.parse_single_example(record, fields)
    return example["x"], example["y"]


def write_records(folder, digits, options=None):
    def example(x, y):
        features = {
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
            "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
        }
        return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

    paths = [folder / f"train-{index}.tfrecord" for index in range(len(SIZES))]
    for path, (xs, ys) in zip(paths, parts(digits), strict=True):
        with tf.io.TFRecordWriter(str(path), options) as writer:
            for x, y in zip(xs, ys, strict=True):
                writer.write(example(x, y))
    return paths


def write_shards(folder, digits):
    paths = [folder / f"train-{index}.npz" for index in range(len(SIZES))]
    for path, (x, y) in zip(paths, parts(digits), strict=True):
        np.savez(path, x=x.astype("float32"), y=y)
    return paths


def source_of(kind, folder, digits, window=None):
    if kind is TFRecords:
        return TFRecords(write_records(folder, digits), parse, window=window)
    return NPZShards(write_shards(folder, digits), window=window)


@pytest.fixture(name="kind", params=[TFRecords, NPZShards])
def kind_of_file(request):
    return request.param


@pytest.mark.parametrize("window", [None, 2])
def test_files_give_the_examples_that_their_order_names(kind, tmp_path, digits, window):
    source = source_of(kind, tmp_path, digits, window)
    batches = EpochBatches(source, global_batch_size=4, seed=3)
    for epoch in range(2):
        batches.on_epoch_begin(epoch)
        order = source.order(3, epoch)
        if window:
            assert np.array_equal(order, window_order(SIZES, window, 3, epoch))
        assert sorted(order) == list(range(NUM_EXAMPLES))
        seen = list(batches.dataset)
        assert [len(x) for x, _ in seen] == [4, 4, 4, 4, 1]
        np.testing.assert_allclose(
            np.concatenate([x for x, _ in seen]), digits[0][order], rtol=1e-7
        )
        np.testing.assert_array_equal(np.concatenate([y for _, y in seen]), digits[1][order])


def test_a_run_that_starts_in_the_middle_reads_nothing_before_it(tmp_path, digits):
    paths = write_shards(tmp_path, digits)
    whole = EpochBatches(NPZShards(paths, window=1), global_batch_size=4, seed=3)
    expected = list(whole.dataset)
    source = NPZShards(paths, window=1)
    first_files = set(source._places(source.order(3, 0)[:8])[0].tolist())
    last_files = set(source._places(source.order(3, 0)[8:])[0].tolist())
    for index in first_files - last_files:
        pathlib.Path(paths[index]).unlink()
    resumed = EpochBatches(source, global_batch_size=4, seed=3)
    resumed.start_at(0, 2)
    seen = list(resumed.dataset)
    assert [len(x) for x, _ in seen] == [0, 0, 4, 4, 1]
    for (x, y), (wanted_x, wanted_y) in zip(seen[2:], expected[2:], strict=True):
        np.testing.assert_array_equal(x, wanted_x)
        np.testing.assert_array_equal(y, wanted_y)


def test_shards_beyond_memory_are_dropped(tmp_path, digits):
    source = source_of(NPZShards, tmp_path, digits, window=1)
    for index in range(NUM_EXAMPLES):
        source.read(tf.constant([index], tf.int64))
        assert len(source._shards) <= 2


def test_evaluation_and_check_read_files_in_order(kind, tmp_path, digits):
    source = source_of(kind, tmp_path, digits)
    seen = list(evaluation_batches(source, 8))
    np.testing.assert_array_equal(np.concatenate([y for _, y in seen]), digits[1])
    steps = batch_indices(NUM_EXAMPLES, 8, 3, 0, 3)
    batches = first_batches(source, global_batch_size=8, seed=3, num_batches=3)
    for (_, y), step in zip(batches, steps, strict=True):
        np.testing.assert_array_equal(y, digits[1][step])


class Pairs(keras.utils.PyDataset):
    """Three batches, the last of them short."""

    def __init__(self, digits):
        super().__init__()
        self._x, self._y = digits[0][:10], digits[1][:10]

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return {"image": self._x[rows]}, self._y[rows]


def test_the_batches_of_a_pydataset_are_reordered(digits):
    batches = EpochBatches(Pairs(digits), global_batch_size=64, seed=3)
    for epoch in range(3):
        batches.on_epoch_begin(epoch)
        order = np.concatenate(batch_indices(3, 1, 3, epoch * 3, 3))
        expected = [Pairs(digits)[index] for index in order]
        for (x, y), (wanted_x, wanted_y) in zip(batches.dataset, expected, strict=True):
            np.testing.assert_allclose(x["image"], wanted_x["image"], rtol=1e-6)
            np.testing.assert_array_equal(y, wanted_y)
    batches.on_epoch_begin(0)
    batches.start_at(0, 1)
    assert [len(y) for _, y in batches.dataset][0] == 0
    assert [len(y) for _, y in evaluation_batches(Pairs(digits), 64)] == [4, 4, 2]
    assert len(first_batches(Pairs(digits), global_batch_size=64, seed=3, num_batches=2)) == 2


TASK = """
import glob
import pathlib
import keras
import tfparallel

def build_model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])

def compile_model(model):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

def load_data():
    paths = sorted(glob.glob(str(pathlib.Path(__file__).parent / "*.npz")))
    return tfparallel.data.NPZShards(paths, window=2), None
"""


def test_a_task_may_load_files(tmp_path, digits):
    write_shards(tmp_path, digits)
    (tmp_path / "task.py").write_text(TASK)
    train, validation = load_task(str(tmp_path / "task.py")).load_data()
    assert validation is None
    report = EpochBatches(train, global_batch_size=4, seed=7).report()
    assert report["source"] == "NPZShards of 17 examples in 5 files, 2 files at a time"
    assert report["order"] == "a function of seed 7, epoch and step"


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_opaque_pipeline_is_reported_as_one(digits, deterministic):
    options = tf.data.Options()
    options.deterministic = deterministic
    dataset = tf.data.Dataset.from_tensor_slices(digits).with_options(options)
    report = EpochBatches(dataset, global_batch_size=4).report()
    assert report["source"] == "tf.data.Dataset of 17 examples"
    assert ("exact if" in report["resumes"]) is deterministic


def test_the_split_of_a_batch_is_told():
    model = tfparallel.data_parallel(
        lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        devices=["CPU:0", "CPU:1"],
        replica_weights=[3, 1],
    )
    rows = tfparallel.data.rows_by_replica(model.distribute_strategy, 9)
    assert rows == {"CPU:0": 6, "CPU:1": 3}


# --- What is refused --------------------------------------------------------------------------


def test_files_that_are_not_there(kind, tmp_path):
    make = (lambda paths, **k: TFRecords(paths, parse, **k)) if kind is TFRecords else NPZShards
    with pytest.raises(ValueError, match=f"paths of existing files. Received: {tmp_path} "):
        make([tmp_path])
    with pytest.raises(ValueError, match="paths of existing files. Received: no path"):
        make([])
    with pytest.raises(ValueError, match="Received: .*missing"):
        make([tmp_path / "missing"])
    (tmp_path / "twice").write_bytes(b"")
    with pytest.raises(ValueError, match="listed once.*Received twice: .*twice"):
        make([tmp_path / "twice"] * 2)
    with pytest.raises(ValueError, match="Received: window=0"):
        make([tmp_path / "twice"], window=0)


def test_records_that_cannot_be_indexed(tmp_path, digits):
    paths = write_records(tmp_path, digits)
    paths[0].write_bytes(paths[0].read_bytes()[:-3])
    with pytest.raises(ValueError, match="train-0.tfrecord of .* bytes, whose record 4 would end"):
        TFRecords(paths, parse)
    paths = write_records(tmp_path, digits, tf.io.TFRecordOptions(compression_type="GZIP"))
    with pytest.raises(ValueError, match="It is compressed"):
        TFRecords(paths, parse)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="1 files without any"):
        TFRecords([tmp_path / "empty"], parse)


def test_a_damaged_record_is_not_read(tmp_path, digits):
    paths = write_records(tmp_path, digits)
    content = bytearray(paths[0].read_bytes())
    content[40] ^= 1
    paths[0].write_bytes(content)
    source = TFRecords(paths, parse)
    with pytest.raises(tf.errors.OpError, match="orrupted record"):
        source.read(tf.constant([0], tf.int64))


def test_lists_and_misspelt_names_are_told():
    with pytest.raises(ValueError, match=r"shapes \(\), .*\. Make arrays of lists: numpy.asarray"):
        EpochBatches(([1, 2], [3, 4]), global_batch_size=2)
    with pytest.raises(AttributeError, match="'TFRecord'. It offers: EpochBatches, Examples, NPZ"):
        tfparallel.data.TFRecord  # noqa: B018


def test_shards_that_do_not_fit_each_other(tmp_path, digits):
    paths = write_shards(tmp_path, digits)
    with pytest.raises(ValueError, match=r"Received: .*train-0.npz with \['x', 'y'\]. Name them"):
        NPZShards(paths, x="image")
    np.savez(paths[2], x=np.zeros((3, 64), "float32"), y=np.zeros(2, int))
    with pytest.raises(ValueError, match="same number of examples.*train-2.npz with"):
        NPZShards(paths)
    np.savez(paths[2], x=np.zeros((3, 63), "float32"), y=np.zeros(3, int))
    with pytest.raises(ValueError, match=r"'x' of \(64,\) float32 .* of \(63,\) float32"):
        NPZShards(paths)
    paths[2].write_bytes(b"no zip")
    with pytest.raises(ValueError, match="train-2.npz, which is not an archive"):
        NPZShards(paths)


def test_a_pydataset_without_end():
    class Endless(keras.utils.PyDataset):
        @property
        def num_batches(self):
            return None

        def __getitem__(self, index):
            return np.zeros((1, 2)), np.zeros(1)

    with pytest.raises(ValueError, match="num_batches=None"):
        EpochBatches(Endless(), global_batch_size=4)
