"""What may hide that rows meet: masks, sizes that are not known; in both forms that cut batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tfparallel.data import EpochBatches
from tfparallel.device_names import canonical
from tfparallel.step import where_rows_meet

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_float64")]

DEVICES = ["CPU:0", "CPU:1"]
ROWS = LENGTH = 4  # Equal, so that a mask (rows, length) can be laid over losses (rows,).
FORMS = {
    schedule: lambda build, schedule=schedule: tfparallel.pipeline_parallel(
        build, DEVICES, ROWS, schedule=schedule
    )
    for schedule in ("gpipe", "1f1b")
}
FORMS["data"] = lambda build: tfparallel.data_parallel(build, tfparallel.MirroredStrategy(DEVICES))


def placed(form, build):
    return FORMS[form](lambda: seeded(build))


@keras.saving.register_keras_serializable("tests")
class LastAxisAway(layers.Layer):
    """Hands on a mask that has an axis more than the losses."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x):
        return x[..., 0]

    def compute_output_shape(self, input_shape):
        return input_shape[:-1]


def masked():
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(6, 2, mask_zero=True)(ids)
    return keras.Model(ids, LastAxisAway()(layers.Dense(1)(x)))


class Masked(keras.Model):
    """The same, of which no symbolic output tells the mask."""

    def __init__(self):
        super().__init__()
        self.read = layers.Embedding(6, 2, mask_zero=True)
        self.out = layers.Dense(1)
        self.flat = LastAxisAway()

    def call(self, ids):
        return self.flat(self.out(self.read(ids)))


def texts():
    random = np.random.default_rng(1)
    ids = random.integers(0, 3, (2 * ROWS, LENGTH)).astype("int32")
    return ids, random.normal(size=(2 * ROWS, LENGTH))


def trained(model, data, loss, **options):
    model.compile(keras.optimizers.Adam(0.01), loss, **options)
    fitted = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(*data, **fitted).history
    return history, state_of(model)


@pytest.mark.parametrize("build", [masked, Masked], ids=["functional", "subclass"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
def test_a_mask_with_an_axis_more_than_the_losses(form, reduction, build):
    if form != "data" and build is Masked:
        pytest.skip("a pipeline takes a functional model")
    expected = trained(seeded(build), texts(), keras.losses.MeanSquaredError(reduction=reduction))
    model, loss = placed(form, build), keras.losses.MeanSquaredError(reduction=reduction)
    if form == "1f1b":
        with pytest.raises(ValueError, match="compares examples of different micro-batches"):
            trained(model, texts(), loss)
        return
    assert_equal(trained(model, texts(), loss), expected, rtol=1e-9)
    assert "pairs each example with the others" in model.why_joined


def one():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(2)])


def two():
    inputs = keras.Input((3,))
    outputs = [layers.Dense(2, name=name)(inputs) for name in ("a", "b")]
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_each_outputs_loss_has_the_weight_of_its_rows(form, eagerly):
    random = np.random.default_rng(2)
    x, y = random.normal(size=(ROWS + 2, 3)), random.normal(size=(ROWS + 2, 2))
    options = {"run_eagerly": eagerly}
    expected = trained(seeded(two), (x, [y, y + 1]), ["mse", "mae"], **options)
    actual = trained(placed(form, two), (x, [y, y + 1]), ["mse", "mae"], **options)
    assert_equal(actual, expected, rtol=1e-6)  # What tracks a loss is float32.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", ["targets", "weights"])
def test_one_row_for_all_is_refused_in_words_where_sizes_are_unknown(form, what):
    random = np.random.default_rng(3)
    batch = [random.normal(size=(ROWS, 3)), random.normal(size=(ROWS, 2)), np.ones(ROWS)]
    index = ["inputs", "targets", "weights"].index(what)
    batch[index] = batch[index][:1]
    specs = tuple(tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in batch)
    dataset = tf.data.Dataset.from_generator(lambda: iter([tuple(batch)]), output_signature=specs)
    model = placed(form, one)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"^Inputs, targets and sample weights must.*\.$"):
        model.fit(dataset, verbose=0)


def hybrid(build):
    mesh = tfparallel.Mesh(data=2, pipeline=2)
    devices = [*DEVICES, "CPU:2", "CPU:3"]
    return tfparallel.hybrid_parallel(build, mesh, devices, num_micro_batches=2, schedule="gpipe")


@pytest.mark.parametrize("form", [*FORMS, "hybrid"])
@pytest.mark.parametrize(
    ("y_and_weight", "said"),
    [
        ([np.ones((1, 2))], r"inputs and targets have \[1, 4\] rows"),
        ([np.float64(0.7)], r"a target .* of shape \(\) applies to all rows"),
        ([np.ones((ROWS, 2)), np.float64(0.7)], r".*weight of shape \(\) applies to all"),
    ],
    ids=["a row", "a scalar", "a scalar weight"],
)
def test_one_for_all_rows(form, y_and_weight, said):
    """Story: 1f1b advised to take gpipe, which raised "Attempting to slice scalar input"."""
    dataset = tf.data.Dataset.from_tensors((np.arange(12.0).reshape(ROWS, 3), *y_and_weight))
    model = hybrid(lambda: seeded(one)) if form == "hybrid" else placed(form, one)
    if form == "1f1b":
        with pytest.raises(ValueError, match=f"Received: {said}.*Use schedule='gpipe'"):
            trained_on(model, dataset)
        return
    assert_equal(trained_on(model, dataset), trained_on(seeded(one), dataset), rtol=1e-9)


