"""Gathers weights of which each replica of a mesh keeps a share (`replication/gathers.py`).

Devices in the same place of the mesh exchange shares: the replicas of a stage. In a training step,
the sums of gradients go to the `GradientSums` of the step instead of the tape, since a stage may
read one weight by rows and as a whole. Micro-batches are traced one by one: TensorFlow would keep
what a function gathers until its backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.piece import Piece
from tfparallel.pipeline.gradient_sums import GradientSums
from tfparallel.problems import PlacementError
from tfparallel.replication.dummy_rows import zeros_without_rows
from tfparallel.replication.gathers import Gathers, unsummed
from tfparallel.seams.tensorflow import not_recording
from tfparallel.strategies.replica_trace import MeshTrace
from tfparallel.tracing.graphs import operations_here, writes_variable
from tfparallel.variables.mesh_replica import at_work
from tfparallel.variables.sharded import ShardedVariable, joined_rows


class MeshGathers(Gathers):
    """The gathers of the first replica of a mesh, or of the one that an eager step runs.

    Args:
        trace: Replays the operations of the first replica for the others.
        sums: Takes the gradients; None if there are none.

    Attributes:
        writes: The names of the operations by which workers order their exchanges.
    """

    _sums_rows = False  # The rows of all micro-batches are joined at the end of the step.

    def __init__(self, trace: MeshTrace, sums: GradientSums | None = None):
        super().__init__(self._between_replicas)
        self._trace, self._of_step = trace, sums
        self.writes: set[str] = set()
        self._reader = 0
        self._piece: Piece | None = None
        self._added: list[Any] = []

    def begin(self) -> None:
        """Marks the start of a forward pass."""
        super().begin()
        self._num_read.clear()  # Each micro-batch has the same readings.

    def begin_backward(self, reader: int, piece: Piece) -> None:
        """Marks the start of a backward pass.

        Args:
            reader: The stage, or another number, by which sparse gradients are told apart.
            piece: The rows of the micro-batch.
        """
        if self._new:
            self._trace.make_others()  # Their readers, too.
        super().begin_backward(lambda *_: None)
        self._reader, self._piece = reader, piece

    def take_added(self) -> list[Any]:
        """Returns tensors that exist once the gradients of a backward pass have been added."""
        added, self._added = self._added, []
        return added

    def add(self, variable: keras.Variable, gradient: Any, reader: int) -> list[Any]:
        """Adds a gradient that a tape returned; those of shares have been added already.

        Args:
            variable: The weight.
            gradient: Dense, sparse, or None.
            reader: The stage that computed it, or another number.

        Returns:
            Tensors that exist once it has been added.

        Raises:
            PlacementError: For the gradient of a share, which is not summed over the replicas.
        """
        if not isinstance(variable, ShardedVariable):
            return self._of_step.add(variable, gradient, reader)
        if gradient is not None:
            raise PlacementError(unsummed(variable))
        return []

    def _between_replicas(self, function: Callable[..., Sequence[tuple]], *tensors) -> tuple:
        def on_all(arguments):
            before = len(operations_here())
            # Control dependencies are those of the first replica.
            with not_recording(), at_work(None), tf.control_dependencies(None):
                results = function(*map(list, zip(*arguments, strict=True)))
            self.writes |= {op.name for op in operations_here()[before:] if writes_variable(op)}
            return results

        return self._trace.exchange(on_all, tensors)

    def _joined(self, variable, share, dtype):
        if not tf.executing_eagerly():
            return super()._joined(variable, share, dtype)
        # Replicas run in turn, and read each other's shares.
        shares = [tf.cast(piece, dtype) for piece in variable.pieces]
        return joined_rows([shares], [variable], variable.places)[0], None

    def _scattered(self, variable, whole, upstream, reading):
        (upstream,) = zeros_without_rows(self._piece, [upstream])
        if not tf.executing_eagerly():
            total = super()._scattered(variable, whole, upstream, reading)
            self._add(variable, total)
        elif variable.trainable and isinstance(upstream, tf.Tensor):
            # The share of each replica, in the gradient of one.
            shares = self._summed(variable, [upstream])
            for piece, (share,) in zip(variable.pieces, shares, strict=True):
                self._add(piece, share)
        if variable.trainable and isinstance(upstream, tf.IndexedSlices):
            self._add(variable, upstream, (self._reader, reading))

    def _add(self, source, gradient, reader: Any = None) -> None:
        self._added += self._of_step.add(source, gradient, reader)
