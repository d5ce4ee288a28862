"""Builds a model again from what its constructor was given, where it has no config.

Keras's examples hand built models to one of a class of their own, which keeps them under the names
of its constructor's arguments:

```
   VAE(encoder, decoder)     self.encoder, self.decoder ──► VAE(copy of encoder, copy of decoder)
```
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfparallel.cloning.verify_clone import NotAlike
from tfparallel.extend import original_class
from tfparallel.seams.keras import layers_in

__all__ = ["NotKept", "again", "unbuilt_parts"]

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class NotKept(NotAlike):
    """A class does not keep the arguments of its constructor where they can be found again."""


def unbuilt_parts(model: keras.Model) -> list[str]:
    """The names of a model's layers that have no variables yet, and will have some."""
    return [
        layer.name
        for layer in layers_in(model, include_self=False)
        if not layer.built and original_class(layer).build is not keras.Layer.build
    ]


def again(model: keras.Model, copied: Callable[[keras.Layer], keras.Layer]) -> keras.Model:
    """Calls the constructor of a model's class with copies of what it holds.

    Args:
        model: A model that keeps each argument of its constructor in an attribute of that name.
        copied: Returns a copy of a layer or of a model.

    Raises:
        NotKept: If it does not keep one.
        NotAlike: If an argument has no copy.
    """
    cls, arguments, missing, known = original_class(model), {}, [], {}

    def copy_of(value: Any) -> Any:
        if isinstance(value, keras.Layer):
            if id(value) not in known:
                known[id(value)] = copied(value)
            return known[id(value)]
        if isinstance(value, keras.Variable | keras.Optimizer | keras.Metric):
            raise NotAlike(
                f"A {type(value).__name__} that the constructor of {cls.__name__} is given belongs "
                f"to one model, and has no copy. Received: {value}."
            )
        return value

    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind in _VARIABLE:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments["name"] = model.name
        elif hasattr(model, name):
            arguments[name] = keras.tree.map_structure(copy_of, getattr(model, name))
        elif parameter.default is inspect.Parameter.empty:
            missing.append(name)
    if missing:
        attributes = ", ".join(f"`{name}`" for name in missing)
        raise NotKept(
            f"A copy of model '{model.name}' needs the arguments that {cls.__name__} was created "
            "with. An attribute with the name of each argument is required, or a `get_config` "
            f"that returns them. Received: no attribute {attributes}. Pass the function that "
            "builds it, or keep each argument under its own name (`self."
            f"{missing[0]} = {missing[0]}`)."
        )
    return cls(**arguments)
