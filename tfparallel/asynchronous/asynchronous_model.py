"""`sync="async"`: a Keras model whose steps run on workers that each update the weights.

    chief      dispatches a whole batch to a free worker, and continues
    worker     v ← version, θ ← weights, g ← gradient of the batch
    server     θ ← update(θ, g), version ← version + 1; one at a time, so that updates are atomic

Other workers may update the weights after a worker has read them: the staleness of its gradient is
the number of such updates. It is counted for each step, and bounded (`in_flight.py`). So the result
differs from training on one device. As there, each batch is one update; gradients are not summed
between workers.

The chief holds the metrics. For metrics with additive state, workers return the sums; for others,
the predictions. If a worker ends during a batch, that batch is dispatched again.

References:
    Jeffrey Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012.
"""

import collections
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.asynchronous.in_flight import InFlight, default_staleness, steps_ahead
from tfparallel.asynchronous.servers import Servers, move_to_servers
from tfparallel.asynchronous.worker_step import STALENESS, WorkerStep, loss_trackers
from tfparallel.extend import attach, extend, is_own, original_class
from tfparallel.layout.layout import Layout
from tfparallel.seams.compiled import compiled_metrics, loss_tracker
from tfparallel.seams.keras import batches_of, compute_output_spec, layers_in, set_mask
from tfparallel.step.additivity import metrics_of_rows_together
from tfparallel.step.build import types_of_batches
from tfparallel.step.extended_model import ExtendedModel
from tfparallel.step.metrics import StepMetrics
from tfparallel.step.piece_sums import states
from tfparallel.tracing.trial_trace import traced_apart
from tfparallel.user_log import notice

# Methods that the user's model must not override.
_KERASS = ("train_step", "compute_metrics", "fit", "train_on_batch", "make_train_function")


