"""Measured costs of a model for any number of rows, and of the machine's devices.

A cost that grows with the rows is a straight line through measurements at two numbers of rows:

    seconds(rows) = fixed + each · rows

`planning/prediction.py` predicts the step of any mesh from them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from tfparallel.layout.balance import Weighed, partition

FORWARD_SHARE = 1 / 3  # If it was not measured.


@dataclasses.dataclass(frozen=True)
class Line:
    """A linear function of the number of rows: seconds or bytes.

    Attributes:
        fixed: The value without rows.
        each: What each row adds.

    Example:
        >>> Line.through({8: 3.0, 32: 6.0})(16)
        4.0
    """

    fixed: float = 0.0
    each: float = 0.0

    def __call__(self, rows: float) -> float:
        return self.fixed + self.each * rows

    @classmethod
    def through(cls, values: Mapping[int, float]) -> "Line":
        """Returns the line through values at one or two numbers of rows.

        Its slope and its fixed value are at least zero, although in a noisy measurement more rows
        may take less time, and few rows may seem to take none.
        """
        (few, less), (many, more) = min(values.items()), max(values.items())
        if few == many:
            return cls(0.0, less / few)
        if more <= less:
            return cls((less + more) / 2, 0.0)
        each = (more - less) / (many - few)
        return cls(less - each * few, each) if each * few <= less else cls(0.0, more / many)


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """A layer's share of a step.

    Attributes:
        layer: Its name.
        seconds: Forward and backward pass of a piece.
        parameter_bytes: The size of all its variables.
        trained_bytes: The size of its trainable variables, and of their gradients.
        gradient_bytes: The size of the gradients held at once if gradients are not accumulated;
            each large one is freed before the next is computed.
        slot_bytes: The size of the optimizer's slots for its variables.
        activation_bytes: The size that a piece keeps for its backward pass.
        output_bytes: The size of its outputs, for one row.
        num_trained: The number of its trainable variables.
        update_bytes: The peak while its largest weight is updated, its gradient included.
        whole_share: The share of its seconds that splitting does not reduce, since a part reads
            whole inputs or computes whole outputs. None: the fixed seconds.
        whole_weights: The share of its weights that splitting does not divide.
        shared_bytes: The size of each weight that replicas may shard.
        forward_share: The share of its seconds that the forward pass takes: one of the layer's
            three products, outputs and the gradients of inputs and of weights.
    """

    layer: str
    seconds: Line = Line()
    parameter_bytes: int = 0
    trained_bytes: int = 0
    gradient_bytes: int = 0
    slot_bytes: int = 0
    activation_bytes: Line = Line()
    output_bytes: int = 0
    num_trained: int = 0
    update_bytes: int = 0
    whole_share: float | None = None
    whole_weights: float = 0.0
    shared_bytes: tuple[int, ...] = ()
    forward_share: float = FORWARD_SHARE

    def part_seconds(self, rows: float, num_parts: int) -> float:
        """Returns the seconds of one of `num_parts` parts for a piece."""
        if self.whole_share is None:
            return self.seconds(rows / num_parts)
        return self.seconds(rows) * (self.whole_share + (1 - self.whole_share) / num_parts)

    def state_bytes(self, all_gradients: bool) -> int:
        """Returns the size of parameters, slots and the gradients held at once."""
        gradients = self.trained_bytes if all_gradients else self.gradient_bytes
        return self.parameter_bytes + self.slot_bytes + gradients

    def state_bytes_of_share(self, shard: str, num_replicas: int) -> float:
        """Returns the size of the state of a replica if replicas shard it.

        All gradients are held at once, except shares of large ones, which are consumed one by one.

        Args:
            shard: "optimizer" or "parameters".
            num_replicas: The number of replicas.
        """
        shared = sum(self.shared_bytes) if shard == "parameters" else 0
        trained = min(shared, self.trained_bytes)
        small = self.trained_bytes - trained  # The optimizer holds a share of it to update.
        # Frozen weights are also kept whole from the forward to the backward pass.
        whole = self.parameter_bytes - trained + small
        gradients = max(self.gradient_bytes - small, 0) if shared else 0
        return whole + (shared + gradients + self.slot_bytes + small) / num_replicas

    def held_bytes(self, rows: float, all_gradients: bool) -> float:
        """Returns the size of its state and of a piece's activations."""
        return self.state_bytes(all_gradients) + self.activation_bytes(rows)


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """A model's costs.

    Attributes:
        layers: The costs of each layer, in topological order.
        edges: For each layer that others read, by its index: the bytes of its outputs for one row,
            and the indices of its readers.
        loss: Seconds of the loss, its gradient and the metrics for a piece.
        loss_bytes: The size that they hold for a piece.
        update: Seconds of an update, by the bytes of a weight: `fixed` for each weight.
        overhead_seconds: The seconds of a step that has almost nothing to compute.
    """

    layers: Sequence[LayerCosts]
    edges: Mapping[int, tuple[int, Sequence[int]]] = dataclasses.field(default_factory=dict)
    loss: Line = Line()
    loss_bytes: Line = Line()
    update: Line = Line()
    overhead_seconds: float = 0.0

    def received_bytes(self, first: int, last: int) -> int:
        """Returns the bytes that a stage of the layers [first, last) receives for one row."""
        return sum(
            size
            for producer, (size, readers) in self.edges.items()
            if producer < first and any(first <= reader < last for reader in readers)
        )

    def cut(
        self,
        num_stages: int,
        rows: float,
        balance: str,
        device_memory: int | None = None,
        *,
        all_gradients: bool = False,
    ) -> list[int]:
        """Returns the number of consecutive layers in each stage of the best cut.

        Besides its layers' bytes, a stage holds the tensors that it receives; the last one also
        holds the loss's; and if gradients are not all held at once, the arrays of one update. If
        there are more stages than layers, the last stages are empty.

        Args:
            num_stages: The number of stages.
            rows: The rows of a piece.
            balance: What to balance: "memory", "time", or "both" by their shares.
            device_memory: The bytes that a stage may hold; None for no limit.
            all_gradients: Whether all gradients are held at once.

        Raises:
            NoPartition: If no cut fits `device_memory`.
        """
        if num_stages > len(self.layers):
            return [1] * len(self.layers) + [0] * (num_stages - len(self.layers))
        sent = {index: (size * rows, readers) for index, (size, readers) in self.edges.items()}
        layer_bytes = [layer.held_bytes(rows, all_gradients) for layer in self.layers]
        layer_bytes[-1] += self.loss_bytes(rows)
        peaks = None if all_gradients else [layer.update_bytes for layer in self.layers]
        memory = Weighed(layer_bytes, sent, device_memory, peaks)
        seconds = Weighed([layer.seconds(rows) for layer in self.layers])
        if balance == "memory":
            return partition(num_stages, memory)
        if balance == "time":
            return partition(num_stages, seconds, capped=[memory])
        return partition(num_stages, seconds, memory)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Costs of the machine that do not depend on the layers.

    Attributes:
        side_by_side: The throughput of several devices together, relative to one: the logical
            devices of a CPU share its cores, and one of them may already keep all cores busy.
            Infinite if devices share no hardware.
        sum_seconds: The seconds to sum tensors of several devices, `(number, size_bytes)`.
        call_seconds: The seconds of a stage's call besides its layers.
        replica_seconds: The seconds that a replica adds to a step besides its layers.
        share_seconds: The seconds that a replica's share of a weight adds, whatever its size.
    """

    side_by_side: float = math.inf
    sum_seconds: Callable[[int, float], float] = lambda number, size_bytes: 0.0
    call_seconds: float = 0.0
    replica_seconds: float = 0.0
    share_seconds: float = 0.0

    def slowed(self, num_at_work: float) -> float:
        """Returns the slowdown of each device while `num_at_work` devices work at once."""
        return max(1.0, num_at_work / self.side_by_side)
