"""Each program of the table is trained as one device trains it, or refused: never otherwise."""

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.judge.program import DRAWN, EITHER, EXACT, PROGRAMS, REFUSED
from tests.judge.programs import FAST
from tests.parity.case import compare, observe

DEVICES = ["CPU:0", "CPU:1"]
SEED, STEPS, LIMIT = 5, 2, 1e-9
MIXES = r"mix(es|ed)? (the )?(examples|rows)|examples of the batch"


class Changed(AssertionError):
    """A refusal that came too late."""


def fitted(program, model, size, num_epochs):
    """Compiles and trains, without a step in another order."""
    model.compile(keras.optimizers.SGD(0.01), **program.compile())
    x, y = program.rows, program.targets
    options = {"epochs": num_epochs, "verbose": 0, "shuffle": False}
    weight = program.sample_weight
    if program.as_dataset:
        parts = (x, y) if weight is None else (x, y, weight)
        batches = tf.data.Dataset.from_tensor_slices(parts).batch(size)
        return model.fit(batches, **options)
    return model.fit(x, y, batch_size=size, sample_weight=weight, **options)


@contextlib.contextmanager
def unchanged_if_refused(model):
    """Raises `Changed` for a `ValueError` that comes behind a change of weights."""
    before = model.get_weights()
    try:
        yield
    except ValueError as error:
        # A model that Keras builds when it is first called had none before.
        pairs = zip(before, model.get_weights(), strict=False)
        if not all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
            raise Changed("Weights changed before the program was refused") from error
        raise


def trained(program, form, size):
    """What the program does under a form: variables, losses and metrics by name.

    Raises:
        Changed: If it is refused, and weights are no longer what they were.
        ValueError: If it is refused in time.
    """
    keras.utils.set_random_seed(SEED)
    model = form(lambda: (keras.utils.set_random_seed(SEED), program.build())[1])
    if program.between is not None:
        fitted(program, model, size, 1)
        program.between(model)
    with unchanged_if_refused(model):
        history = fitted(program, model, size, STEPS).history
    if program.then is None:
        return observe(model, history)
    with unchanged_if_refused(model):
        return observe(model, history, then=program.then(model, program.rows))


def on_several(program, build):
    devices = DEVICES[: program.num_devices]
    return tfparallel.data_parallel(build, devices=devices, **program.options)


def verdict_of(program):
    """What several devices do: "exact", "refused", or "other" with the largest difference."""
    size = program.batch_size or program.num_rows
    expected = trained(program, lambda build: build(), program.batch_on_one or size)
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float64")
    try:
        seen = trained(program, functools.partial(on_several, program), size)
    except ValueError as error:
        if re.search(MIXES, str(error)) or "Received:" in str(error) and program.verdict == EITHER:
            return REFUSED, str(error)
        raise
    worst = compare(expected, seen)[0]
    return (EXACT if worst.relative <= LIMIT else "other"), worst


def parameters():
    for name, program in PROGRAMS.items():
        marks = [] if name in FAST else [pytest.mark.slow]
        yield pytest.param(program, id=name.replace(" ", "-"), marks=marks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("program", list(parameters()))
def test_is_exact_or_refused(program, in_float64):
    verdict, detail = verdict_of(program)
    right = {EXACT: [EXACT], REFUSED: [REFUSED], EITHER: [EXACT, REFUSED], DRAWN: [EXACT, "other"]}
    assert verdict in right[program.verdict], f"{verdict}, not {program.verdict}: {detail}"