def trained_on(model, dataset):
    model.compile("sgd", "mse")
    return model.fit(dataset, verbose=0).history, state_of(model)


def test_why_tells_of_either():
    model = placed("data", one)
    x, y = np.ones((ROWS, 3)), np.ones((ROWS, 2))
    trained_on(model, tf.data.Dataset.from_tensors((x, y)))
    assert model.why_joined is None
    model.evaluate(tf.data.Dataset.from_tensors((x, y[:1])), verbose=0)
    assert model.why_joined == "inputs and targets have [1, 4] rows"


@keras.saving.register_keras_serializable("tests")
class Wide(layers.Layer):
    """Puts out more numbers for an example than any memory holds, were it called."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width

    def call(self, x):
        return keras.ops.broadcast_to(x[:, :1, None], (keras.ops.shape(x)[0], self.width, 2))

    def get_config(self):
        return super().get_config() | {"width": self.width}


def own_loss(y, outputs):
    """Looks at all rows, to no effect."""
    return keras.ops.mean((y - outputs) ** 2, -1) + 0 * keras.ops.max(outputs)


@pytest.mark.parametrize("form", ["data", "gpipe"])
def test_the_log_says_how_many_bytes_are_joined(form, caplog):
    model = placed(form, lambda: keras.Sequential([keras.Input((3,)), layers.Dense(2), Wide(5)]))
    model.compile("sgd", own_loss)
    with caplog.at_level("INFO", logger="absl"):
        model.train_on_batch(np.ones((ROWS, 3)), np.ones((ROWS, 5, 2)))
    assert "one device (320 bytes per batch), because loss 'own_loss'" in caplog.text


@pytest.mark.parametrize("form", ["data", "gpipe"])
def test_what_is_joined_is_shown_once_a_compile(form, capsys):
    model = placed(form, two)
    capsys.readouterr()
    data = np.ones((ROWS, 3)), [np.ones((ROWS, 2)), np.ones((ROWS, 2))]
    notice = (
        "Model 'functional', fit: gathering the outputs of the whole batch on one device (128 "
        "bytes per batch: 'a' 64, 'b' 64), because loss 'own_loss' might mix examples: operation "
        "Max "
    )
    for loss, expected in ((own_loss, notice), ("mse", ""), (own_loss, notice)):
        model.compile("sgd", [loss, loss])
        batches = tf.data.Dataset.from_tensors(data[:1] + (tuple(data[1]),))
        model.fit(batches, validation_data=batches, epochs=2, verbose=0)
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith(expected)
        assert shown.err.count("\n") == (1 if expected else 0)


def fit_arguments(how, num_rows=17, batch_size=8):
    """What `fit` and `evaluate` take, of which the last batch is short."""
    x, y = np.ones((num_rows, 3)), np.ones((num_rows, 2))
    if how == "arrays":
        return {"x": x, "y": y, "batch_size": batch_size}
    if how == "batches":
        return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).prefetch(1)}
    return {"x": EpochBatches((x, y), global_batch_size=batch_size, seed=1).dataset}


@pytest.mark.parametrize("form", ["data", "gpipe"])
@pytest.mark.parametrize("how", ["arrays", "batches", "read by index"])
def test_of_a_short_last_batch_the_size_of_a_full_one_is_told(form, how, capsys):
    model = placed(form, one)
    model.compile("sgd", own_loss)
    capsys.readouterr()
    model.fit(**fit_arguments(how), shuffle=False, verbose=0)
    assert "(128 bytes per batch), because loss 'own_loss'" in capsys.readouterr().err  # 8 · 2 · 8.
    model.compile("sgd", own_loss)
    if form == "data":
        model.evaluate(**fit_arguments(how, batch_size=3), verbose=0)
        said = capsys.readouterr().err
        assert "evaluate: gathering the outputs of the whole batch on one device (48 bytes" in said


@pytest.mark.parametrize("form", ["data", "gpipe"])
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("CPU:0", r"\(127 bytes of this machine\)"),
        ("/job:worker/replica:0/task:1/device:GPU:1", r"\(127 bytes of GPU:1\)"),
        ("GPU:2", r"\(100 bytes of this machine\)"),
    ],
)
def test_what_does_not_fit_is_refused_in_fit(form, device, message, monkeypatch):
    model = placed(form, one)
    model.compile("sgd", own_loss)
    sizes = {"GPU:1": 127, "GPU:2": None, None: 100 if device == "GPU:2" else 127}
    monkeypatch.setattr(where_rows_meet, "memory_bytes", lambda name=None: sizes[name])
    monkeypatch.setattr(type(model), "_meeting_device", device)
    for _ in range(2):
        with pytest.raises(ValueError, match=message + r".* a batch of 8 rows of 16 bytes"):
            model.fit(**fit_arguments("arrays"), verbose=0)
    sizes |= {"GPU:1": 128, None: 128}
    model.fit(**fit_arguments("arrays"), verbose=0)


def test_where_outputs_meet():
    assert [canonical(placed(form, one)._meeting_device) for form in ("data", "gpipe")] == DEVICES


def test_joined_outputs_larger_than_memory_raise():
    """Of targets that are as wide, none are made: they would not fit either."""
    model = placed("data", lambda: keras.Sequential([keras.Input((3,)), Wide(2**30)]))
    model.compile("sgd", own_loss)
    rows = 2**13
    with pytest.raises(ValueError, match="a batch of 8,192 rows of 17,179,869,184 bytes"):
        model.train_on_batch(np.ones((rows, 3)), np.ones((rows, 1, 1)))
