"""The Keras model whose steps are dealt out to workers, each of which updates the weights: `async`.

    chief      deals out a batch, whole, to a worker that is free, and goes on
    worker     v ← version, θ ← weights, g ← gradient of the batch
    server     θ ← update(θ, g), version ← version + 1; one at a time, so that none is torn

The gradient is of weights that others may have updated since: its staleness is how many did. It is
counted for each step, and bounded (`in_flight.py`). So this is not the training of one device. A
batch is an update, as there; nothing is summed between workers.

Metrics are the chief's. Those whose states add up come as numbers; of the others the predictions
do. A batch that a worker was computing when it ended is dealt out again.

References:
    Jeffrey Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012.
"""

import collections
import contextlib
import inspect
import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.asynchronous.in_flight import InFlight, default_staleness, steps_ahead
from tfparallel.asynchronous.servers import Servers, move_to_servers
from tfparallel.asynchronous.worker_step import STALENESS, WorkerStep, loss_trackers
from tfparallel.extend import attach, extend, original_class
from tfparallel.layout.layout import Layout
from tfparallel.seams.compiled import compiled_metrics, loss_tracker
from tfparallel.seams.keras import batches_of, compute_output_spec, layers_in, set_mask
from tfparallel.step.additivity import metrics_of_rows_together
from tfparallel.step.build import types_of_batches
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.terms import states
from tfparallel.tracing.apart import traced_apart
from tfparallel.user_log import notice

__all__ = ["AsynchronousModel", "extend_model"]

# What only Keras's own may do.
_KERASS = ("train_step", "compute_metrics", "fit", "train_on_batch", "make_train_function")


