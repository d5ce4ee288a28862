"""The state of Keras's own callbacks, such as the patience of `EarlyStopping`."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

# What they count and compare with. Their settings may differ in a resumed run.
_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


class CallbackStates:
    """The state of some callbacks, between two epochs.

    Attributes:
        numbers: Numbers or None at the last `take`, by callback and attribute.
        arrays: Lists of arrays, by `callback/attribute/place`.
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback]):
        """Takes the state.

        Args:
            callbacks: The callbacks, in order; those that `_ATTRIBUTES` lacks are ignored.
        """
        self._callbacks: dict[str, tuple[keras.callbacks.Callback, tuple[str, ...]]] = {}
        for callback in callbacks:
            for kind, attributes in _ATTRIBUTES.items():
                if isinstance(callback, kind):
                    same = [key for key in self._callbacks if key.startswith(kind.__name__)]
                    self._callbacks[f"{kind.__name__} {len(same) + 1}"] = callback, attributes
        self.take()

    def take(self) -> None:
        """Takes the current state."""
        self.numbers: dict[str, dict[str, Any]] = {key: {} for key in self._callbacks}
        self.arrays: dict[str, np.ndarray] = {}
        for key, (callback, attributes) in self._callbacks.items():
            for name in attributes:
                value = getattr(callback, name, None)
                if isinstance(value, list):
                    arrays = map(np.asarray, value)
                    self.arrays |= {f"{key}/{name}/{i}": array for i, array in enumerate(arrays)}
                else:
                    self.numbers[key][name] = None if value is None else np.asarray(value).item()

    def restore(
        self, numbers: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Restores what was taken in another process; drops what is of other callbacks."""
        values = {(key, name): value for key in numbers for name, value in numbers[key].items()}
        for path, array in arrays.items():
            key, name, _ = path.split("/")
            values.setdefault((key, name), []).append(array)
        for (key, name), value in values.items():
            if key in self._callbacks:
                setattr(self._callbacks[key][0], name, value)
        self.take()

    @property
    def has_stopped(self) -> bool:
        """Whether an `EarlyStopping` has ended the training, and would again."""
        return any(
            each.stopped_epoch > 0 and each.wait >= each.patience
            for each, _ in self._callbacks.values()
            if isinstance(each, keras.callbacks.EarlyStopping)
        )
