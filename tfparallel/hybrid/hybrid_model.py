"""The Keras model of `hybrid_parallel`: several replicas, each on several devices."""

import contextlib

from tfparallel.compute_context import within
from tfparallel.hybrid.places import MeshPlaces
from tfparallel.hybrid.replicated_inference import SpreadCall
from tfparallel.layers.positions import known_parts
from tfparallel.layers.split_model import NestedModel
from tfparallel.pipeline.allowed_writes import states_in_layers
from tfparallel.pipeline.pipelined_model import PipelinedModel
from tfparallel.replication.refusals import refuse_callbacks
from tfparallel.replication.sharding import large_weights, shard_all
from tfparallel.replication.worker_session import WorkerSession
from tfparallel.seams.keras import layers_in, seed_generators_of
from tfparallel.update.built_optimizers import wrapped_by
from tfparallel.update.place_optimizer import prepare
from tfparallel.update.places import Places
from tfparallel.variables.mesh_replica import device_at_work, replicas_of
from tfparallel.variables.split import parts_of


class HybridModel(SpreadCall, NestedModel, PipelinedModel):
    """Extends a functional or Sequential model of placed layers by copies for each replica.

    A step divides the batch into D·M pieces: M micro-batches pass through the stages of each
    replica. Layers of a stage may be split over its devices. Each worker has some of the replicas,
    and reads the whole batch.
    """

    strategy = None  # Connects the workers of a job; None for one process.
    _session: WorkerSession  # Everything else that differs between workers.
    _shards_optimizer = False  # Whether each replica updates only its share of the weights.

    @property
    def _workers(self):
        return self._session.workers

    @property
    def split(self) -> dict[str, str]:
        """How each split layer is split, by name; the others are on their stage's first device."""
        return self._layout.split_of

    @contextlib.contextmanager
    def _around_a_batch(self, kind):
        with self._session.around_a_batch(kind), super()._around_a_batch(kind):
            yield

    def _begin(self, call):
        if call.kind == "fit" and self._shards_optimizer:
            are_sharded = self._shards_parameters and self._workers is not None
            refuse_callbacks(call.callbacks, are_sharded=are_sharded)
        self._session.begin(call)
        super()._begin(call)

    def _take_step(self, kind, of_keras, data):
        self._session.compare(data, kind)
        if kind != "fit":
            with self._spreading():
                return super()._take_step(kind, of_keras, data)
        # An optimizer that wraps others needs whole gradients.
        adds_up = self._accumulates or not wrapped_by(self.optimizer)
        with within(takes_shares=self._shards_parameters and adds_up):
            return super()._take_step(kind, of_keras, data)

    def save(self, filepath, overwrite=True, zipped=None, **kwargs):
        """Saves plain Keras, as `keras.Model.save`; one worker or all may call it.

        With `shard`, all workers must call it.
        """
        with self._session.path_to_write(filepath, overwrite) as path:
            return super().save(path, overwrite, zipped, **kwargs)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Saves the weights, as `keras.Model.save_weights`; call it where you would call `save`."""
        with self._session.path_to_write(filepath, overwrite) as path:
            return super().save_weights(path, overwrite, **kwargs)

    def trace_each(self, is_needed: bool = True) -> None:
        """Traces each micro-batch, as split layers and shares need, or only the first."""
        # TensorFlow computes the gradients of a function on one device, and keeps what a function
        # gathers until then.
        is_needed |= self._layout.mesh.parts > 1 or self._shards_parameters
        super().trace_each(is_needed)

    def _choose_all_reduce(self):
        self.strategy.choose_all_reduce(self._trained())

    @property
    def places(self) -> Places:
        """The replicas of this process, each with a copy or a share of every variable."""
        replicas = replicas_of(self._layout)
        is_one = len(replicas) == 1 and not self._shards_optimizer
        return Places() if is_one else MeshPlaces(replicas, self._workers)

    def _place_updates(self):
        places, shares = self.places, self._shards_optimizer
        prepare(self.optimizer, places, shares=shares, parts=self._layout.mesh.tensor > 1)

    def _parts(self, variables):
        return parts_of(variables)

    def _parts_of_output(self, tensor):
        mesh = self._layout.mesh
        if mesh.sequence == 1:
            return None
        last_stage = (self._layout.num_stages - 1) % mesh.pipeline
        devices = self._layout.devices_of_place(last_stage)
        return known_parts(tensor, list(map(device_at_work, devices)))

    def copy_variables(self) -> None:
        """Copies or shards variables over the replicas; seeds are shared by all pieces."""
        if self._shards_parameters:
            shard_all(large_weights(self), self.places)
        seeds = {id(each.state) for layer in layers_in(self) for each in seed_generators_of(layer)}
        copied = [v for v in (*self.variables, *states_in_layers(self)) if id(v) not in seeds]
        self.places.copy(parts_of(copied))
