"""The class that extends the user's model: it overrides each method of Keras's trainer once.

    compile                    _look_at ──► Keras's ──► _prepare_compiled
    fit, evaluate, predict     _look_at ──► _begin ──► Keras's
    train_on_batch, …          _around_a_batch: Keras's
    train_step, …              _take_step, which calls Keras's or replaces it

"Keras's" is the user's own method if the user's class overrides it.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tfparallel.step.call import Call


class ExtendedModel:
    """Extends a Keras model; the parallelisms implement the hooks, which begin with `_`."""

    def compile(self, *args, **kwargs):
        """Compiles the model, as `keras.Model.compile` does; no scope is needed."""
        with Call(self, "compile", args, kwargs) as call:
            self._look_at(call)
            call.run(super().compile)
        self._prepare_compiled()

    def fit(self, *args, **kwargs):
        """Trains the model, as `keras.Model.fit` does; batch sizes are global."""
        return self._run(Call(self, "fit", args, kwargs))

    def evaluate(self, *args, **kwargs):
        """Evaluates the model, as `keras.Model.evaluate` does."""
        return self._run(Call(self, "evaluate", args, kwargs))

    def predict(self, *args, **kwargs):
        """Predicts, as `keras.Model.predict` does."""
        return self._run(Call(self, "predict", args, kwargs))

    def _run(self, call: Call) -> Any:
        with call:
            self._look_at(call)
            self._begin(call)
            return call.run(getattr(super(), call.kind))

    def train_on_batch(self, *args, **kwargs):
        """Trains on a global batch, as `keras.Model.train_on_batch` does."""
        with self._around_a_batch("fit"):
            return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args, **kwargs):
        """Evaluates on a global batch, as `keras.Model.test_on_batch` does."""
        with self._around_a_batch("evaluate"):
            return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, *args, **kwargs):
        """Predicts on a global batch, as `keras.Model.predict_on_batch` does."""
        with self._around_a_batch("predict"):
            return super().predict_on_batch(*args, **kwargs)

    def train_step(self, data):
        """Runs one step of training on a global batch."""
        return self._take_step("fit", super().train_step, data)

    def test_step(self, data):
        """Runs one step of evaluation on a global batch."""
        return self._take_step("evaluate", super().test_step, data)

    def predict_step(self, data):
        """Runs one step of prediction on a global batch."""
        return self._take_step("predict", super().predict_step, data)

    def _look_at(self, call: Call) -> None:
        """Checks or replaces the arguments of a call, which may be one of `compile`."""

    def _begin(self, call: Call) -> None:
        """Enters the contexts of a call of `fit`, `evaluate` or `predict`."""

    def _prepare_compiled(self) -> None:
        """Prepares the optimizer and the losses that the model was compiled with."""

    def _around_a_batch(self, kind: str) -> AbstractContextManager:
        """The context of a single step on a batch: "fit", "evaluate" or "predict"."""
        return contextlib.nullcontext()

    def _take_step(self, kind: str, of_keras: Callable, data: Any) -> Any:
        """Runs one step of "fit", "evaluate" or "predict".

        Args:
            kind: Which one.
            of_keras: Keras's step, or the user's.
            data: The global batch.
        """
        return of_keras(data)
