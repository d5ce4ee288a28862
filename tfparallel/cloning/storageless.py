"""Models built without storage: every variable has a shape, but no memory yet.

Keras creates such variables inside its own tracing (`keras.StatelessScope`), and initializes them
when the scope ends. Here each is initialized later, on a device of our choice, by the same
initializer, so it gets the same value.

A waiting variable has a value only while Keras infers shapes: code that stores a value it read
then, in a `build` or in a function that is traced once, would keep the initial value.

Relies on internals of Keras: the list of waiting variables, how one is initialized, and the graph
in which Keras infers shapes.
"""

import collections
import functools
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.seams.keras import (
    DEFERRED_VARIABLES,
    GLOBAL_SEED_GENERATOR,
    NAME_NUMBERS,
    SHAPES_GRAPH,
    get_global,
    initialize,
    initializer_of,
    set_global,
    set_initializer,
    storage_of,
)

_CANNOT_WAIT = "create a variable while in a stateless scope"
_READ = re.compile(r"'\S+' is read before it has a value\.")


class NeedsStorage(Exception):
    """Raised if a function creates a variable from a value, as `compile` does, or reads a value."""


class _Waiting(list):
    """The waiting variables; reading one raises, except when Keras infers shapes."""

    is_open = True

    def __init__(self):
        super().__init__()
        self.trainable: dict[int, bool] = {}  # By id, before the function froze any.

    def append(self, variable: keras.Variable) -> None:
        """Adds a new variable."""
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
        NeedsStorage: If the function creates a variable that cannot wait. The random numbers of
            Python, NumPy and Keras, and Keras's name counters, are restored, so it can be called
            again the plain way.

    Attributes:
        model: The result of the function.
    """

    def __init__(self, function: Callable[[], Any]):
        others = get_global(DEFERRED_VARIABLES) or []
        waiting = _Waiting()
        set_global(DEFERRED_VARIABLES, waiting)
        self._scope = keras.StatelessScope(initialize_variables=False)
        random_state, numpy_state = random.getstate(), np.random.get_state()
        seeds = get_global(GLOBAL_SEED_GENERATOR)
        name_numbers = dict(get_global(NAME_NUMBERS) or {})
        try:
            with self._scope:
                self.model = function()
            self._waiting = {id(v): v for v in get_global(DEFERRED_VARIABLES)}
            self._trainable = waiting.trainable
        except (ValueError, NeedsStorage) as error:
            if isinstance(error, ValueError) and _CANNOT_WAIT not in str(error):
                raise
            random.setstate(random_state)
            np.random.set_state(numpy_state)
            set_global(GLOBAL_SEED_GENERATOR, seeds)  # A new one would wait for storage.
            set_global(NAME_NUMBERS, collections.defaultdict(int, name_numbers))
            read = _READ.search(str(error))  # Keras wraps the message.
            raise NeedsStorage(read[0] if read else str(error)) from error
        finally:
            waiting.is_open = False
            set_global(DEFERRED_VARIABLES, others)

    def waits_for(self, variable: keras.Variable) -> bool:
        """Whether the function created a variable that has no memory yet."""
        return id(variable) in self._waiting

    def waiting(self) -> list[keras.Variable]:
        """The variables without memory, in the order of their creation."""
        return list(self._waiting.values())

    def initialize(self, variables: Iterable[keras.Variable], device: str | None = None) -> None:
        """Initializes variables on a device, except those that already have memory.

        Keeps values that the function assigned, for example by `load_weights`.
        """
        for variable in variables:
            if self._waiting.pop(id(variable), None) is None:
                continue
            with tf.device(device), _scope_of(variable):
                _initialize(variable, self._trainable[id(variable)])
                assigned = self._scope.get_current_value(variable)
                if assigned is not None:
                    variable.assign(assigned)

    def initialize_drawn(self, device_of: Callable[[keras.Variable], str | None]) -> None:
        """Initializes variables whose initializers may share a generator, in order of creation.

        Args:
            device_of: Returns the device of a variable.
        """
        for variable in self.waiting():
            if not _is_repeatable(initializer_of(variable).__wrapped__):
                self.initialize([variable], device_of(variable))

    def value_of(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value of a variable that is stored elsewhere, and stops waiting for it."""
        del self._waiting[id(variable)]
        assigned = self._scope.get_current_value(variable)
        if assigned is not None:
            return tf.convert_to_tensor(assigned)
        return initializer_of(variable)(tuple(variable.shape), dtype=variable.dtype)

    def initialize_rest(self) -> None:
        """Initializes the remaining variables, such as those of metrics and optimizers."""
        self.initialize(self.waiting())


def _is_repeatable(initializer) -> bool:
    """Whether an initializer returns the same values at any time: Keras's own, with a number."""
    is_of_keras = type(initializer).__module__.startswith("keras.")
    return is_of_keras and isinstance(getattr(initializer, "seed", 0), int)


def move_variables(variables: Iterable[keras.Variable], device: str) -> None:
    """Moves initialized variables to another device."""
    for variable in variables:
        with tf.device(device), _scope_of(variable):
            _initialize(variable, storage_of(variable).trainable, variable.numpy())


def _initialize(variable, is_watched: bool, value: Any = None) -> None:
    """Allocates a variable that tapes watch, or not, whether or not it is frozen now.

    As in Keras, a tape watches the variables that were created trainable, frozen or unfrozen later.
    """
    is_trained, variable.trainable = variable.trainable, is_watched
    initialize(variable, value)
    variable.trainable = is_trained


def _scope_of(variable):
    """The scope of a variable's name on one device, by which an optimizer may exclude it."""
    scope = variable.path.rpartition("/")[0]
    return tf.name_scope(f"{scope}/" if scope else "")
