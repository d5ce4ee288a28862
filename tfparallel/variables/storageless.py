"""Models built without storage: every variable has a shape, none has memory yet.

Keras makes variables so inside its own tracing (`keras.StatelessScope`), and initializes them when
it is left. Here each is initialized later, on a device of our choice, by the same initializer and
so with the same values.

A variable that waits has a value while Keras works out shapes, and nowhere else: whoever keeps what
it reads then, in a `build` or in a function that is traced once, would keep an initial value.

Rests on internals of Keras: the list of variables that wait, how one is initialized, and the graph
in which shapes are worked out.
"""

import collections
import functools
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.seams.keras import (
    DEFERRED_VARIABLES,
    NAME_NUMBERS,
    SHAPES_GRAPH,
    get_global,
    initialize,
    initializer_of,
    set_global,
    set_initializer,
)

__all__ = ["NeedsStorage", "StoragelessModel", "move_variables"]

_CANNOT_WAIT = "create a variable while in a stateless scope"
_READ = re.compile(r"'\S+' is read before it has a value\.")


class NeedsStorage(Exception):
    """A function makes a variable from a value, as `compile` does, or reads one that waits."""


class _Waiting(list):
    """The variables that wait; each tells if somebody else reads it than Keras, for its shape."""

    is_open = True

    def __init__(self):
        super().__init__()
        self.trainable: dict[int, bool] = {}  # Before the function froze any, by id.

    def append(self, variable: keras.Variable) -> None:
        """Notes a variable that has just been made."""
        initializer = initializer_of(variable)

        @functools.wraps(initializer)
        def noticed(*args, **kwargs):
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            if self.is_open and not getattr(graph, "name", "").startswith(SHAPES_GRAPH):
                raise NeedsStorage(f"'{variable.path}' is read before it has a value.")
            return initializer(*args, **kwargs)

        set_initializer(variable, noticed)
        self.trainable[id(variable)] = variable.trainable
        super().append(variable)


class StoragelessModel:
    """A model whose variables wait for their devices.

    Args:
        function: Builds a Keras model, and does not compile it.

    Raises:
        NeedsStorage: If the function makes a variable that cannot wait. What it drew from Python's
            random numbers, and the names it took, are put back, so that it may be called again in
            the plain way.

    Attributes:
        model: What the function returned.
    """

    def __init__(self, function: Callable[[], Any]):
        others = get_global(DEFERRED_VARIABLES) or []
        waiting = _Waiting()
        set_global(DEFERRED_VARIABLES, waiting)
        self._scope = keras.StatelessScope(initialize_variables=False)
        drawn = random.getstate()
        numbers = dict(get_global(NAME_NUMBERS) or {})
        try:
            with self._scope:
                self.model = function()
            self._waiting = {id(v): v for v in get_global(DEFERRED_VARIABLES)}
            self._trainable = waiting.trainable
        except (ValueError, NeedsStorage) as error:
            if isinstance(error, ValueError) and _CANNOT_WAIT not in str(error):
                raise
            random.setstate(drawn)
            set_global(NAME_NUMBERS, collections.defaultdict(int, numbers))
            read = _READ.search(str(error))  # In what Keras says of it.
            raise NeedsStorage(read[0] if read else str(error)) from error
        finally:
            waiting.is_open = False
            set_global(DEFERRED_VARIABLES, others)

    def waits_for(self, variable: keras.Variable) -> bool:
        """Whether a variable was made by the function and has no memory yet."""
        return id(variable) in self._waiting

    def waiting(self) -> list[keras.Variable]:
        """The variables that have no memory yet, in the order in which they were made."""
        return list(self._waiting.values())

    def initialize(self, variables: Iterable[keras.Variable], device: str | None = None) -> None:
        """Gives variables memory and their values on a device; those that have it are left alone.

        What the function assigned, by `load_weights` for example, is kept.
        """
        for variable in variables:
            if self._waiting.pop(id(variable), None) is None:
                continue
            with tf.device(device), _scope_of(variable):
                # A tape would never see one that is made frozen, also once it is trained.
                is_trained = variable.trainable
                variable.trainable = self._trainable[id(variable)]
                initialize(variable)
                variable.trainable = is_trained
                assigned = self._scope.get_current_value(variable)
                if assigned is not None:
                    variable.assign(assigned)

    def value_of(self, variable: keras.Variable) -> tf.Tensor:
        """The value of a variable that is not to have memory here, and waits no longer."""
        del self._waiting[id(variable)]
        assigned = self._scope.get_current_value(variable)
        if assigned is not None:
            return tf.convert_to_tensor(assigned)
        return initializer_of(variable)(tuple(variable.shape), dtype=variable.dtype)

    def initialize_rest(self) -> None:
        """Initializes what waits still: variables of metrics and optimizers."""
        self.initialize(self.waiting())


def move_variables(variables: Iterable[keras.Variable], device: str) -> None:
    """Has variables that have their values hold them on another device."""
    for variable in variables:
        with tf.device(device), _scope_of(variable):
            initialize(variable, variable.numpy())


def _scope_of(variable):
    """In which a variable has the name of one device, by which an optimizer may leave it out."""
    scope = variable.path.rpartition("/")[0]
    return tf.name_scope(f"{scope}/" if scope else "")
