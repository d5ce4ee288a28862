"""The state of a run on disk: whole at every moment, refused when it is not ours."""

import json

import keras
import numpy as np
import pytest

from tfparallel.checkpoint.epoch import EpochCheckpoint, EpochSeeds, read_state


def fitted(directory, epochs):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
    model.compile(optimizer="adam", loss="mse")
    checkpoint = EpochCheckpoint(str(directory), {"seed": 3})
    x = np.ones((6, 2))
    model.fit(x, x[:, :1], epochs=epochs, verbose=0, callbacks=[checkpoint, EpochSeeds(3)])
    return model


def test_the_newest_epoch_stays_with_its_history(tmp_path):
    model = fitted(tmp_path / "made", 3)
    state = read_state(str(tmp_path / "made"))
    assert state.epoch == 3 and len(state.history["loss"]) == 3 and state.configuration["seed"] == 3
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == [
        "epoch_00003.weights.h5",
        "state.json",
    ]
    expected = [variable.numpy() for variable in (*model.weights, *model.optimizer.variables)]
    model.set_weights([np.zeros_like(value) for value in model.get_weights()])
    model.load_weights(state.weights_path)
    found = [variable.numpy() for variable in (*model.weights, *model.optimizer.variables)]
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_empty_folder_has_no_state(tmp_path):
    assert read_state(str(tmp_path)) is None and read_state(str(tmp_path / "absent")) is None


def test_states_that_cannot_be_used_are_refused(tmp_path):
    fitted(tmp_path, 1)
    (tmp_path / "epoch_00001.weights.h5").unlink()
    with pytest.raises(ValueError, match="weights file is missing.*epoch_00001"):
        read_state(str(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps({"epoch": 1}))
    with pytest.raises(ValueError, match="cannot be read.*KeyError.*Use an empty folder"):
        read_state(str(tmp_path))


def test_seeds_are_a_function_of_the_epoch():
    def states(epoch):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
        callback = EpochSeeds(3)
        callback.set_model(model)
        callback.on_epoch_begin(epoch)
        return [v.numpy().tolist() for v in model.variables]

    assert states(4) == states(4) != states(5)
