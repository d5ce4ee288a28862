"""A call of `fit`, `evaluate` or `predict`: its arguments, bound once, and what is around it.

    model.fit(…) ──► Call ──► _look_at    arguments are checked, and replaced or added to
                         ──► _begin     contexts are entered: guards, policies, plainer errors
                         ──► run        the method of Keras, or of the user

Each class of an extended model adds to the two in the middle, and then calls `super()`.
"""

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from tfparallel.data.batch_size import full_batch_size
from tfparallel.extend import is_own, original_class

__all__ = ["Call"]

_KINDS = inspect.Parameter


class Call:
    """One call; as a context, what `enter` was given ends with it.

    Args:
        model: The extended model.
        kind: "fit", "evaluate" or "predict".
        args: What the method was given.
        kwargs: Likewise.

    Attributes:
        kind: As given.
        asked: The arguments by name, to be changed in place. If the method is the user's own, and
            has another signature, those of them that Keras's method has.
        is_own: Whether the method is the user's own.
        received: What gathers predictions, if not all workers are to have all of them.

    Raises:
        TypeError: If the method does not take the arguments.
    """

    def __init__(self, model: keras.Model, kind: str, args: tuple, kwargs: dict[str, Any]):
        self.kind, self.is_own = kind, is_own(model, kind)
        self.received: Any = None
        self._around = contextlib.ExitStack()
        of_keras = inspect.signature(getattr(keras.Model, kind))
        self._signature = inspect.signature(getattr(original_class(model), kind))
        self._bound = self._signature.bind(model, *args, **kwargs)
        named = dict(self._bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is _KINDS.VAR_KEYWORD:
                named |= named.pop(name, {})
        of_both = named.keys() & of_keras.parameters.keys() if self.is_own else named.keys()
        self.asked = {name: named[name] for name in named if name in of_both - {"self"}}
        self._at_first = dict(self.asked)

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *error) -> bool | None:
        return self._around.__exit__(*error)

    def enter(self, context: AbstractContextManager) -> Any:
        """Enters a context, which is left when the call ends; the last one first."""
        return self._around.enter_context(context)

    @property
    def has_callback_list(self) -> bool:
        """Whether callbacks come in a `CallbackList`, as those of a validation within `fit` do."""
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
        if self.asked.get("x") is None:
            return None
        names = ("x", "batch_size", "validation_split")
        return full_batch_size(**{k: self.asked[k] for k in names if k in self.asked})

    def run(self, method: Callable) -> Any:
        """Calls a method as it was called, with what has changed since.

        A method of the user's own that takes no callbacks, say, is given none.
        """
        of_keywords = [
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is _KINDS.VAR_KEYWORD
        ]
        arguments = self._bound.arguments
        for name in self._at_first.keys() - self.asked.keys():
            arguments.pop(name, None)
        for name, value in self.asked.items():
            if name in self._at_first and self._at_first[name] is value:
                continue
            if name in self._signature.parameters:
                arguments[name] = value
            elif of_keywords:
                arguments[of_keywords[0]] = arguments.get(of_keywords[0], {}) | {name: value}
        # In the order of the signature, and the model, to which the method is bound, left out.
        bound = inspect.BoundArguments(
            self._signature, {n: arguments[n] for n in self._signature.parameters if n in arguments}
        )
        return method(*bound.args[1:], **bound.kwargs)
