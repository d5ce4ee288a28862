"""Layer classes for a model's definition that request a split, without naming devices.

`ColumnParallelDense(128)` makes a plain `keras.layers.Dense(128)` and marks it with the class that
was written:

    definition                       without tensor_parallel      with it, on two devices
    ColumnParallelDense(128)         Dense(128)                   W = [ W_0 | W_1 ]

So the model is plain Keras until `tensor_parallel` reads the marks: its results, layer names and
files are those of the plain layers.
"""

from typing import Any, ClassVar

import keras

_NOTE = "_tfparallel_written_as"


class ParallelHint:
    """Base of the classes that you can write in a model's definition.

    Attributes:
        plain: The Keras class to instantiate, with the same arguments.
        kind: How `tensor_parallel` splits it, as in its argument `split`.
    """

    plain: ClassVar[type[keras.Layer]]
    kind: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> keras.Layer:
        """Makes the plain layer, and marks it with this class.

        Raises:
            TypeError: If the class has no plain class, or as the plain class raises it.
            ValueError: As the plain class raises it.
        """
        if "plain" not in vars(cls):
            raise TypeError(
                f"Only layers of Keras's own classes can be split, and `{cls.__name__}` stands for "
                f"none. Received: a call of `{cls.__name__}`. Use a Keras layer, and request its "
                "split with `tensor_parallel(..., split={name: kind})`."
            )
        try:
            layer = cls.plain(*args, **kwargs)
        except (TypeError, ValueError) as error:
            # Error classes of their own may take other arguments than a message.
            raise (TypeError if isinstance(error, TypeError) else ValueError)(
                f"`{cls.__name__}` takes the arguments of `keras.layers.{cls.plain.__name__}`. "
                f"{error}"
            ) from error
        note(layer, cls)
        return layer


def note(layer: keras.Layer, written: type[ParallelHint] | None) -> None:
    """Marks a plain layer with the class that was written."""
    if written is not None:
        # Bypass Keras's tracking: the mark is not part of the model or of its file.
        object.__setattr__(layer, _NOTE, written)


def hint_of(layer: keras.Layer) -> type[ParallelHint] | None:
    """Returns the class as which a plain layer was written; None if it is a Keras class."""
    return getattr(layer, _NOTE, None)
