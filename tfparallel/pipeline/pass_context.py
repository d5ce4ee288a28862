"""What a layer needs to know while it computes a micro-batch: its rows, its seed, its pass.

On one device, a layer is called once per step; here M times, and again in a recompute. So

* a seed is drawn with the first micro-batch, and the others reuse it: each draws the values of its
  rows of the whole batch (`draws/row_draws.py`);
* in a recompute, each draw repeats its first result.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.draws.replica_seeds import drawing_by, global_seed_generator, in_pieces
from tfparallel.draws.row_draws import DividedSeeds
from tfparallel.extend import extend
from tfparallel.piece import Piece
from tfparallel.problems import PlacementError
from tfparallel.seams.keras import layers_in, seed_generators_of

_FOLD = 0x9E3779B1  # Odd, so that m ↦ m·_FOLD is one-to-one modulo 2³².


class StepMemory:
    """State that the passes of one step share.

    Attributes:
        seeds: The seeds drawn with the first micro-batch.
        global_seeds: Keras's global seed generator, for a pass.
        drawn_at: The place of the call that drew last from a generator, by the generator's id.
    """

    def __init__(self):
        self.drawn_at: dict[int, int] = {}
        self.seeds: dict[Any, tf.Tensor] = {}
        self.global_seeds = in_pieces(global_seed_generator(), MicroBatchSeedGenerator)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def outside(self) -> contextlib.AbstractContextManager:
        """Returns a context for tensors that all passes may read: the step's own graph."""
        return contextlib.nullcontext() if self._graph is None else self._graph.as_default()

    def is_in_control_flow(self) -> bool:
        """Returns whether a `tf.while_loop` or `tf.cond` within the step is being traced."""
        graph = None if self._graph is None else tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            if getattr(graph, "is_control_flow_graph", False):
                return True
            graph = getattr(graph, "outer_graph", None)
        return False


class Pass:
    """A forward pass of a stage on a micro-batch, or on any if it is traced for all.

    Args:
        memory: The state that the step's passes share.
        stage: The stage's index.
        piece: The micro-batch's rows; `piece.replica` is its index.

    Attributes:
        moments: The moments of batch normalization: `(n, mean, M)` by layer and call.
        place: Where Keras makes the current call, among all of the model.
    """

    place = 0

    def __init__(self, memory: StepMemory, stage: int, piece: Piece):
        self.memory = memory
        self.piece = piece
        self.moments: dict[Any, tuple] = {}
        self.stage = stage
        self._calls: dict[int, int] = {}

    def key(self, owner: Any) -> tuple[int, int, int]:
        """Returns a key for a call of an object: the same in each micro-batch and recompute."""
        call = self._calls[id(owner)] = self._calls.get(id(owner), 0) + 1
        return id(owner), self.stage, call


def current_pass() -> Pass | None:
    """Returns the pass that this thread computes, or None outside one."""
    return context().stage_pass


@contextlib.contextmanager
def computing(stage_pass: Pass | None) -> Iterator[None]:
    """Makes `stage_pass` the pass of this thread, and its rows the current piece; None for none."""
    if stage_pass is None:
        with within(stage_pass=None, piece=None):
            yield
        return
    with (
        within(stage_pass=stage_pass, piece=stage_pass.piece),
        drawing_by(stage_pass.memory.global_seeds),
    ):
        yield


class MicroBatchSeedGenerator(DividedSeeds):
    """Extends `keras.random.SeedGenerator`: one draw per step for all micro-batches."""

    def next(self, ordered=True):
        """Returns the step's seed; it draws this micro-batch's rows of the whole batch."""
        stage_pass = current_pass()
        if stage_pass is None:
            seed = super().next(ordered)
            return seed if tf.executing_eagerly() else self._divided(seed, seed)
        seed = self._of_step(stage_pass, ordered)
        index = tf.cast(stage_pass.piece.replica, tf.int64)
        of_piece = seed + tf.cast(tf.stack([index * _FOLD % 2**31, 0]), seed.dtype)
        return self._divided(seed, of_piece)

    def _of_step(self, stage_pass: Pass, ordered):
        key = stage_pass.key(self)
        if stage_pass.memory.is_in_control_flow():
            raise PlacementError(
                "A layer draws new random values each time a loop or a branch runs, but "
                "micro-batches share one draw for the batch. The layer must draw before the loop "
                f"or the branch. Received: a draw of '{self.name}' inside one, such as by a "
                "Dropout in the cell of an `RNN`. Use a layer that draws once per call, as `LSTM`"
                "(dropout=…) does, or `tfparallel.model_parallel`."
            )
        if key not in stage_pass.memory.seeds:
            drawn_at = stage_pass.memory.drawn_at
            if stage_pass.place < drawn_at.get(id(self), 0):
                raise PlacementError(
                    "Calls that draw from one seed generator must be in stages in the order in "
                    "which Keras makes them, or they would draw other numbers than on one device. "
                    f"Received: a call in stage {stage_pass.stage} that draws from '{self.name}' "
                    "after a later call in an earlier stage. Give each layer a seed of its own "
                    "(`Dropout(0.5, seed=1)`), call a layer that draws once, or put these calls "
                    "into one stage."
                )
            drawn_at[id(self)] = stage_pass.place
            with stage_pass.memory.outside():
                stage_pass.memory.seeds[key] = super().next(ordered)
        return stage_pass.memory.seeds[key]


def extend_random_layers(model: keras.Model) -> None:
    """Makes the random layers of a model draw as described above."""
    for layer in layers_in(model):
        for generator in seed_generators_of(layer):
            extend(generator, MicroBatchSeedGenerator)
