"""What a model costs in pieces of any size, and what its devices share: numbers, once measured.

What grows with the rows is a straight line, through measurements at two numbers of them:

    seconds(rows) = fixed + each · rows

`planning/prediction.py` makes the step of any mesh of them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from tfparallel.layout.balance import Weighed, partition

__all__ = ["FORWARD_SHARE", "LayerCosts", "Line", "Machine", "ModelCosts"]

FORWARD_SHARE = 1 / 3  # Where it was not measured.


@dataclasses.dataclass(frozen=True)
class Line:
    """A quantity of so many rows: seconds, or bytes.

    Attributes:
        fixed: What it is without rows.
        each: What a row adds.

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
        """The line through values at one or two numbers of rows.

        It does not fall, and it begins at zero or above: within the noise of a measurement more
        rows may take less time, and few rows may seem to have none.
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
        seconds: Forward and backward, of a piece.
        parameter_bytes: Of all its variables.
        trained_bytes: Of those that are trained; their gradients are as large.
        gradient_bytes: Of gradients that are held at once where none is added to another; each
            large one is gone before the next is made.
        slot_bytes: Of the optimizer's variables for them.
        activation_bytes: What a piece leaves for its backward pass.
        output_bytes: Of its outputs, for one row.
        num_trained: How many of its variables are trained.
        update_bytes: What is there while its largest weight is updated, with its gradient.
        whole_share: The share of its seconds that does not get less in a part: a part reads whole
            inputs, or makes whole outputs. None: what is fixed.
        whole_weights: The share of its weights that parts do not divide.
        shared_bytes: Of each weight of which replicas may keep shares.
        forward_share: The share of its seconds that the forward pass takes. It is one of the three
            products of a layer: outputs, and the gradients of inputs and of weights.
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
        """What one of so many parts takes for a piece."""
        if self.whole_share is None:
            return self.seconds(rows / num_parts)
        return self.seconds(rows) * (self.whole_share + (1 - self.whole_share) / num_parts)

    def state_bytes(self, all_gradients: bool) -> int:
        """Of parameters, slots and the gradients that are held at once."""
        gradients = self.trained_bytes if all_gradients else self.gradient_bytes
        return self.parameter_bytes + self.slot_bytes + gradients

    def state_bytes_of_share(self, shard: str, num_replicas: int) -> float:
        """The same of one of so many replicas that share it out.

        All gradients are held at once, but for shares of large ones, which are used up one by one.

        Args:
            shard: "optimizer" or "parameters".
            num_replicas: How many.
        """
        shared = sum(self.shared_bytes) if shard == "parameters" else 0
        trained = min(shared, self.trained_bytes)
        small = self.trained_bytes - trained  # Of it the optimizer keeps a share that it updates.
        # What is frozen is kept whole, too, from the forward to the backward pass.
        whole = self.parameter_bytes - trained + small
        gradients = max(self.gradient_bytes - small, 0) if shared else 0
        return whole + (shared + gradients + self.slot_bytes + small) / num_replicas

    def held_bytes(self, rows: float, all_gradients: bool) -> float:
        """Of its state, and of what a piece leaves for the backward pass."""
        return self.state_bytes(all_gradients) + self.activation_bytes(rows)


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """A model's costs.

    Attributes:
        layers: Of each layer, in topological order.
        edges: For each layer that others read, by its index: the bytes of its outputs for one row,
            and who reads them.
        loss: Seconds of the loss, its gradient and the metrics, of a piece.
        loss_bytes: What they hold, of a piece.
        update: Seconds of an update, by bytes of a weight: `fixed` for each weight.
        overhead_seconds: What a step takes with next to nothing to do.
    """

    layers: Sequence[LayerCosts]
    edges: Mapping[int, tuple[int, Sequence[int]]] = dataclasses.field(default_factory=dict)
    loss: Line = Line()
    loss_bytes: Line = Line()
    update: Line = Line()
    overhead_seconds: float = 0.0

    def received_bytes(self, first: int, last: int) -> int:
        """What a stage of the layers [first, last) is sent, for one row."""
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
        """Returns how many consecutive layers each stage of the best cut has.

        A stage holds, beside its layers' bytes, the tensors that it is sent; the last one the
        loss's too; and where gradients are not held together, the arrays of one update. Of more
        stages than layers the last are empty.

        Args:
            num_stages: How many stages.
            rows: Of a piece.
            balance: What is spread evenly: "memory", "time", or "both" by their shares.
            device_memory: How many bytes a stage may hold; None for no limit.
            all_gradients: Whether all gradients are held at once.

        Raises:
            NoPartition: If nothing meets `device_memory`.
        """
        if num_stages > len(self.layers):
            return [1] * len(self.layers) + [0] * (num_stages - len(self.layers))
        sent = {index: (size * rows, readers) for index, (size, readers) in self.edges.items()}
        held = [layer.held_bytes(rows, all_gradients) for layer in self.layers]
        held[-1] += self.loss_bytes(rows)
        peaks = None if all_gradients else [layer.update_bytes for layer in self.layers]
        memory = Weighed(held, sent, device_memory, peaks)
        seconds = Weighed([layer.seconds(rows) for layer in self.layers])
        if balance == "memory":
            return partition(num_stages, memory)
        if balance == "time":
            return partition(num_stages, seconds, capped=[memory])
        return partition(num_stages, seconds, memory)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the devices share.

    Attributes:
        side_by_side: How much more is done in the same time when several devices are at work than
            when one is: the logical devices of a CPU share its cores, which one of them may
            already keep busy. Infinite where each has what it computes with to itself.
        sum_seconds: What it takes to add up tensors of so many devices, `(number, size_bytes)`.
        call_seconds: What the call of a stage takes beside its layers.
        replica_seconds: What a replica adds to a step beside its layers.
        share_seconds: What a replica's share of a weight adds, whatever its size.
    """

    side_by_side: float = math.inf
    sum_seconds: Callable[[int, float], float] = lambda number, size_bytes: 0.0
    call_seconds: float = 0.0
    replica_seconds: float = 0.0
    share_seconds: float = 0.0

    def slowed(self, num_at_work: float) -> float:
        """How many times as long everything takes while so many devices are at work."""
        return max(1.0, num_at_work / self.side_by_side)
