"""A Keras variable without memory of its own, composed of other variables.

For the layer, the model, files and users it remains one `keras.Variable` of the whole shape. A tape
differentiates with respect to memory, so it gets a handle that represents the handles of the
pieces. An optimizer that knows nothing about pieces may assign to the value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.problems import PlacementError
from tfparallel.seams.tensorflow import stand_for


class _Handle(tf.__internal__.CompositeTensor):
    """Represents the handles of the pieces to a tape.

    TensorFlow asks a composite tensor for its components, and passes it their gradients.
    """

    def __init__(self, variable: "ComposedVariable"):
        self._variable = variable

    @property
    def _type_spec(self):
        return tf.TensorSpec(self._variable.shape, self._variable.dtype)

    @property
    def __composite_gradient__(self):
        return self

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the variable's elements."""
        return tf.as_dtype(self._variable.dtype)

    def get_gradient_components(self, handle) -> list:
        """Returns the handles of the pieces."""
        return [piece.handle for piece in handle._variable.pieces]

    def replace_gradient_components(self, handle, gradients):
        """Returns the gradient of the whole; None if the target does not depend on it."""
        if all(gradient is None for gradient in gradients):
            return None
        return handle._variable.gradient_of(gradients)


class ComposedVariable:
    """Base class that extends a Keras variable; subclasses compose it from pieces.

    Attributes:
        pieces: The TensorFlow variables in this process that hold the value.
        gradient_of: Takes the gradients of the pieces, some of which may be None, and returns the
            gradient of the whole.
        storage_key: The name by which an optimizer knew the variable's storage, if it had its own.
    """

    storage_key: str | None = None
    pieces: Sequence[tf.Variable]
    gradient_of: Callable[[Sequence], Any]

    @property
    def handle(self) -> _Handle:
        """The handle by which a tape identifies the variable."""
        return _Handle(self)

    def _as_variable(self, value: tf.Tensor) -> tf.Tensor:
        stand_for(value, self, self.storage_key or f"composed_{id(self)}")
        return value

    @property
    def _shared_name(self) -> str:
        return self.name

    def _serialize_to_tensors(self):
        # `tf.train.Checkpoint` writes a whole variable, and reads one.
        return {"VARIABLE_VALUE": self.value}

    def _restore_from_tensors(self, restored_tensors):
        self.assign(restored_tensors["VARIABLE_VALUE"])

    def _export_to_saved_model_graph(self, *args, **kwargs):
        raise PlacementError(
            "A SavedModel must hold whole weights. Received: an export of the variable "
            f"'{self.path}', which is split. Save the model with `model.save('model.keras')`, and "
            "export the model that `keras.models.load_model` returns."
        )