class AsynchronousModel(ExtendedModel):
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
        """Statistics over the updates of all `fit`s: count, mean and largest staleness, bound."""
        return self._staleness_of(self._seen_staleness)

    def _staleness_of(self, counts: collections.Counter) -> dict[str, Any]:
        number = sum(counts.values())
        return {
            "updates": number,
            "mean": sum(s * count for s, count in counts.items()) / max(1, number),
            "largest": max(counts, default=0),
            "bound": self._max_staleness,
        }

    @property
    def bytes_of_a_step(self) -> dict[str, int]:
        """Bytes of weights that a worker reads, and of gradients that it sends, in a step.

        Embeddings count in full, although only the rows of a batch travel.
        """
        return {
            "weights": _bytes_of(self.variables),
            "gradients": _bytes_of(self.trainable_variables),
        }

    def _look_at(self, call):
        if call.kind == "compile":
            for name in ("jit_compile", "run_eagerly"):
                if call.arguments.get(name) is True:
                    raise ValueError(
                        f"Under sync='async' workers run each step as a graph. {name}=False is "
                        f"required. Received: {name}=True."
                    )
        elif call.kind == "fit":
            call.enter(self._dispatching())
        else:
            self._in_flight.end_all()

    def _prepare_compiled(self):
        if self.optimizer is not None:
            move_to_servers(self.optimizer, self._servers.strategy)
        self.train_function = None

    @contextlib.contextmanager
    def _dispatching(self) -> Iterator[None]:
        """Surrounds a `fit`, in which each batch is a step on one worker."""
        overridden = [name for name in _KERASS if is_own(self, name)]
        if overridden:
            raise ValueError(
                "Under sync='async' the workers run Keras's own step. A model that does not "
                f"override it is required. Received: `{overridden[0]}` of class "
                f"{original_class(self).__name__}. Use sync='every_step'."
            )
        before = collections.Counter(self._seen_staleness)
        attach(self, _batch_spec=None)
        try:
            with self._servers.naming_lost_server(lambda: len(self._in_flight) > 0):
                yield
        finally:
            with contextlib.suppress(Exception):
                self._servers.coordinator.join()
            self._in_flight.forget()
            attach(self, _is_in_epoch=False)
        stats = self._staleness_of(collections.Counter(self._seen_staleness) - before)
        if stats["updates"]:
            notice(
                f"async: {stats['updates']} updates, mean staleness {stats['mean']:.2f}, at most "
                f"{stats['largest']} (bound {stats['bound']})."
            )

    # Methods that read or write weights wait for all steps in flight.

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

    @contextlib.contextmanager
    def settled_workers(self):
        """Waits for all steps in flight, so that a checkpoint includes every dispatched batch."""
        self._in_flight.end_all()
        yield

    def train_on_batch(self, *args, **kwargs):
        """Raises an error: the chief would wait for each single step."""
        raise ValueError(
            "Under sync='async' only `fit` distributes steps to workers. Received: "
            "`train_on_batch`. Use `fit`, or sync='every_step'."
        )

    def _resolve_auto_jit_compile(self):
        return False

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if iterator is not None:
            batches = batches_of(iterator)
            data_batch = types_of_batches(batches)
            if self._batch_spec is None:  # At the start of `fit`; later calls are for validation.
                attach(self, _batch_spec=batches.element_spec)
        if not all(layer.built for layer in layers_in(self)):
            self._outputs_of(keras.utils.unpack_x_y_sample_weight(data_batch)[0])
        if self.optimizer is not None and not self.optimizer.built:
            with self._servers.scope():
                self.optimizer.build(self.trainable_variables)
        # The chief holds losses and metrics.
        with traced_apart():
            self._symbolic_build(data_batch=data_batch)

    def _metrics_of_rows_together(self) -> dict[int, str]:
        """Returns the metrics that are not sums over the rows, by id, with the reason."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._batch_spec)
        return metrics_of_rows_together(self, y, self._outputs_of(x), sample_weight)

    def _outputs_of(self, x):
        """Builds the model; returns the shapes and dtypes of its outputs for inputs like `x`."""
        x = keras.tree.map_structure(lambda v: keras.KerasTensor(v.shape, v.dtype.name), x)
        with self._servers.scope(), traced_apart():
            return compute_output_spec(self, x, training=False)

    def make_train_function(self, force=False):
        """Creates the function that dispatches steps, and returns the logs of completed ones."""
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
            self._in_flight.begin(deal, next(batches))  # Raises at the end of the data.
            for batch in batches:
                self._in_flight.begin(deal, batch)
            return self._latest_logs  # The logs of completed steps; empty at first.

        self.train_function = deal_several
        return deal_several

    def _fetch(self, remote) -> Any:
        """Returns the results of a step; None if they were lost with its worker."""
        try:
            return remote.fetch()
        except tf.errors.UnavailableError:
            if not self._servers.all_hold:
                raise
            return None

    def _take(self, results, batch) -> None:
        """Adds the results of a step to the logs."""
        numbers, outputs, masks = results
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
        """Adds the numbers of a `WorkerStep` to the metrics, and returns the logs.

        It is traced; `are_alike` tells whether all batches have the same number of rows.
        """
        loss, rows, _ = tf.unstack(numbers[: STALENESS + 1])
        loss_tracker(self).update_state(loss, sample_weight=rows)
        start = STALENESS + 1
        for tracker in loss_trackers(self):
            if tracker is not None:
                # Keras weights them by their rows only in this case.
                tracker.update_state(numbers[start], sample_weight=rows if are_alike else None)
                start += 1
        for variable in states(self._step_metrics.summed):
            size = int(np.prod(variable.shape))
            grown = tf.reshape(numbers[start : start + size], variable.shape)
            variable.assign_add(tf.cast(grown, variable.dtype))
            start += size
        return self.get_metrics_result()

    def _get_metrics_result_or_logs(self, logs):
        # Keras's loop calls this after the steps of an epoch, before any callback.
        if self._is_in_epoch:
            self._in_flight.end_all()
            attach(self, _is_in_epoch=False)
            return self.get_metrics_result()  # The logs passed in may be empty.
        return super()._get_metrics_result_or_logs(logs)


def extend_model(model: keras.Model, servers: Servers, staleness: int | None) -> keras.Model:
    """Extends `model`, whose variables are on the servers, to train asynchronously, in place.

    If `staleness` is None, the bound is one that keeps the workers busy.

    Raises:
        ValueError: If the bound is too low for the number of workers.
    """
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
        model._prepare_compiled()
    return model


def _bytes_of(variables) -> int:
    return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables)
