"""Layers that a model's definition asks to be split, without a device in it.

Constructing `ColumnParallelDense(128)` makes a plain `keras.layers.Dense(128)` that notes as what
it was written:

    definition                       without tensor_parallel      with it, on two devices
    ColumnParallelDense(128)         Dense(128)                   W = [ W_0 | W_1 ]

So the model is plain Keras until `tensor_parallel` reads the notes: its results, its layers' names
and its files are those of the plain layers.
"""

from typing import Any, ClassVar

import keras

__all__ = ["ParallelHint", "hint_of", "note"]

_NOTE = "_tfparallel_written_as"


class ParallelHint:
    """What the classes share that can be written in a model's definition.

    Attributes:
        plain: The class of Keras that is made, with the same arguments.
        kind: How `tensor_parallel` is to split it, as in its argument `split`.
    """

    plain: ClassVar[type[keras.Layer]]
    kind: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> keras.Layer:
        """Makes the plain layer, and notes as what it was written.

        Raises:
            TypeError: If the class stands for no plain one, or as the plain class raises it.
            ValueError: As the plain class raises it.
        """
        if "plain" not in vars(cls):
            raise TypeError(
                "A layer that is split must be of one of Keras's own classes, and "
                f"`{cls.__name__}` stands for none. Received: a call of `{cls.__name__}`. Write a "
                "layer of Keras, and ask by `tensor_parallel(..., split={name: kind})`."
            )
        try:
            layer = cls.plain(*args, **kwargs)
        except (TypeError, ValueError) as error:
            # Of a class of their own, errors may take other arguments than a message.
            raise (TypeError if isinstance(error, TypeError) else ValueError)(
                f"`{cls.__name__}` takes the arguments of `keras.layers.{cls.plain.__name__}`. "
                f"{error}"
            ) from error
        note(layer, cls)
        return layer


def note(layer: keras.Layer, written: type[ParallelHint] | None) -> None:
    """Notes as what a plain layer was written."""
    if written is not None:
        # Past Keras's tracking: it is no part of the model, nor of its file.
        object.__setattr__(layer, _NOTE, written)


def hint_of(layer: keras.Layer) -> type[ParallelHint] | None:
    """Returns as what a plain layer was written; None for one of Keras's own classes."""
    return getattr(layer, _NOTE, None)
