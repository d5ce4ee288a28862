"""A call of `fit`, `evaluate`, `predict` or `compile`: its arguments, bound once, and its contexts.

    model.fit(…) ──► Call ──► _look_at    checks, replaces or adds arguments
                          ──► _begin      enters contexts: guards, policies, clearer errors
                          ──► run         calls the method of Keras, or of the user

Each class of an extended model adds to `_look_at` and `_begin`, and then calls `super()`
(`extended_model.py`). `compile` has no `_begin`.
"""

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from tfparallel.data.batch_size import full_batch_size
from tfparallel.extend import is_own, original_class

_KINDS = inspect.Parameter


class Call:
    """One call, a context manager that exits the contexts given to `enter`.

    Args:
        model: The extended model.
        kind: "fit", "evaluate", "predict" or "compile".
        args: The positional arguments of the method.
        kwargs: The keyword arguments of the method.

    Attributes:
        kind: "fit", "evaluate", "predict" or "compile".
        arguments: The arguments by name, to be changed in place. If the user overrides the method
            with another signature, only those that Keras's method has, too.
        is_own: Whether the user overrides the method.
        received: Gathers predictions, if not all workers get all of them.

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
        self.arguments = {name: named[name] for name in named if name in of_both - {"self"}}
        self._at_first = dict(self.arguments)

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *error) -> bool | None:
        return self._around.__exit__(*error)

    def enter(self, context: AbstractContextManager) -> Any:
        """Enters a context; the call exits its contexts at its end, the last one first."""
        return self._around.enter_context(context)

    @property
    def has_callback_list(self) -> bool:
        """Whether callbacks are a `CallbackList`, as for a validation within `fit`."""
        return isinstance(self.arguments.get("callbacks"), keras.callbacks.CallbackList)

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks as a flat list, from None, one, a list or a `CallbackList`."""
        argument = self.arguments.get("callbacks")
        if isinstance(argument, keras.callbacks.CallbackList):
            return list(argument.callbacks)
        return [] if argument is None else keras.tree.flatten(argument)

    def add_callbacks(self, *callbacks: keras.callbacks.Callback) -> None:
        """Appends callbacks."""
        self.arguments["callbacks"] = [*self.callbacks, *callbacks]

    def full_batch_size(self) -> int | None:
        """The number of rows of a full batch; None if unknown."""
        if self.arguments.get("x") is None:
            return None
        names = ("x", "batch_size", "validation_split")
        return full_batch_size(**{k: self.arguments[k] for k in names if k in self.arguments})

    def run(self, method: Callable) -> Any:
        """Calls a method with the original arguments and the changes since.

        Omits arguments that a user's own method does not take, such as callbacks.
        """
        of_keywords = [
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is _KINDS.VAR_KEYWORD
        ]
        arguments = self._bound.arguments
        for name in self._at_first.keys() - self.arguments.keys():
            arguments.pop(name, None)
        for name, value in self.arguments.items():
            if name in self._at_first and self._at_first[name] is value:
                continue
            if name in self._signature.parameters:
                arguments[name] = value
            elif of_keywords:
                arguments[of_keywords[0]] = arguments.get(of_keywords[0], {}) | {name: value}
        # In the order of the signature, without the model, to which the method is bound.
        bound = inspect.BoundArguments(
            self._signature, {n: arguments[n] for n in self._signature.parameters if n in arguments}
        )
        return method(*bound.args[1:], **bound.kwargs)
