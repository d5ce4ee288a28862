"""The state of a run at the end of an epoch, and resuming from it.

A folder holds one small JSON file that names the weights file it belongs to.
Both are written under another name and renamed, weights first, so that a
process killed at any moment leaves the state of one epoch whole: weights,
optimizer, epoch number, history and the configuration that made them.
"""

import dataclasses
import json
import os
from typing import Any

import keras
import numpy as np

__all__ = ["EpochCheckpoint", "EpochSeeds", "EpochState", "read_state"]

_STATE = "state.json"


@dataclasses.dataclass(frozen=True)
class EpochState:
    """What a folder holds.

    Attributes:
        epoch: How many epochs are done; training goes on with this one
            (counted from 0).
        weights_path: The file with the weights and the optimizer's state.
        history: Losses and metrics of the epochs done, as Keras's `History`.
        configuration: What must be the same when the run goes on.
    """

    epoch: int
    weights_path: str
    history: dict[str, list[float]]
    configuration: dict[str, Any]


def read_state(directory: str) -> EpochState | None:
    """Returns the newest state in a folder, or None if there is none.

    Raises:
        ValueError: If the folder's state file is not one of ours, or the
            weights that it names are missing.
    """
    path = os.path.join(directory, _STATE)
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        state = EpochState(
            epoch=int(content["epoch"]),
            weights_path=os.path.join(directory, os.path.basename(content["weights"])),
            history=dict(content["history"]),
            configuration=dict(content["configuration"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"The checkpoint cannot be read; a state file written by tfparallel is required. "
            f"Received: {path} ({type(error).__name__}: {error}). Use an empty folder."
        ) from error
    if not os.path.exists(state.weights_path):
        raise ValueError(
            "The checkpoint is not complete: its weights file is missing. "
            f"Received: {path}, which names {state.weights_path}. Use an empty folder."
        )
    return state


class EpochCheckpoint(keras.callbacks.Callback):
    """Writes the state of the run at the end of every epoch.

    Beside `keras.callbacks.BackupAndRestore` it keeps the history, is whole
    whenever the process dies, and stays after the last epoch, so that a run
    can be extended.

    Args:
        directory: The folder; made if it is missing.
        configuration: What must be the same when the run goes on.
        history: The history of the epochs done before, on a resumed run.
    """

    def __init__(
        self,
        directory: str,
        configuration: dict[str, Any],
        history: dict[str, list[float]] | None = None,
    ):
        super().__init__()
        self._directory = directory
        self._configuration = configuration
        self.history = {name: list(values) for name, values in (history or {}).items()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the weights, then the state that names them, then tidies up."""
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(float(value))
        os.makedirs(self._directory, exist_ok=True)
        weights = f"epoch_{epoch + 1:05d}.weights.h5"
        unfinished = os.path.join(self._directory, "unfinished.weights.h5")
        self.model.save_weights(unfinished, overwrite=True)
        os.replace(unfinished, os.path.join(self._directory, weights))
        content = {
            "epoch": epoch + 1,
            "weights": weights,
            "history": self.history,
            "configuration": self._configuration,
        }
        unfinished = os.path.join(self._directory, f"{_STATE}.unfinished")
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(unfinished, os.path.join(self._directory, _STATE))
        for name in os.listdir(self._directory):
            if name.startswith("epoch_") and name.endswith(".weights.h5") and name != weights:
                os.remove(os.path.join(self._directory, name))


class EpochSeeds(keras.callbacks.Callback):
    """Gives the random layers new seeds in each epoch, a function of its number.

    Keras saves no state of the generators behind dropout and noise; without
    this a resumed run would repeat the draws of the first epoch.

    Args:
        seed: The seed of the run.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._seed = seed

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets every generator of the model."""
        states = [v for v in self.model.variables if v.path.endswith("seed_generator_state")]
        for index, state in enumerate(states):
            words = np.random.SeedSequence([self._seed, epoch, index]).generate_state(2, np.uint32)
            state.assign((words & 0x7FFFFFFF).astype(state.dtype))
