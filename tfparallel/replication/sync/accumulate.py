"""One update of N steps, and one sum of gradients: `sync="accumulate:4"`.

    worker 0   θ   a ← a + d g    a ← a + d g    …    a ← a + d g ──┐
    worker 1   θ   a ← a + d g    a ← a + d g    …    a ← a + d g ──┴── θ ← update(θ, Σ a / Σ d)

g is the gradient of a step's loss over this worker's rows, and d the divisor of that loss: rows,
valid tokens, or a sum of weights. So Σ d g is the gradient of the summed losses of all rows, and
Σ a / Σ d that of the loss of N batches taken as one, whatever their sizes and whichever worker
computed them. Nothing is sent between two updates. Metrics are summed at the end of the epoch,
where a shorter update takes the remaining steps, like a short last batch.

Where gradients are sharded (`shard="gradients"`, `"parameters"`), a step covers the rows of all
workers, and each replica accumulates its share of g, times the d of all rows. This saves memory at
the cost of one sum over the workers per step.

Sparse gradients are accumulated as dense ones, as in Keras: where several examples read one row of
an embedding, Adam squares the sum, while in a single batch it squares each term. Dropout draws the
masks of each step's batch. `gradient_accumulation_steps` of Keras's optimizers averages the
gradients of the steps, which differs where batch sizes differ.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.extend import is_own
from tfparallel.piece import RowsOfWorker
from tfparallel.replication.places import ReplicaPlaces
from tfparallel.replication.refusals import check_activity
from tfparallel.replication.sync.noise_scale import NoiseScale
from tfparallel.replication.sync.policy import BeginsEpochs, EveryStep
from tfparallel.seams.compiled import compiled_loss, loss_terms
from tfparallel.seams.keras import layers_in
from tfparallel.seams.tensorflow import ResourceVariable
from tfparallel.step.one_step import PassResult
from tfparallel.update.built_optimizers import with_wrapped, wrapped_by
from tfparallel.update.places import Places
from tfparallel.update.shares import in_shares, summed
from tfparallel.user_log import notice
from tfparallel.variables.sharded import ShardedGradient, joined_rows

_ONE_DIVISOR = "The whole loss must have one divisor"
_NEXT_TO_NONE = 1e-20  # A divisor that is negligible beside a row, and above float32's minimum.
LEAST_MEASURED = 4  # Pairs of updates to compare before N is doubled.


class _Counts(NamedTuple):
    """Counters on the host.

    Attributes:
        divisor: The sum of the divisors of the accumulated steps.
        steps: The number of accumulated steps.
        num_steps: N, the number of steps per update.
    """

    divisor: tf.Variable
    steps: tf.Variable
    num_steps: tf.Variable


class Accumulate(EveryStep):
    """Updates a replicated model every N steps, in one process or on several workers."""

    reason_in_errors = "the gradients of several steps are accumulated"
    accumulates = True

    def __init__(self, model, sync):
        super().__init__(model, sync)
        # By the weight's id: of its whole gradient, one per share, or none without a gradient.
        self._accumulators: dict[int, tuple[keras.Variable, list[tf.Variable]]] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = _Counts(
                ResourceVariable(0.0, dtype=tf.float64),
                ResourceVariable(0.0),
                ResourceVariable(float(sync.accumulated)),
            )

    @property
    def _in_shares(self) -> bool:
        """Whether each replica accumulates a share of the gradients, summed in each step."""
        return self.model._shards_gradients

    @property
    def places(self) -> Places:
        """The places of the shares."""
        return ReplicaPlaces(self.model.strategy)

    @property
    def is_silent(self) -> bool:
        """Whether the workers exchange nothing in the next step."""
        return not self._in_shares

    @property
    def workers_are_apart(self) -> bool:
        """Whether there are several workers, each with its own rows."""
        return self.is_silent and super().workers_are_apart

    def check_way(self, way) -> None:
        """Raises if outputs must be joined: the divisor of such a loss is unknown."""
        self.refuse_joined(way)

    def look_at(self, call):
        """Checks a call of `fit`, and adds the callback that reports the start of each epoch."""
        if call.kind != "fit":
            return
        if call.is_own:
            self.refuse("Keras's own `fit` is required", "a model with a custom `fit`")
        call.add_callbacks(BeginsEpochs())
        self.check_callbacks(call.callbacks)

    def begin(self, call):
        """Enters the contexts of a call; no gradients are held before or after `fit`."""
        if call.kind == "fit":
            call.enter(self._holding_gradients())
            call.enter(self.training_silently())
        super().begin(call)

    @contextlib.contextmanager
    def _holding_gradients(self) -> Iterator[None]:
        self.forget()
        self._noise.forget_first()
        try:
            yield
        finally:
            self.forget()

    @property
    def is_between_updates(self) -> bool:
        """Whether no gradients are held; only then is a checkpoint complete."""
        return float(self._counts.steps) == 0 and self._noise.is_between_pairs

    @property
    def num_steps(self) -> int:
        """N, the number of steps per update."""
        return int(self._counts.num_steps)

    def resumable_state(self) -> dict[str, tf.Variable]:
        """The variables by name that a resumed run needs, equal on all workers."""
        if not self.sync.grows:
            return {}
        return {"steps of an update": self._counts.num_steps, **self._noise.state}

    def _check(self) -> None:
        """Raises if the gradients of several steps do not add up to those of one.

        Raises:
            ValueError: For such a step, optimizer or layer.
        """
        check_activity(self.model)
        if is_own(self.model, "train_step"):
            cause = "a model with a custom `train_step`"
        elif any(each.gradient_accumulation_steps for each in with_wrapped(self.model.optimizer)):
            cause = "an optimizer with `gradient_accumulation_steps`"
        elif self.sync.grows and hasattr(self.model.optimizer, "inner_optimizer"):
            cause = "a LossScaleOptimizer, whose loss scale changes the gradients; use accumulate:N"
        elif (layer := self._looks_at_all_rows()) is not None:
            cause = f"batch normalization, with the statistics of one step, in '{layer.name}'"
        else:
            return
        self.refuse(
            "Keras's own `train_step`, with gradients that add up over steps, is required", cause
        )

    @property
    def _are_sums(self) -> bool:
        """Whether the losses are sums over rows instead of means.

        Raises:
            ValueError: If some are sums and others means.
        """
        kinds = {term.loss.reduction == "sum" for term in loss_terms(compiled_loss(self.model))}
        if len(kinds) > 1:
            self.refuse(_ONE_DIVISOR, "losses with reduction='sum' combined with means")
        return True in kinds

    def _looks_at_all_rows(self):
        for layer in layers_in(self.model):
            is_norm = isinstance(layer, keras.layers.BatchNormalization)
            if is_norm and layer.trainable and getattr(layer, "synchronize", False):
                return layer
        return None

    def step(self, data, default) -> dict[str, Any]:
        """Accumulates the gradients of this worker's rows; every N-th step updates the weights."""
        self._check()
        if self.model._workers is None or not self.is_silent:
            logs = default(data)
        else:
            data, worker_rows = self.model._session.rows_and_counts(data, "fit")
            way = self.model._way(data, "fit")
            self.refuse_joined(way)
            self.model._look_at_rows_of(data)
            data, place = self._placed(data, worker_rows)  # From here on, their number is hidden.
            with self.model.strategy.apart(place):
                logs = self.model._train_on_own_rows(data, way.metrics)
        self._count_step()
        return logs

    def _count_step(self) -> None:
        """Counts an accumulated step, and updates the weights if it is the last of N."""
        is_due = self._counts.steps.assign_add(1.0) >= self._counts.num_steps

        def update():
            self._update_of_steps(is_full=True)
            return True  # Both branches must return the same type; None would add an operation.

        tf.cond(is_due, update, lambda: False)

    def _placed(self, data, worker_rows):
        """This worker's rows of the step's data, and their place in the global batch."""
        if worker_rows is None:
            return self.cut_here(data)
        index = self.model._workers.worker_index
        size = worker_rows[index]
        before = tf.add_n([tf.zeros_like(size), *worker_rows[:index]])
        first_replica = self.model.strategy.first_replica
        return data, RowsOfWorker(first_replica, before, size, tf.add_n(worker_rows))

    def apply(self, result: PassResult, default) -> None:
        """Accumulates the gradients of a step, multiplied by its divisor."""
        divisor = tf.cast(self._divisor_of(result), tf.float64)
        # If all rows are masked or weigh nothing, only regularizers have a gradient. It counts
        # only if every step of the update is like this.
        tiny = tf.constant(_NEXT_TO_NONE, tf.float64)
        divisor = tf.where(tf.equal(divisor, 0.0), tiny, divisor)
        terms = [_terms_of(gradient) for gradient in self._gradients_of(result)]
        accumulators = itertools.chain(*self._accumulators_of(result.variables, terms))
        seen = []
        for term, accumulated in zip(itertools.chain(*terms), accumulators, strict=True):
            with tf.device(accumulated.device):
                seen.append(tf.cast(tf.convert_to_tensor(term), accumulated.dtype))
                term = seen[-1] * tf.cast(divisor, accumulated.dtype)
                accumulated.assign_add(term, read_value=False)
        self._counts.divisor.assign_add(divisor, read_value=False)
        self.see_step(seen, divisor)

    def see_step(self, gradients: list[tf.Tensor], divisor: tf.Tensor) -> None:
        """Called with the accumulated gradients of a step, whole or in shares."""

    def _divisor_of(self, result: PassResult):
        num_added = len(self.model.losses) if result.num_added is None else result.num_added
        if self._are_sums:
            if num_added:
                self.refuse(
                    _ONE_DIVISOR, "reduction='sum' combined with a regularizer or `add_loss`"
                )
            return tf.ones([])
        if result.divisor is None:
            self.refuse(_ONE_DIVISOR, "several outputs whose losses each have a mask or weights")
        regularized = [v for v in self.model.trainable_weights if v.regularizer is not None]
        if result.divisor is not result.num_rows and num_added > len(regularized):
            self.refuse(_ONE_DIVISOR, "a masked or weighted loss combined with `add_loss`")
        return result.divisor

    def _gradients_of(self, result: PassResult) -> list[Any]:
        """The gradients of a step, whole or in shares; pending sums of shares are summed here."""
        gradients = list(result.gradients)
        if not self._in_shares:
            return gradients
        places, pending = self.places, self.model._partial_gradients()
        if pending is not None:
            gradients = summed(pending, gradients, result.variables, places)
        return in_shares(gradients, result.variables, places)

    def _accumulators_of(self, variables, terms) -> list[list[tf.Variable]]:
        """The accumulators of each weight's terms."""
        previous, self._accumulators = self._accumulators, {}
        accumulators_of_all = []
        for variable, terms_of_weight in zip(variables, terms, strict=True):
            _, accumulators = previous.get(id(variable), (None, []))
            accumulators = accumulators or self._make_accumulators(variable, terms_of_weight)
            self._accumulators[id(variable)] = (variable, accumulators)
            accumulators_of_all.append(accumulators if terms_of_weight else [])
        return accumulators_of_all

    def _make_accumulators(self, variable, terms) -> list[tf.Variable]:
        """Makes the accumulators of a gradient's terms; a share's lies on the share's device."""
        copies, accumulators = self.places.copies(variable) if self._in_shares else [], []
        devices = [copy.device for copy in copies] or [self.device_of_sum(variable)]
        for term, device in zip(terms, devices, strict=False):
            # In 16 bits, a large sum would lose small terms.
            dtype = tf.float32 if term.dtype.size == 2 else term.dtype
            with tf.init_scope(), tf.device(device):
                zeros = tf.zeros(term.shape if copies else variable.shape, dtype)
                accumulators.append(ResourceVariable(zeros, trainable=False))
        return accumulators

    def device_of_sum(self, variable: keras.Variable) -> str:
        """The device that accumulates the whole gradients of a weight."""
        return self.model.strategy.devices[0]

    def between_steps(self) -> AbstractContextManager:
        """The context in which an update outside of a step runs."""
        return self.model.strategy.program()

    @functools.cached_property
    def _noise(self) -> NoiseScale:
        return NoiseScale()

    def _update_of_steps(self, *, is_full: bool) -> None:
        """Updates the weights with the accumulated gradients of all workers, and clears them.

        Args:
            is_full: Whether N steps were accumulated.
        """
        pairs = list(self._accumulators.values())
        used = [(variable, group) for variable, group in pairs if group]
        if not used:
            self.forget()
            return
        flat = [each for _, group in used for each in group]
        sums = [each.read_value() for each in flat]
        total = self._counts.divisor.read_value()
        if self.model._workers is not None and self.is_silent:
            sums, total = self.of_all_workers([variable for variable, _ in used], sums, total)
        if self._are_sums:
            total = tf.ones_like(total)
        means = []
        for each in sums:
            with tf.device(each.device):
                means.append(tf.math.divide_no_nan(each, tf.cast(total, each.dtype)))
        if self.sync.grows and is_full:
            self._noise.see(flat, means, self.model._workers if self._in_shares else None)
        remaining = iter(means)
        gradients = [self._gradient(variable, group, remaining) for variable, group in pairs]
        self.update(gradients, [variable for variable, _ in pairs], means, total)
        self.forget()

    def update(self, gradients, variables, means: list[tf.Tensor], divisor: tf.Tensor) -> None:
        """Updates the weights; `means` are the gradients, whole or in shares."""
        self.model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def _gradient(self, variable, accumulators, means: Iterator[tf.Tensor]) -> Any:
        """The gradient that the optimizer takes; a wrapping optimizer needs whole ones."""
        means_of_weight = list(itertools.islice(means, len(accumulators)))
        if not means_of_weight or not self._in_shares:
            return means_of_weight[0] if means_of_weight else None
        if not wrapped_by(self.model.optimizer):
            return ShardedGradient(means_of_weight)
        return joined_rows([means_of_weight], [variable], self.places)[0]

    def of_all_workers(self, variables, sums, divisor):
        """The sums of the gradients and of the divisors over all workers."""
        reducer = Reducer(None, self.model._workers)
        totals, (total,) = reducer.totals([[each] for each in sums], list, [divisor], variables)
        return totals, total

    def forget(self) -> None:
        """Clears the accumulated gradients."""
        for accumulator in itertools.chain(*(each for _, each in self._accumulators.values())):
            accumulator.assign(tf.zeros_like(accumulator), read_value=False)
        self._counts.divisor.assign(0.0, read_value=False)
        self._counts.steps.assign(0.0, read_value=False)

    def finish(self) -> None:
        """Updates the weights with the remaining steps, like a short last batch."""
        super().finish()
        if float(self._counts.steps):
            with self.between_steps():
                self._update_of_steps(is_full=False)
        if self.sync.grows:
            self._grow_if_it_pays()

    @property
    def _noise_ratio(self) -> float:
        """The noise scale divided by the rows of an update; 0 before it is known."""
        return self._noise.ratio if self._noise.num_pairs >= LEAST_MEASURED else 0.0

    def _grow_if_it_pays(self) -> None:
        self._noise.forget_first()
        ratio, steps = self._noise_ratio, self.num_steps
        if self.model._workers is not None:  # Processors may differ in the last digit.
            ratio = float(self.model._workers.broadcast([tf.constant(ratio, tf.float64)])[0])
        if ratio > 1:
            self._counts.num_steps.assign(2.0 * steps)
            self._noise.restart()
            if self.model._is_chief:
                notice(
                    f"{self.sync}: the gradient noise scale is {ratio:.3g} times the examples "
                    f"in an update; each update now accumulates {2 * steps} steps instead of "
                    f"{steps}."
                )


def _terms_of(gradient: Any) -> list:
    """The terms of a gradient that are accumulated separately: its shares, or the whole."""
    if gradient is None:
        return []
    return list(gradient.terms) if isinstance(gradient, ShardedGradient) else [gradient]
