"""What a layer must know while it computes a micro-batch: which rows, which seed, which pass.

On one device a layer is called once a step; here M times, and again where it is recomputed. So

* a seed is drawn with the first micro-batch, and the others take the same one. A dropout mask is
  drawn by the examples' index in the whole batch and is then that of one device, bit by bit; any
  other layer folds the micro-batch's index into the seed: reproducible;
* in a recompute each draw gives what it gave the first time.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.data import rows_of_replica as shards
from tfparallel.extend import extend
from tfparallel.placement.layer_devices import PlacementError
from tfparallel.replication.random import IndexedDropout
from tfparallel.seams.keras import layers_in, seed_generators_of

__all__ = ["Pass", "StepMemory", "computing", "current_pass", "extend_random_layers"]

_FOLD = 0x9E3779B1  # Odd, so that m ↦ m·_FOLD is one-to-one modulo 2³².


class StepMemory:
    """What the passes of one step share.

    Attributes:
        seeds: The seeds drawn with the first micro-batch.
    """

    def __init__(self):
        self.seeds: dict[Any, tf.Tensor] = {}
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def outside(self) -> contextlib.AbstractContextManager:
        """Where a tensor is made that all passes may read: in the step, and no function in it."""
        return contextlib.nullcontext() if self._graph is None else self._graph.as_default()

    def is_in_control_flow(self) -> bool:
        """Whether a `tf.while_loop` or a `tf.cond` within the step is being traced."""
        graph = None if self._graph is None else tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            if getattr(graph, "is_control_flow_graph", False):
                return True
            graph = getattr(graph, "outer_graph", None)
        return False


class Pass:
    """A forward pass of a stage on a micro-batch, or on any, where it is traced for all.

    Args:
        memory: What the step's passes share.
        stage: The stage's index.
        shard: The micro-batch's rows; `shard.replica` is its index.

    Attributes:
        moments: What batch normalization has seen in it: `(n, mean, M)` by layer and call.
    """

    def __init__(self, memory: StepMemory, stage: int, shard: shards.Shard):
        self.memory = memory
        self.shard = shard
        self.moments: dict[Any, tuple] = {}
        self._stage = stage
        self._calls: dict[int, int] = {}

    def key(self, owner: Any) -> tuple[int, int, int]:
        """Names a call of an object: the same in each micro-batch, and when repeated."""
        call = self._calls[id(owner)] = self._calls.get(id(owner), 0) + 1
        return id(owner), self._stage, call


def current_pass() -> Pass | None:
    """Returns the pass that this thread computes, or None outside one."""
    return context().stage_pass


def computing(own: Pass | None) -> contextlib.AbstractContextManager[None]:
    """Makes `own` the pass of this thread, and its rows the current shard; None for no pass."""
    return within(stage_pass=own, shard=None if own is None else own.shard)


class MicroBatchSeedGenerator:
    """Extends `keras.random.SeedGenerator`: one draw a step, however many micro-batches."""

    def next(self, ordered=True):
        """Returns the step's seed, with the micro-batch's index folded into its first word."""
        own = current_pass()
        if own is None:
            return super().next(ordered)
        seed, index = self._of_step(own, ordered), tf.cast(own.shard.replica, tf.int64)
        return seed + tf.cast(tf.stack([index * _FOLD % 2**31, 0]), seed.dtype)

    def next_global(self):
        """Returns the step's seed as one device draws it."""
        own = current_pass()
        return super().next() if own is None else self._of_step(own, True)

    def _of_step(self, own: Pass, ordered):
        key = own.key(self)
        if own.memory.is_in_control_flow():
            raise PlacementError(
                "A layer draws anew each time that a loop or a branch of its is run, and a "
                "micro-batch draws what was drawn for the batch. A draw before the loop or the "
                f"branch is required. Received: a draw of '{self.name}' inside of one, such as by "
                "a Dropout in the cell of an `RNN`. Take a layer that draws once a call, as `LSTM`"
                "(dropout=…) does, or `tfparallel.model_parallel`."
            )
        if key not in own.memory.seeds:
            with own.memory.outside():
                own.memory.seeds[key] = super().next(ordered)
        return own.memory.seeds[key]


def extend_random_layers(model: keras.Model) -> None:
    """Makes the layers of a model that draw do so as above."""
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.Dropout):
            extend(layer, IndexedDropout)
        for generator in seed_generators_of(layer):
            extend(generator, MicroBatchSeedGenerator)
