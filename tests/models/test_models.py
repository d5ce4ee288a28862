"""The task files: their contract, their shapes, and that they learn."""

import pathlib

import keras
import numpy as np
import pytest

from tfparallel.task import load_task

MODELS = pathlib.Path(__file__).parents[2] / "models"
TASKS = sorted(path.stem for path in MODELS.glob("*.py"))


@pytest.fixture(autouse=True)
def bundled_data(monkeypatch):
    """Tests download nothing, whatever the shell says."""
    monkeypatch.delenv("DIGITS_DATA", raising=False)


def load(name):
    return load_task(str(MODELS / f"{name}.py"))


def test_every_file_in_models_is_known_here():
    assert TASKS == [
        "burgers", "detection", "digits_cnn", "genomics", "language_model", "lenet",
        "masked_words", "medical_table", "mlp", "molecules", "recommender", "resnet",
        "segmentation", "steering", "time_series", "transformer", "vae",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_task_builds_compiles_and_trains_a_step(name):
    task = load(name)
    train, validation = task.load_data()
    reads_ids = name in (
        *("genomics", "language_model", "masked_words", "recommender", "transformer"),
    )
    assert {array.dtype for array in keras.tree.flatten(train[0])} == {
        np.dtype("int32" if reads_ids else "float32")
    }
    (length,) = {len(array) for array in keras.tree.flatten(train)}
    (validation_length,) = {len(array) for array in keras.tree.flatten(validation)}
    # Of a series all later years are to be forecast, and of a brain its front.
    assert length > 4 * validation_length - 4 or name in ("segmentation", "time_series")
    assert validation_length > 50
    model = task.build_model()
    assert isinstance(model, keras.Model)
    task.compile_model(model)
    before = [weight.copy() for weight in model.get_weights()]
    batch = keras.tree.map_structure(lambda array: array[:64], train)
    assert np.isfinite(model.train_on_batch(*batch, return_dict=True)["loss"])
    changed = [np.any(old != new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert all(changed), "a layer that gets no gradient is not part of the net"


@pytest.mark.parametrize(
    "name",
    # It reads the whole standard library.
    [pytest.param(n, marks=pytest.mark.slow) if n == "recommender" else n for n in TASKS],
)
def test_data_and_split_are_the_same_in_every_run(name):
    first, second = load(name).load_data(), load(name).load_data()
    for part, same_part in zip(first, second, strict=True):
        arrays, same_arrays = keras.tree.flatten(part), keras.tree.flatten(same_part)
        for array, same_array in zip(arrays, same_arrays, strict=True):
            np.testing.assert_array_equal(array, same_array)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        (
            "digits_cnn",
            {
                "conv1": (3, 3, 1, 32),
                "conv2": (3, 3, 32, 64),
                "dense1": (1024, 128),
                "logits": (128, 10),
            },
        ),
        (
            "lenet",
            {
                "conv1": (5, 5, 1, 20),
                "conv2": (5, 5, 20, 20),
                "dense1": (2000, 50),
                "logits": (50, 10),
            },
        ),
        ("mlp", {"hidden1": (30, 64), "hidden2": (64, 32), "hidden3": (32, 16), "logit": (16, 1)}),
    ],
)
def test_shapes(name, shapes):
    model = load(name).build_model()
    kernels = {layer.name: tuple(layer.kernel.shape) for layer in model.layers if layer.weights}
    assert kernels == shapes


NO_CLASSES = ("burgers", "detection", "molecules", "steering", "time_series", "vae")


@pytest.mark.parametrize("name", [name for name in TASKS if name not in NO_CLASSES])
def test_outputs_are_logits(name):
    task = load(name)
    model = task.build_model()
    task.compile_model(model)
    # A softmax before a cross-entropy that applies its own was the seed's mistake.
    activation = getattr(model.layers[-1], "activation", keras.activations.linear)
    assert activation is keras.activations.linear
    assert model.loss.get_config()["from_logits"] is True


def test_digits_are_enlarged_without_change_of_meaning():
    (small, labels), _ = load("digits_cnn").load_data()
    (large, same_labels), _ = load("lenet").load_data()
    np.testing.assert_array_equal(labels, same_labels)
    assert small.shape == (1438, 8, 8, 1)
    assert large.shape == (1438, 28, 28, 1)
    assert 0.0 <= large.min() and large.max() <= 1.0
    # Interpolation keeps the mean but for the borders, which it repeats.
    np.testing.assert_allclose(small.mean(), large.mean(), atol=0.02)


def test_mlp_is_standardized_by_the_training_rows():
    (x, _), (validation_x, _) = load("mlp").load_data()
    # float32 sums of 456 rows.
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=0), 1, atol=1e-5)
    assert np.abs(validation_x.mean(axis=0)).max() > 1e-3


