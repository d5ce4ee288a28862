"""Divides the compiled metrics of a model by the rows that they must see at once.

| | | |
| --- | --- | --- |
| summed | their states are sums over the rows | the increments of all pieces are added |
| joined | all others | updated once, with the joined rows of their outputs |

Relies on how `CompileMetrics` stores its metrics by output (`docs/upstream.md`).
"""

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.seams.compiled import (
    CompileMetrics,
    MetricsList,
    flat_targets,
    metrics_by_output,
    with_metrics_by_output,
)
from tfparallel.step.piece_sums import grow


class StepMetrics(NamedTuple):
    """The metrics of a step.

    Attributes:
        summed: The metrics whose states add up, or None.
        joined: The other metrics, or None.
    """

    summed: CompileMetrics | None
    joined: CompileMetrics | None = None

    @classmethod
    def divided(cls, compiled: CompileMetrics | None, joined: Collection[int]) -> "StepMetrics":
        """Divides a model's metrics.

        Args:
            compiled: The metrics, built; None for a model without metrics.
            joined: The ids of the metrics that must see joined rows.
        """
        if compiled is None or not joined:
            return cls(compiled)
        return cls(
            _only(compiled, lambda metric: id(metric) not in joined),
            _only(compiled, lambda metric: id(metric) in joined),
        )

    def places(self, outputs) -> list[int]:
        """The indices, in the flat outputs, of the outputs that the joined metrics read.

        Args:
            outputs: Tensors or their types, in the structure of the outputs.
        """
        if self.joined is None:
            return []
        indices = list(range(len(keras.tree.flatten(outputs))))
        indices = flat_targets(self.joined, keras.tree.pack_sequence_as(outputs, indices))
        # Keras lists no metrics of the last outputs if the targets of unread outputs are left out.
        looked_at = [any(lists) for lists in zip_longest(*metrics_by_output(self.joined))]
        return sorted(place for place, is_one in zip(indices, looked_at, strict=False) if is_one)

    def update(
        self, growth: Sequence[tf.Tensor], y, outputs, rows: Sequence[tf.Tensor], sample_weight
    ) -> None:
        """Updates the states once per step.

        Args:
            growth: The increments of the states of `summed`.
            y: The targets of the whole batch; only read for `joined`.
            outputs: Type specs, in the structure of the outputs.
            rows: The joined rows of the outputs at `places`.
            sample_weight: The weights of the whole batch, or None.
        """
        grow(self.summed, growth)
        if self.joined is None:
            return
        flat = keras.tree.flatten(outputs)
        for place, joined in zip(self.places(outputs), rows, strict=True):
            flat[place] = joined
        outputs = keras.tree.pack_sequence_as(outputs, flat)
        self.joined.update_state(y, outputs, sample_weight=sample_weight)


def _only(compiled: CompileMetrics, is_wanted) -> CompileMetrics:
    """The same metrics, without the unwanted ones."""

    def of_output(metrics: MetricsList | None) -> MetricsList | None:
        selected = [] if metrics is None else [m for m in metrics.metrics if is_wanted(m)]
        return MetricsList(selected, output_name=metrics.output_name) if selected else None

    return with_metrics_by_output(
        compiled, *([of_output(each) for each in lists] for lists in metrics_by_output(compiled))
    )