class AsynchronousModel:
    """Extends the user's model class; its variables are on the servers."""

    _servers: Servers
    _max_staleness: int

    @property
    def layout(self) -> Layout:
        return self._servers.layout

    @property
    def strategy(self) -> None:
        """None: no strategy of this process has replicas."""
        return None

    @property
    def _workers(self) -> None:
        return None

    @property
    def _is_chief(self) -> bool:
        return True

    @property
    def staleness(self) -> dict[str, Any]:
        """Of the updates of all `fit`s: how many, the mean and the largest staleness, the bound."""
        return self._told(self._seen_staleness)

    def _told(self, seen: collections.Counter) -> dict[str, Any]:
        number = sum(seen.values())
        return {
            "updates": number,
            "mean": sum(s * count for s, count in seen.items()) / max(1, number),
            "largest": max(seen, default=0),
            "bound": self._max_staleness,
        }

    @property
    def bytes_of_a_step(self) -> dict[str, int]:
        """What a worker reads of the weights, and hands over of their gradients, in a step.

        Of an embedding that a layer looks up, the rows of a batch alone travel; it counts whole.
        """
        return {
            "weights": _bytes_of(self.variables),
            "gradients": _bytes_of(self.trainable_variables),
        }

    def compile(self, *args, **kwargs):
        """Configures training, as `keras.Model.compile`; the servers hold the optimizer."""
        asked = inspect.signature(keras.Model.compile).bind(self, *args, **kwargs).arguments
        for name in ("jit_compile", "run_eagerly"):
            if asked.get(name) is True:
                raise ValueError(
                    "Under sync='async' a step is a graph that TensorFlow runs on a worker. "
                    f"{name}=False is required. Received: {name}=True."
                )
        super().compile(*args, **kwargs)
        self._take_optimizer()

    def _take_optimizer(self) -> None:
        if self.optimizer is not None:
            move_to_servers(self.optimizer, self._servers.strategy)
        self.train_function = None

    def fit(self, *args, **kwargs):
        """Trains the model, as `keras.Model.fit`; each batch is a step of one worker."""
        own = [
            name
            for name in _KERASS
            if name in vars(self)
            or getattr(original_class(self), name) is not getattr(keras.Model, name)
        ]
        if own:
            raise ValueError(
                "Under sync='async' the chief deals out Keras's own step. A model without one of "
                f"its own is required. Received: `{own[0]}` of class "
                f"{original_class(self).__name__}. Take sync='every_step'."
            )
        before = collections.Counter(self._seen_staleness)
        attach(self, _batch_spec=None)
        try:
            with self._servers.naming_lost_server(lambda: len(self._in_flight) > 0):
                history = super().fit(*args, **kwargs)
        finally:
            with contextlib.suppress(Exception):
                self._servers.coordinator.join()
            self._in_flight.forget()
            attach(self, _is_in_epoch=False)
        told = self._told(collections.Counter(self._seen_staleness) - before)
        if told["updates"]:
            notice(
                f"async: {told['updates']} updates, of a mean staleness of {told['mean']:.2f}, at "
                f"most {told['largest']} (bound {told['bound']})."
            )
        return history

    # What reads or writes weights waits until all steps that have begun are done.

    def save(self, *args, **kwargs):
        self._in_flight.end_all()
        return super().save(*args, **kwargs)

    def save_weights(self, *args, **kwargs):
        self._in_flight.end_all()
        return super().save_weights(*args, **kwargs)

    def get_weights(self):
        self._in_flight.end_all()
        return super().get_weights()

    def set_weights(self, weights):
        self._in_flight.end_all()
        return super().set_weights(weights)

    def evaluate(self, *args, **kwargs):
        self._in_flight.end_all()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        self._in_flight.end_all()
        return super().predict(*args, **kwargs)

    @contextlib.contextmanager
    def settled_workers(self):
        """Within it no step is on its way: what is written is of all that were dealt out."""
        self._in_flight.end_all()
        yield

    def train_on_batch(self, *args, **kwargs):
        """Refused: a step alone would be waited for."""
        raise ValueError(
            "Under sync='async' steps are dealt out by `fit`. Received: `train_on_batch`. Take "
            "`fit`, or sync='every_step'."
        )

    def _resolve_auto_jit_compile(self):
        return False

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if iterator is not None:
            batches = batches_of(iterator)
            data_batch = types_of_batches(batches)
            if self._batch_spec is None:  # Of a `fit` that begins; what follows is of a validation.
                attach(self, _batch_spec=batches.element_spec)
        if not all(layer.built for layer in layers_in(self)):
            self._outputs_of(keras.utils.unpack_x_y_sample_weight(data_batch)[0])
        if self.optimizer is not None and not self.optimizer.built:
            with self._servers.scope():
                self.optimizer.build(self.trainable_variables)
        # Losses and metrics are the chief's own.
        with traced_apart():
            self._symbolic_build(data_batch=data_batch)

    def _metrics_of_rows_together(self) -> dict[int, str]:
        """The metrics that are no sums over the rows, by id, with the reason."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._batch_spec)
        return metrics_of_rows_together(self, y, self._outputs_of(x), sample_weight)

    def _outputs_of(self, x):
        """The shapes and types of what the model, built in it, makes of such inputs."""
        x = keras.tree.map_structure(lambda v: keras.KerasTensor(v.shape, v.dtype.name), x)
        with self._servers.scope(), traced_apart():
            return compute_output_spec(self, x, training=False)

    def make_train_function(self, force=False):
        """Makes what deals out a step, and hands over the logs of those that have ended."""
        if self.train_function is not None and not force:
            return self.train_function
        with self._servers.scope(), tf.device(self._servers.device):
            version = tf.Variable(0, dtype=tf.int64, trainable=False)
            one_at_a_time = tf.CriticalSection()
        compiled = compiled_metrics(self)
        metrics = StepMetrics.divided(compiled, self._metrics_of_rows_together())
        step = WorkerStep(self, metrics, version, one_at_a_time)
        attach(self, _step_metrics=metrics, _added_up=tf.function(self._add_up))

        def deal(batch):
            function = step.function_of(self._batch_spec)
            return self._servers.coordinator.schedule(function, args=(batch,))

        def deal_several(iterator):
            if not self._is_in_epoch:
                attach(self, _is_in_epoch=True, _latest_logs={})
            batches = itertools.islice(iterator, self.steps_per_execution)
            self._in_flight.begin(deal, next(batches))  # Raises where there is none.
            for batch in batches:
                self._in_flight.begin(deal, batch)
            return self._latest_logs  # Of the steps that have ended; at first there are none.

        self.train_function = deal_several
        return deal_several

    def _fetch(self, remote) -> Any:
        """What a step has found; None if its worker has ended since, and taken it along."""
        try:
            return remote.fetch()
        except tf.errors.UnavailableError:
            if not self._servers.all_hold:
                raise
            return None

    def _take(self, found, batch) -> None:
        """Adds what a step has found to the logs."""
        numbers, outputs, masks = found
        self._seen_staleness[int(numbers[STALENESS])] += 1
        if self._step_metrics.joined is not None:
            _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            outputs = keras.tree.map_structure(tf.convert_to_tensor, outputs)
            for place, mask in masks.items():
                set_mask(keras.tree.flatten(outputs)[int(place)], tf.convert_to_tensor(mask))
            self._step_metrics.joined.update_state(y, outputs, sample_weight=sample_weight)
        are_alike = keras.tree.flatten(self._batch_spec)[0].shape[0] is not None
        attach(self, _latest_logs=self._added_up(tf.constant(numbers), are_alike))

    def _add_up(self, numbers: tf.Tensor, are_alike: bool) -> dict[str, tf.Tensor]:
        """Adds the numbers of a `WorkerStep` to what metrics hold, and returns the logs.

        It is traced; `are_alike` says whether all batches have as many rows.
        """
        loss, rows, _ = tf.unstack(numbers[: STALENESS + 1])
        loss_tracker(self).update_state(loss, sample_weight=rows)
        start = STALENESS + 1
        for tracker in loss_trackers(self):
            if tracker is not None:
                # Only then Keras weighs them by their rows.
                tracker.update_state(numbers[start], sample_weight=rows if are_alike else None)
                start += 1
        for variable in states(self._step_metrics.summed):
            size = int(np.prod(variable.shape))
            grown = tf.reshape(numbers[start : start + size], variable.shape)
            variable.assign_add(tf.cast(grown, variable.dtype))
            start += size
        return self.get_metrics_result()

    def _get_metrics_result_or_logs(self, logs):
        # Keras's loop calls it behind the steps of an epoch, before any callback.
        if self._is_in_epoch:
            self._in_flight.end_all()
            attach(self, _is_in_epoch=False)
            return self.get_metrics_result()  # The step's logs may be of none.
        return super()._get_metrics_result_or_logs(logs)


def extend_model(model: keras.Model, servers: Servers, staleness: int | None) -> keras.Model:
    """Makes `model`, whose variables the servers hold, train asynchronously, in place.

    The bound on the staleness is one that keeps the workers busy if it is None.

    Raises:
        ValueError: If the bound cannot be kept.
    """
    _refuse_hidden_names(model)
    number = servers.num_workers
    bound = default_staleness(number) if staleness is None else staleness
    ahead = steps_ahead(bound, number)
    extend(
        model,
        AsynchronousModel,
        _servers=servers,
        _max_staleness=bound,
        _seen_staleness=collections.Counter(),
        _is_in_epoch=False,
        _latest_logs={},
        _batch_spec=None,
        _step_metrics=StepMetrics(None),
        _distribute_strategy=None,
    )
    attach(model, _in_flight=InFlight(ahead, model._take, model._fetch))
    if model.compiled:
        model._take_optimizer()
    return model


def _refuse_hidden_names(model: keras.Model) -> None:
    """Raises if something of the user's has a name that the extended class takes."""
    hidden = [
        name
        for name in vars(AsynchronousModel)
        if not name.startswith("__")
        and not hasattr(keras.Model, name)
        and (name in vars(model) or hasattr(original_class(model), name))
    ]
    if hidden:
        raise ValueError(
            f"Under sync='async' a model is given {', '.join(map(repr, hidden))}. A class without "
            f"such names is required. Received: {original_class(model).__name__}, which has one of "
            "its own. Rename it."
        )


def _bytes_of(variables) -> int:
    return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables)