def test_the_transformer_sees_no_byte_before_its_turn():
    task = load("transformer")
    (x, y), _ = task.load_data()
    np.testing.assert_array_equal(x[0, 1:], y[0, :-1])
    np.testing.assert_array_equal(x[1:, 0], y[:-1, -1])
    model = task.build_model()
    other = x[:1].copy()
    other[:, 40] = (other[:, 40] + 1) % 256
    one, two = model(x[:1]).numpy(), model(other).numpy()
    np.testing.assert_allclose(one[:, :40], two[:, :40], atol=1e-5)
    assert np.all(np.abs(one[:, 40:] - two[:, 40:]).max(axis=-1) > 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epochs", "least"),
    [("digits_cnn", 6, 0.97), ("mlp", 10, 0.95), ("resnet", 6, 0.95)],
)
def test_a_task_learns(name, epochs, least):
    assert learned(name, epochs)["accuracy"] >= least


def learned(name, epochs=None, batch_size=64, steps_per_epoch=None):
    """Trains a task on one device, and returns what it reaches on the validation data."""
    task = load(name)
    train, validation = task.load_data()
    model = task.build_model()
    task.compile_model(model)
    names = ("x", "y", "sample_weight")
    model.fit(
        **dict(zip(names, train, strict=False)),
        batch_size=batch_size,
        epochs=epochs or task.epochs,
        steps_per_epoch=steps_per_epoch,
        verbose=0,
    )
    return model.evaluate(
        **dict(zip(names, validation, strict=False)), verbose=0, return_dict=True
    )


def test_mnist_by_option(monkeypatch):
    """With MNIST's shapes; the data themselves would be a download."""
    monkeypatch.setenv("DIGITS_DATA", "mnist")
    images, labels = np.full((6, 28, 28), 255, "uint8"), np.arange(6, dtype="uint8")
    monkeypatch.setattr(
        keras.datasets.mnist, "load_data", lambda: ((images, labels), (images[:2], labels[:2]))
    )
    for name in ("digits_cnn", "lenet"):
        task = load(name)
        (x, y), (validation_x, _) = task.load_data()
        assert x.shape == (6, 28, 28, 1) and validation_x.shape == (2, 28, 28, 1)
        assert x.max() == 1.0 and y.dtype == np.int32
        assert task.build_model()(x).shape == (6, 10)


def test_mnist_without_the_internet(monkeypatch):
    def fail():
        raise Exception("URL fetch failure")

    monkeypatch.setenv("DIGITS_DATA", "mnist")
    monkeypatch.setattr(keras.datasets.mnist, "load_data", fail)
    with pytest.raises(Exception, match=r"could not be downloaded.*URL fetch failure.*mnist\.npz"):
        load("digits_cnn").load_data()


def test_unknown_data(monkeypatch):
    monkeypatch.setenv("DIGITS_DATA", "cifar")
    with pytest.raises(Exception, match=r"one of sklearn, mnist\. Received: DIGITS_DATA='cifar'"):
        load("digits_cnn").load_data()
