"""`model.export` after a parallel training: a SavedModel that TensorFlow alone loads."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

DEVICES = ["CPU:0", "CPU:1"]


def build():
    inputs = keras.Input((6,), name="x")
    y = keras.layers.Dense(8, activation="relu", name="hidden")(inputs)
    y = keras.layers.Dropout(0.5, seed=1, name="dropout")(y)
    return keras.Model(inputs, keras.layers.Dense(3, name="outputs")(y), name="exported")


FORMS = {
    "data": lambda: tfparallel.data_parallel(build, devices=DEVICES),
    "model": lambda: tfparallel.model_parallel(build, devices=DEVICES),
    "pipeline": lambda: tfparallel.pipeline_parallel(
        build, devices=DEVICES, num_micro_batches=2, balance="memory"
    ),
    "tensor": lambda: tfparallel.tensor_parallel(build, devices=DEVICES),
    "hybrid": lambda: tfparallel.hybrid_parallel(
        build,
        tfparallel.Mesh(data=2, pipeline=2),
        devices=[f"CPU:{index}" for index in range(4)],
        balance="memory",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_is_exported_predicts_as_the_model_does(form, tmp_path):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(21, 6)).astype("float32"), random.integers(3, size=21)
    model = FORMS[form]()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    expected = model.predict(x, verbose=0)
    if form == "tensor":
        # It refuses, and says what to do: the file that it saves is a plain model.
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    # Another program, with the sums of one device.
    np.testing.assert_allclose(served(exported, x), expected, rtol=1e-5, atol=1e-6)
    # Fewer rows than devices: the program is for any number.
    assert served(exported, x[:1]).shape == (1, 3)


def test_tflite_is_refused_a_model_in_parts():
    """Story: a TypeError, since the converter drops the error of the export that it tries first."""
    converter = tf.lite.TFLiteConverter.from_keras_model(FORMS["tensor"]())
    with pytest.raises(ValueError, match="needs a model with whole weights.*model.keras"):
        converter.convert()


def served(exported, x):
    """What the program says of rows; of a model that was loaded, Keras 3.10's takes a list."""
    call = exported.signatures["serving_default"]
    (name,) = call.structured_input_signature[1]
    (outputs,) = call(**{name: tf.constant(x)}).values()
    return outputs
