"""`compile`, `fit`, `evaluate` and `predict` of any signature, called in any way."""

import keras
import numpy as np
import pytest

import tfparallel
from tfparallel.step.call import Call

TWO = ["CPU:0", "CPU:1"]
FORMS = {
    "replicas": lambda build: tfparallel.data_parallel(build, devices=TWO),
    "stages": lambda build: tfparallel.pipeline_parallel(build, TWO, num_micro_batches=2),
    "placed": lambda build: tfparallel.model_parallel(build, TWO),
}
X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


class Quieted(keras.Sequential):
    """Has methods of other signatures than Keras's."""

    def fit(self, data, rounds=1, *, quiet=True):
        return super().fit(*data, epochs=rounds, verbose=0 if quiet else 2)

    def predict(self, pictures, scale=1.0):
        return super().predict(pictures, verbose=0) * scale


class Rated(keras.Sequential):
    """Is compiled by a learning rate alone."""

    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), "mse")


def build(cls=keras.Sequential):
    keras.utils.set_random_seed(1)
    model = cls([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("form", ["replicas", "placed"])
def test_methods_of_the_users_own_may_have_another_signature(form):
    one, model = build(Quieted), FORMS[form](lambda: build(Quieted))
    for each in (one, model):
        assert each.fit((X, Y), rounds=2).epoch == [0, 1]
        assert each.fit((X, Y), 2, quiet=True).epoch == [0, 1]
    np.testing.assert_allclose(
        model.predict(X, scale=2.0), one.predict(X, 2.0), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(TypeError, match="pictures"):
        model.predict(rows=X)


def test_what_was_not_changed_is_passed_on_as_it_was():
    call = Call(build(), "fit", (X, Y), {"epochs": 2})
    call.add_callbacks(keras.callbacks.Callback())
    del call.arguments["epochs"]
    args, named = call.run(lambda *args, **named: (args, named))
    assert args[0] is X and args[1] is Y
    assert "epochs" not in named
    assert len(named["callbacks"]) == 1 and named["callbacks"] == call.callbacks


def test_a_method_that_takes_no_callbacks_is_given_none():
    call = Call(build(Quieted), "fit", ((X, Y),), {"quiet": False})
    call.add_callbacks(keras.callbacks.Callback())
    (data,), named = call.run(lambda *args, **kwargs: (args, kwargs))
    assert data[0] is X and named == {"quiet": False}


@pytest.mark.parametrize("form", [*FORMS, "parts"])
def test_compile_may_have_another_signature(form):
    """Story: `tensor_parallel` passed an optimizer and a loss on, and ended in a TypeError."""

    def build_rated():
        keras.utils.set_random_seed(1)
        dense = [keras.layers.Dense(units, dtype="float64") for units in (4, 1)]
        return Rated([keras.Input((3,), dtype="float64"), *dense])

    forms = FORMS | {"parts": lambda build: tfparallel.tensor_parallel(build, TWO)}
    one, model = build_rated(), forms[form](build_rated)
    x = np.random.default_rng(1).normal(size=(8, 3))
    for each in (one, model):
        each.compile(rate=0.25)
        each.fit(x, x[:, :1], epochs=2, verbose=0)
    for expected, weight in zip(one.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-12)  # Sums in another order.


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_arguments_may_come_by_place_or_by_name(form):
    histories = []
    for call in (
        lambda model: model.fit(X, Y, 4, 2, 0),
        lambda model: model.fit(x=X, y=Y, batch_size=4, epochs=2, verbose=0),
    ):
        histories.append(call(FORMS[form](build)).history)
    assert histories[0] == histories[1]
