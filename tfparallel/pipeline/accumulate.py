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

from tfparallel.collectives.reducer import Reducer
from tfparallel.replication.accumulate import Accumulate
from tfparallel.seams.keras import storage_of

__all__ = ["AccumulateBatches"]


class AccumulateBatches(Accumulate):
    """An update is of N batches, of a model of placed layers; metrics are of all rows."""

    _in_shares = False  # Replicas of a mesh each add up whole gradients.

    def step(self, data, usual):
        """As every step; its gradients are kept, and in every N-th there is an update."""
        self._check()
        logs = usual(data)
        self._count_step()
        return logs

    def apply(self, found, usual):
        """Adds up the gradients of a batch."""
        if found.predictions is not None:
            self.refuse(
                "Losses and metrics that are sums over the rows are required",
                self.model.why_joined or "outputs that meet for one of them",
            )
        super().apply(found, usual)

    def _looks_at_all_rows(self):
        return None

    def device_of_sum(self, variable: keras.Variable) -> str:
        """Where the gradients of a weight are added up."""
        return storage_of(variable).device

    def of_all_workers(self, variables, sums, divisor):
        """The sums over all workers; the divisor of a batch is that of all its rows, on each."""
        reducer = Reducer(None, self.model._workers)
        totals, _ = reducer.totals([[each] for each in sums], list, variables=variables)
        return totals, divisor

    def between_steps(self):
        """Where an update is made outside of a step."""
        return contextlib.nullcontext()
