"""An update of several batches, of a model in micro-batches: `sync="accumulate:4"`.

The gradients of a batch, of all micro-batches and replicas, are added up beside each weight, and
every N batches they are an update: that of the N batches as one. Of several workers each adds up
those of its replicas, and the sums are sent with the update; losses and metrics, a few numbers, are
summed in each step. Under 1F1B the same comes of batches N times as large in N times as many
micro-batches, at the same memory; this is for a host that cannot hold such a batch, and for a
program whose batches are what they are.
"""

import contextlib

import keras

from tfparallel.replication.accumulated_steps import AccumulatedSteps

__all__ = ["AccumulatedBatches"]


class AccumulatedBatches(AccumulatedSteps):
    """Extends a model of placed layers; a step's gradients and metrics are of all rows."""

    @property
    def _workers_are_apart(self) -> bool:
        return False

    def train_step(self, data):
        """One batch: its gradients are kept, and in every N-th there is an update."""
        if not self._accumulates:
            return super().train_step(data)
        self._check_accumulation()
        logs = super().train_step(data)
        self._count_step()
        return logs

    def _apply_found(self, found) -> None:
        if self._accumulates and found.predictions is not None:
            self._refuse(
                "Losses and metrics that are sums over the rows are required",
                self.why_joined or "outputs that meet for one of them",
            )
        super()._apply_found(found)

    def _looks_at_all_rows(self):
        return None

    def _device_of_sum(self, variable: keras.Variable | None) -> str:
        return self._last_device if variable is None else variable._value.device

    def _of_all_workers(self, variables, sums, divisor):
        # The divisor of a batch is that of all its rows, on each worker.
        return self._workers.all_reduce_gradients(sums, variables), divisor

    def _between_steps(self):
        return contextlib.nullcontext()
