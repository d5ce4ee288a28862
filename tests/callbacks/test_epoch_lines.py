"""The lines of `tfparallel train`: one an epoch, with what the training steps take."""

import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.callbacks import epoch_lines
from tfparallel.callbacks.epoch_lines import EpochLines, _duration, _of_three_digits
from tfparallel.data.batches import EpochBatches

X = np.zeros((10, 3), "float32")


def fit(data, epochs=2, build=None, num_passed=None, **options):
    batches = EpochBatches(data, global_batch_size=4, **options)
    model = (build or keras.Sequential)([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    seen = []

    def num_examples(*bounds):
        seen.append((bounds, batches.num_examples(*bounds)))
        return seen[-1][1]

    lines = EpochLines(num_examples, num_passed or batches.num_passed)
    model.fit(
        batches.dataset, epochs=epochs, validation_data=(X, X[:, :1]), verbose=0, shuffle=False,
        callbacks=[batches, lines],
    )  # fmt: skip
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_line_an_epoch(capsys, devices):
    def build(layers):
        model = keras.Sequential(layers)
        return tfparallel.data_parallel(model, devices=["CPU:0", "CPU:1"]) if devices > 1 else model

    seen = fit((X, X[:, :1]), build=build)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2, shown
    for number, line in enumerate(shown, 1):
        assert re.fullmatch(
            rf"Epoch {number}/2 - 3 steps in [\d.]+ m?s - [\d.]+ [mu]?s/step - [\d,.]+ examples/s"
            r" - loss: \d.* - mae: \d.* - val_loss: \d.* - val_mae: \d.*",
            line,
        ), line
    # The first step is traced, and not counted; the last of three holds two examples.
    assert [each for each in seen] == [((0, 1, 3), 6), ((1, 0, 3), 10)]


@pytest.mark.slow
def test_at_a_terminal_there_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(epoch_lines, "_REDRAW_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "70")
    fit((X, X[:, :1]))
    shown = capsys.readouterr().out.split("\r\x1b[K")
    assert sum(text.startswith("Epoch 2/2 2/3 ━━━━━━━━━━━────── ") for text in shown) == 1
    assert all(len(text) < 70 for text in shown if "━" in text)
    assert [text.count("\n") for text in shown if " - val_loss" in text] == [1, 1]


@pytest.mark.slow
def test_steps_that_are_passed_over_do_not_count(capsys):
    assert fit((X, X[:, :1]), epochs=1, num_passed=lambda epoch: 1) == [((0, 2, 3), 2)]


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        ((X, X), {}, [(0, 0, 3, 10), (3, 1, 2, 4), (3, 2, 3, 2)]),
        # A pass is 4 + 4 + 2; an epoch of five steps goes on in the next one.
        ((X, X), {"steps_per_epoch": 5}, [(0, 0, 5, 18), (1, 0, 5, 16), (1, 0, 1, 2)]),
        (tf.data.Dataset.from_tensor_slices((X, X)), {}, [(0, 0, 3, 10), (1, 0, 3, 10)]),
        (
            tf.data.Dataset.from_tensor_slices((X, X)).repeat(),
            {"steps_per_epoch": 7},
            [(0, 0, 7, 28), (1, 1, 7, 24)],
        ),
    ],
    ids=["arrays", "further passes", "a data set", "an endless one"],
)
def test_examples_are_counted(data, options, expected):
    batches = EpochBatches(data, global_batch_size=4, **options)
    for epoch, first, last, number in expected:
        assert batches.num_examples(epoch, first, last) == number


def test_batches_of_their_makers_are_not_counted():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return X, X[:, :1]

    assert EpochBatches(Batches(), global_batch_size=4).num_examples(0, 0, 2) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2e-5, "20 us"), (0.00514, "5.14 ms"), (0.5, "500 ms"), (3.25, "3.2 s"), (75, "1 min 15 s"),
        (3720, "1 h 2 min"),
    ],
)  # fmt: skip
def test_durations(seconds, text):
    assert _duration(seconds) == text


def test_no_more_digits_than_a_clock_has():
    numbers = (0.1234, 2.345, 12.34, 1234.5, 98765.4)
    assert [_of_three_digits(n) for n in numbers] == ["0.12", "2.35", "12", "1,230", "98,800"]
