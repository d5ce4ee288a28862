"""A call of `fit`, `evaluate` or `predict`: its arguments, bound once, and what is around it.

    model.fit(…) ──► Call ──► _look_at    arguments are checked, or others put in their place
                         ──► _begin     what is around it is entered: guards, policies, words
                         ──► run        Keras's own method

Each class of an extended model adds to the two in the middle, and calls the next one's.
"""

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import keras

from tfparallel.data.batch_size import full_batch_size
from tfparallel.extend import is_own

__all__ = ["Call"]


class Call:
    """One call; as a context, what `enter` was given ends with it.

    Args:
        model: The extended model.
        kind: "fit", "evaluate" or "predict".
        args: What the method was given.
        kwargs: Likewise.

    Attributes:
        kind: As given.
        asked: The arguments by name, to be changed in place; empty where a method of the user's
            own takes others than Keras's.
        is_own: Whether the method is the user's own.

    Raises:
        TypeError: If Keras's method does not take the arguments.
    """

    def __init__(self, model: keras.Model, kind: str, args: tuple, kwargs: dict[str, Any]):
        self.kind, self.is_own = kind, is_own(model, kind)
        self._given, self._around = (args, kwargs), contextlib.ExitStack()
        try:
            bound = inspect.signature(getattr(keras.Model, kind)).bind(model, *args, **kwargs)
        except TypeError:
            if not self.is_own:
                raise
            self.asked: dict[str, Any] = {}
        else:
            self.asked = dict(bound.arguments)
            del self.asked["self"]
            self.asked |= self.asked.pop("kwargs", {})
        self._bound = dict(self.asked)

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *error) -> bool | None:
        return self._around.__exit__(*error)

    def enter(self, context: AbstractContextManager) -> Any:
        """Enters a context, which is left when the call ends; the last one first."""
        return self._around.enter_context(context)

    @property
    def is_within_fit(self) -> bool:
        """Whether it is a validation of `fit`, which hands on its callbacks."""
        return isinstance(self.asked.get("callbacks"), keras.callbacks.CallbackList)

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks, in a flat list: none, one, a list or a `CallbackList` was given."""
        given = self.asked.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            return list(given.callbacks)
        return [] if given is None else keras.tree.flatten(given)

    def add_callbacks(self, *callbacks: keras.callbacks.Callback) -> None:
        """Adds callbacks behind those that there are."""
        self.asked["callbacks"] = [*self.callbacks, *callbacks]

    def full_batch_size(self) -> int | None:
        """How many rows a full batch has; None if nothing says so."""
        names = ("x", "batch_size", "validation_split")
        return full_batch_size(**{k: self.asked[k] for k in names if k in self.asked})

    def run(self, method) -> Any:
        """Calls a method: as it was called, or with what has changed since."""
        asked, bound = self.asked, self._bound
        if asked.keys() == bound.keys() and all(asked[k] is bound[k] for k in asked):
            args, kwargs = self._given
            return method(*args, **kwargs)
        return method(**asked)
