"""The Keras model whose steps run as one program over the replicas."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.checkpoint.model_files import can_be_streamed, save_streamed
from tfparallel.compute_context import within
from tfparallel.extend import attach, extend, is_own
from tfparallel.flight.marks import mark
from tfparallel.judge.check_rows import proof_in_words
from tfparallel.layout.layout import Layout
from tfparallel.layout.mesh import Mesh
from tfparallel.replication import predictions, refusals, sample_partition, state
from tfparallel.replication.extend_members import extend_parts
from tfparallel.replication.per_replica_loss import OwnRows
from tfparallel.replication.places import ReplicaPlaces
from tfparallel.replication.replicated_layer import ReplicatedLayer, judge_anew
from tfparallel.replication.sync.accumulate import Accumulate
from tfparallel.replication.sync.adascale import AdaScale
from tfparallel.replication.sync.local_sgd import LocalSgd
from tfparallel.replication.sync.option import EVERY_STEP, Synchronization
from tfparallel.replication.sync.policy import EveryStep, HasPolicy
from tfparallel.replication.worker_session import WorkerSession
from tfparallel.seams.keras import batches_of, layers_in
from tfparallel.seams.saving import read_as_saved
from tfparallel.step.build import build_ahead, symbolic_build, types_of_batches
from tfparallel.step.call import Call
from tfparallel.step.jit_compile import compiled_by_device
from tfparallel.step.read_inputs import read_inputs
from tfparallel.update.built_optimizers import check_known, wrapped_by
from tfparallel.update.place_optimizer import prepare


def _is_symbolic(leaf) -> bool:
    return isinstance(leaf, tf.Tensor) and tf.is_symbolic_tensor(leaf)


class DataParallelModel(HasPolicy, OwnRows, ReplicatedLayer):
    """Extends the user's model class to run the same methods on all replicas.

    `strategy` is the `tfparallel.MirroredStrategy`, or None for one device, where only the input is
    checked.
    """

    _shards_optimizer = False  # Whether each replica updates only its share of the weights,
    _shards_gradients = False  # accumulates only that share of their gradients,
    _shards_parameters = False  # and stores only that share of the weights.
    _made_by_function = False  # Whether the builder received a function that makes the model.
    _session: WorkerSession  # Everything else that differs between workers.

    @property
    def _workers(self):
        return self._session.workers

    @property
    def strategy(self):
        """The strategy that holds the replicas, or None on one device."""
        return getattr(self, "_strategy", None)

    @property
    def _has_several_devices(self) -> bool:
        return self.strategy is not None

    @property
    def _devices_of_programs(self):
        return self.strategy.devices

    @property
    def _sums_in_programs(self) -> bool:
        return self.strategy.sums_in_programs

    @property
    def layout(self) -> Layout:
        """The layout; the all-reduce algorithm may be chosen when training begins."""
        if self.strategy is not None:
            return dataclasses.replace(self.strategy.layout, proof=proof_in_words(self))
        return Layout(Mesh(), device_lib.choose_devices(num_devices=1))

    def _prepare_compiled(self):
        super()._prepare_compiled()
        if self.strategy is not None:
            refusals.check_compile(self, self.strategy)
            refusals.check_variables(self, self.strategy, self._made_by_function)
            check_known(self)
            extend_parts(self)

    def _look_at(self, call):
        self._session.take_whole_batches(call)
        if call.kind in ("compile", "fit") and self.strategy is not None:
            refusals.check_scope(self.strategy, f"`{call.kind}` of a `data_parallel` model")
            if call.kind == "compile":
                call.enter(self.strategy.scope())
        if call.kind == "fit":
            names = ("x", "batch_size", "steps_per_epoch")
            if not call.is_own or "x" in call.arguments:
                refusals.check_data(*(call.arguments.get(name) for name in names), "fit")
            if self._shards_optimizer:
                is_of_workers = self._workers is not None and self._shards_parameters
                refusals.refuse_callbacks(call.callbacks, are_sharded=is_of_workers)
            for layer in layers_in(self):
                judge_anew(layer)
        if call.kind == "predict" and not self._gathers:
            raise ValueError(
                "A callback of `predict(gather_to=…)` cannot call `predict`, because each worker "
                "keeps its own rows until the end. Received: a nested call of `predict`. Call it "
                "before or after."
            )
        super()._look_at(call)

    def predict(self, *args, gather_to: str | None = "all", **kwargs):
        """Predicts, as `keras.Model.predict` does.

        Args:
            *args: As for `keras.Model.predict`.
            gather_to: Which workers get the predictions of all rows: "all"; or the "chief", while
                the others get None. With None, each worker gets the predictions of its own rows,
                and nothing is sent. Unless it is "all", callbacks see the rows of their worker.
            **kwargs: As for `keras.Model.predict`.

        Raises:
            ValueError: If `gather_to` is something else, or is not "all" and the model overrides
                `predict_step`.
        """
        predictions.check_gather_to(gather_to, self._predicts_as_keras)
        if self._workers is None or gather_to == "all":
            return super().predict(*args, **kwargs)
        call = Call(self, "predict", args, kwargs)
        call.received = predictions.PredictionsOfWorkers(self._workers)
        predictions_of_worker = self._run(call)
        if gather_to is None:
            return predictions_of_worker
        with self._session.together():
            return call.received.at_chief(predictions_of_worker)

    @contextlib.contextmanager
    def _around_a_batch(self, kind):
        with self._session.around_a_batch(kind), super()._around_a_batch(kind):
            yield

    def _begin(self, call):
        self._session.begin(call)
        super()._begin(call)  # The guards must enclose the predictions and their callback.
        if call.received is not None:
            call.add_callbacks(call.received)
            call.enter(self._keeping_rows())

    @property
    def _predicts_as_keras(self) -> bool:
        return not is_own(self, "predict_step")

    @contextlib.contextmanager
    def _keeping_rows(self):
        """Predicts without joining the workers' rows, with a separate function, traced once.

        It runs one step per execution, so each callback sees one batch.
        """
        self.make_predict_function()
        original, steps = self.predict_function, self.steps_per_execution
        cached_for, cached = self._predict_own_rows  # Valid while Keras keeps it.
        self.predict_function = cached if cached_for is original else None
        self.steps_per_execution = 1
        attach(self, _gathers=False)
        try:
            yield
            attach(self, _predict_own_rows=(original, self.predict_function))
        finally:
            attach(self, _gathers=True)
            self.predict_function, self.steps_per_execution = original, steps

    def quantize(self, *args, **kwargs):
        """Quantizes the layers on all replicas, as `keras.Model.quantize` does."""
        with contextlib.nullcontext() if self.strategy is None else self.strategy.scope():
            return super().quantize(*args, **kwargs)

    def save(self, filepath, overwrite=True, zipped=None, **kwargs):
        """Saves the model, as `keras.Model.save` does; called by any worker, or by all of them.

        With `gradient_accumulation_steps` or `shard`, all workers must call it.
        """
        by_all = self._shards_parameters
        streams = by_all and can_be_streamed(self, str(filepath), overwrite, zipped, kwargs)
        with self._session.path_to_write(filepath, overwrite, by_all=by_all, once=streams) as path:
            if streams:
                return read_as_saved(self) if path is None else save_streamed(self, str(path))
            return super().save(path, overwrite, zipped, **kwargs)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Saves the weights, as `keras.Model.save_weights` does; workers call it as `save`."""
        by_all, once = self._shards_parameters, not (kwargs or is_own(self, "save_weights"))
        with self._session.path_to_write(filepath, overwrite, by_all=by_all, once=once) as path:
            write = super().save_weights
            return read_as_saved(self) if path is None else write(path, overwrite, **kwargs)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        self._build_before_steps(iterator, data_batch)
        self._tell_callbacks(iterator)

    def _build_before_steps(self, iterator, data_batch):
        # Under a strategy, Keras reads a first batch here: a generator loses the prefetched
        # batches, and an unseeded shuffle moves on. The data set's spec is enough.
        if self.strategy is None:
            build_ahead(self, iterator, data_batch, contextlib.nullcontext())
            return
        refusals.check_variables(self, self.strategy, self._made_by_function)
        if self.train_function is None:
            extend_parts(self)  # Before building an optimizer that was set since `compile`.
        if is_own(self, "train_step"):
            return  # Only the user's step knows what it calls.
        if iterator is not None:
            data_batch = sample_partition.unmarked(types_of_batches(batches_of(iterator)))
        with self.strategy.scope():
            symbolic_build(self, data_batch)

    def make_train_function(self, force=False):
        """Traces a training step; the model is built by now."""
        if force or self.train_function is None:
            check_known(self)
        self._choose_all_reduce()
        self._make_ahead()
        return super().make_train_function(force)

    def _build_optimizer(self):
        if self.strategy is None:
            if self.built:
                super()._build_optimizer()
        elif not is_own(self, "train_step"):  # Only the user's step knows what it updates.
            with self.strategy.scope():
                super()._build_optimizer()

    def make_test_function(self, force=False):
        """Traces a step of `evaluate`."""
        self._make_ahead()
        return super().make_test_function(force)

    def make_predict_function(self, force=False):
        """Traces a step of `predict`."""
        self._make_ahead()
        return super().make_predict_function(force)

    def _make_ahead(self):
        """Creates the variables that each step reads; a step that creates one is traced twice."""
        if self.strategy is not None:
            with self.strategy.scope():
                state.global_seed_generator()

    def _choose_all_reduce(self):
        if self._workers is not None and self.built:
            self.strategy.choose_all_reduce(self.trainable_variables)

    @compiled_by_device
    def _take_step(self, kind, of_keras, data):
        if self.strategy is None:
            leaves = list(filter(_is_symbolic, keras.tree.flatten(data)))
            # The clock cannot be read where XLA compiles.
            is_marked = kind == "fit" and leaves and not self.jit_compile
            with tf.control_dependencies(mark("input", leaves) if is_marked else []):
                return of_keras(data)
        worker_rows = None
        if kind != "fit" or self._workers is None or not self._policy.is_silent:
            data, worker_rows = self._session.rows_and_counts(data, kind)
        if kind != "fit":
            return self._step_on_all_rows(kind, of_keras, data, worker_rows)
        extend_parts(self)
        object.__setattr__(self, "_in_train_step", True)
        if self.optimizer is not None:
            self.optimizer.forget_pending()
        try:
            # When the data has run out, ops that need no data (the step counter, the reset of an
            # accumulator) must not run either. Inlining the step drops a dependency on an argument
            # or its identity, but not on this op.
            tensors = [leaf for leaf in keras.tree.flatten(data) if _is_symbolic(leaf)]
            arrived = [tf.raw_ops.OptionalFromValue(components=tensors)] if tensors else []
            arrived += mark("input", tensors) if tensors else []
            with tf.control_dependencies(arrived):
                return self._policy.step(
                    data, lambda data: self._step_on_all_rows(kind, of_keras, data, worker_rows)
                )
        finally:
            object.__setattr__(self, "_in_train_step", False)

    def _step_on_all_rows(self, kind, of_keras, data, worker_rows):
        """Runs a step on the rows of all workers."""
        if kind == "predict":
            if self.built and self._predicts_as_keras:
                return self._predict_on_own_rows(data, worker_rows, gathers=self._gathers)
            return of_keras(sample_partition.joined(data, worker_rows, self._workers))
        way = self._way(data, kind)
        if kind == "fit":
            self._policy.check_way(way)
        data, worker_rows = self._session.whole_if_needed(way, data, worker_rows)
        if kind == "evaluate":
            if way.rows_stay:
                return self._test_on_own_rows(data, way.metrics, worker_rows)
            return of_keras(data)
        # A user's own step, or a wrapping optimizer, needs whole gradients.
        adds_up = self._accumulates or not wrapped_by(self.optimizer)
        takes_shares = self._shards_parameters and not is_own(self, "train_step") and adds_up
        with within(takes_shares=takes_shares):
            if way.rows_stay:
                return self._train_on_own_rows(data, way.metrics, worker_rows)
            return of_keras(data)

    def _make_policy(self, sync) -> EveryStep:
        if sync.accumulates:
            return AdaScale(self, sync) if sync.scales_rate else Accumulate(self, sync)
        return LocalSgd(self, sync) if sync.is_local else EveryStep(self, sync)

    def _read(self, data):
        """Drops the inputs that the model does not read."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        read = read_inputs(self, x)
        # Unchanged if all inputs are read: a user's own step may unpack the batch differently.
        return data if read is x else keras.utils.pack_x_y_sample_weight(read, y, sample_weight)

    def _partial_gradients(self):
        # A user's own step may do anything with its gradients, so they are summed at once; Keras's
        # step passes them straight to the optimizer, or to the accumulators of shares.
        adds_up_whole = self._accumulates and not self._shards_gradients
        if not self._in_train_step or is_own(self, "train_step") or adds_up_whole:
            return None
        return self.optimizer.pending_sums()


def extend_model(
    model: keras.Model,
    strategy,
    *,
    synchronize_batch_norm: bool = True,
    check_rows: bool | None = None,
    sync: Synchronization = EVERY_STEP,
    shard: str | None = None,
    made_by_function: bool = False,
) -> keras.Model:
    """Makes `model`, whose variables belong to `strategy`, data parallel, in place.

    Args:
        model: A model built, or to be built, under the strategy's scope.
        strategy: The `tfparallel.MirroredStrategy`; None for one device.
        synchronize_batch_norm: Whether batch normalization takes the global batch's moments.
        check_rows: Whether to refuse a model that mixes examples; None for the strategy's default.
        sync: When the workers synchronize their weights.
        shard: What is sharded over the replicas: "optimizer", also "gradients", also "parameters".
        made_by_function: Whether a function passed to `data_parallel` made the model.

    Returns:
        The same object, with its class extended.
    """
    extend(
        model,
        DataParallelModel,
        _strategy=strategy,
        _session=WorkerSession(model),
        _synchronize_batch_norm=synchronize_batch_norm,
        _check_rows=check_rows,
        _sync=sync,
        _made_by_function=made_by_function,
        _shards_optimizer=shard is not None,
        _shards_gradients=shard in ("gradients", "parameters"),
        _shards_parameters=shard == "parameters",
        _in_train_step=False,
        _gathers=True,
        _predict_own_rows=(None, None),
    )
    if strategy is not None:
        object.__setattr__(model, "_distribute_strategy", strategy)
        refusals.check_model(model, strategy)
        refusals.check_compile(model, strategy)
        check_known(model)
        extend_parts(model)
    return model


def preparing(strategy, in_shares: bool) -> Callable[[keras.Optimizer], None] | None:
    """Returns a function that prepares an optimizer before it is built; None if not needed."""
    if not in_shares:
        return None
    return functools.partial(prepare, places=ReplicaPlaces(strategy), shares=True)
