"""Gradient accumulation over batches for a model in micro-batches: `sync="accumulate:4"`.

The gradients of a batch, of all micro-batches and replicas, are added to an accumulator beside each
weight; every N batches, one update applies them, equal to that of the N batches as one. Each worker
accumulates the gradients of its replicas and sends the sums with the update; losses and metrics, a
few numbers, are summed in each step. 1F1B gives the same update for batches N times as large in N
times as many micro-batches, with the same memory; accumulation is for a host that cannot hold such
a batch, and for a program whose batch size is fixed.
"""

import contextlib

import keras

from tfparallel.collectives.reducer import Reducer
from tfparallel.pipeline.gradient_sums import local_storage
from tfparallel.replication.sync.accumulate import Accumulate
from tfparallel.update.places import Places


class AccumulateBatches(Accumulate):
    """Updates a model of placed layers once per N batches; metrics cover all rows."""

    @property
    def _in_shares(self) -> bool:
        return self.model._shards_parameters

    @property
    def places(self) -> Places:
        """The replicas of the mesh."""
        return self.model.places

    def step(self, data, usual):
        """Runs a step; keeps its gradients, and updates in every N-th."""
        self._check()
        logs = usual(data)
        self._count_step()
        return logs

    def apply(self, result, usual):
        """Adds up the gradients of a batch."""
        if result.predictions is not None:
            self.refuse(
                "Losses and metrics must be sums over the rows",
                self.model.why_joined or "outputs that are joined for one of them",
            )
        super().apply(result, usual)

    def _looks_at_all_rows(self):
        return None

    def device_of_sum(self, variable: keras.Variable) -> str:
        """Returns the device on which a weight's gradients are added up."""
        return local_storage(variable).device

    def of_all_workers(self, variables, sums, divisor):
        """Returns the sums over all workers; each worker knows the divisor of the whole batch."""
        reducer = Reducer(None, self.model._workers)
        totals, _ = reducer.totals([[each] for each in sums], list, variables=variables)
        return totals, divisor

    def between_steps(self):
        """Returns the context of an update outside of a step."""
        return contextlib.nullcontext()
