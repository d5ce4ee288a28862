"""One update of N steps, and one sum of gradients: `sync="accumulate:4"`.

    worker 0   θ   a ← a + d g    a ← a + d g    …    a ← a + d g ──┐
    worker 1   θ   a ← a + d g    a ← a + d g    …    a ← a + d g ──┴── θ ← update(θ, Σ a / Σ d)

g is the gradient of the loss of a step's rows, of those of this worker alone, and d what that loss
is divided by: rows, valid tokens, a sum of weights. So Σ d g is the gradient of the sum of all the
rows' losses, and Σ a / Σ d that of the loss of N batches as one, whatever their sizes, and whoever
had them. Between two updates nothing is sent; metrics are summed when the epoch ends, where an
update takes what is left, as a last batch would be shorter.

Where replicas share out gradients (`shard="gradients"`, `"parameters"`), a step is of all workers'
rows, and each replica adds up its share of g, times the d of all rows: memory in place of silence.

Sparse gradients are added up to dense ones, as Keras's accumulation does it: of an embedding's row
that several examples read, Adam squares the sum, where in one batch it squares each term. Dropout
draws the masks of each step's batch. `gradient_accumulation_steps` of Keras's optimizers
takes the mean of the steps' gradients, which is another number where batches differ.
"""

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.data.rows_of_replica import Place
from tfparallel.extend import is_own
from tfparallel.replication.noise_scale import NoiseScale
from tfparallel.replication.places import ReplicaPlaces
from tfparallel.replication.refusals import check_activity
from tfparallel.replication.sync_policy import BeginsEpochs, EveryStep
from tfparallel.seams.compiled import compiled_loss, loss_terms
from tfparallel.seams.keras import layers_in
from tfparallel.seams.tensorflow import ResourceVariable
from tfparallel.step.one_step import PassResult
from tfparallel.update.built import wrapped_by
from tfparallel.update.shares import in_shares, summed
from tfparallel.user_log import notice
from tfparallel.variables.sharded import ShardedGradient, joined_rows

__all__ = ["Accumulate"]


_ONE_DIVISOR = "One divisor of the whole loss is required"
_NEXT_TO_NONE = 1e-20  # A divisor that is nothing beside a row, and more than float32's least.
_LEAST_PAIRS = 4  # Of updates that are compared, before N is doubled.


class _Counts(NamedTuple):
    """What is counted on the host.

    Attributes:
        divisor: The sum of the divisors of the steps that are held.
        steps: How many those are.
        wanted: N.
    """

    divisor: tf.Variable
    steps: tf.Variable
    wanted: tf.Variable


class Accumulate(EveryStep):
    """An update is of N steps; of a replicated model, of one process or of several workers."""

    reason_in_errors = "the gradients of several steps are added up"
    accumulates = True

    def __init__(self, model, sync):
        super().__init__(model, sync)
        # By weight what its gradients are added to, whole or in shares; nothing if it has none.
        self._held: dict[int, tuple[keras.Variable, list[tf.Variable]]] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = _Counts(
                ResourceVariable(0.0, dtype=tf.float64),
                ResourceVariable(0.0),
                ResourceVariable(float(sync.accumulated)),
            )
        self._known_noise: NoiseScale | None = None

    @property
    def _in_shares(self) -> bool:
        """Whether each replica adds up a share of the gradients, which all sum in each step."""
        return self.model._shards_gradients

    @property
    def is_silent(self) -> bool:
        """Whether the workers say nothing in the next step."""
        return not self._in_shares

    @property
    def workers_are_apart(self) -> bool:
        """Whether there are workers, of which each has seen its own rows."""
        return self.is_silent and super().workers_are_apart

    def check_way(self, way) -> None:
        """Raises where outputs meet: what such a loss is divided by is not known."""
        self.refuse_joined(way)

    def look_at(self, call):
        """Checks a `fit`, and has it tell when epochs begin."""
        if call.kind != "fit":
            return
        if call.is_own:
            self.refuse("Keras's own `fit` is required", "a model with a `fit` of its own")
        call.add_callbacks(BeginsEpochs())
        self.check_callbacks(call.callbacks)

    def begin(self, call):
        """Enters what is around a call: of `fit`, no gradients are held before and behind it."""
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
        """Whether no gradients are held; only then a checkpoint holds all that there is."""
        return float(self._counts.steps) == 0 and self._noise.is_between_pairs

    @property
    def num_steps(self) -> int:
        """N, of how many steps an update is."""
        return int(self._counts.wanted)

    def kept(self) -> dict[str, tf.Variable]:
        """What a run that is resumed needs, the same on all workers, by name."""
        if not self.sync.grows:
            return {}
        return {"steps of an update": self._counts.wanted, **self._noise.state}

    def _check(self) -> None:
        """Raises where gradients of several steps do not add up to those of one.

        Raises:
            ValueError: For a step, an optimizer or a layer of such a kind.
        """
        check_activity(self.model)
        if is_own(self.model, "train_step"):
            what = "a model with a `train_step` of its own"
        elif any(each.gradient_accumulation_steps for each in _with_inner(self.model.optimizer)):
            what = "an optimizer that accumulates gradients itself"
        elif self.sync.grows and len(_with_inner(self.model.optimizer)) > 1:
            what = "a LossScaleOptimizer, whose gradients differ by more than noise; name an N"
        elif (layer := self._looks_at_all_rows()) is not None:
            what = f"batch normalization, whose statistics are of a step's rows, in '{layer.name}'"
        else:
            return
        self.refuse("Keras's own step, and an update of whole gradients, are required", what)

    @property
    def _are_sums(self) -> bool:
        """Whether losses are sums over the rows, and not means.

        Raises:
            ValueError: If some are.
        """
        kinds = {found.loss.reduction == "sum" for found in loss_terms(compiled_loss(self.model))}
        if len(kinds) > 1:
            self.refuse(_ONE_DIVISOR, "a loss with reduction='sum' beside others")
        return True in kinds

    def _looks_at_all_rows(self):
        for layer in layers_in(self.model):
            if isinstance(layer, keras.layers.BatchNormalization):
                if layer.trainable and getattr(layer, "synchronize", False):
                    return layer
        return None

    def step(self, data, usual) -> dict[str, Any]:
        """A step's gradients of the rows here, and in every N-th the update."""
        self._check()
        if self.model._workers is None or self._in_shares:
            logs = usual(data)
        else:
            own, place = self._placed(data)
            way = self.model._way(own, "fit")
            self.refuse_joined(way)
            self.model._look_at_rows_of(own)
            with self.model.strategy.apart(place):
                logs = self.model._train_on_own_rows(own, way.metrics)
        self._count_step()
        return logs

    def _count_step(self) -> None:
        """Counts a step whose gradients are held; makes the update, if it is the last of N."""
        counts = self._counts
        is_time = counts.steps.assign_add(1.0) >= counts.wanted

        def update():
            self._update_of_steps(is_full=True)
            return True  # As the other branch: Python's None would be an operation in one alone.

        tf.cond(is_time, update, lambda: False)

    def _placed(self, data):
        """This worker's rows of what the step was given, and where they lie."""
        data, worker_rows = self.model._session.held(data, "fit")
        if worker_rows is None:
            return self.cut_here(data)
        own = worker_rows[self.model._workers.worker_index]
        before = tf.add_n([tf.zeros_like(own), *worker_rows[: self.model._workers.worker_index]])
        place = Place(self.model.strategy.first_replica, before, own, tf.add_n(worker_rows))
        return data, place

    def apply(self, found: PassResult, usual) -> None:
        """Adds up the gradients of a step, each times its divisor."""
        divisor = tf.cast(self._divisor_of(found), tf.float64)
        # Of rows that all are masked, or have no weight, regularizers alone have a gradient; it
        # counts where all steps of an update are such.
        least = tf.constant(_NEXT_TO_NONE, tf.float64)
        divisor = tf.where(tf.equal(divisor, 0.0), least, divisor)
        terms = [_terms_of(gradient) for gradient in self._gradients_of(found)]
        held = self._held_gradients(found.variables, terms)
        for term, accumulated in zip(itertools.chain(*terms), itertools.chain(*held), strict=True):
            with tf.device(accumulated.device):
                term = tf.cast(tf.convert_to_tensor(term), accumulated.dtype)
                term *= tf.cast(divisor, term.dtype)
                accumulated.assign_add(term, read_value=False)
        self._counts.divisor.assign_add(divisor, read_value=False)

    def _divisor_of(self, found: PassResult):
        num_added = len(self.model.losses) if found.num_added is None else found.num_added
        if self._are_sums:
            if num_added:
                self.refuse(_ONE_DIVISOR, "reduction='sum' beside a regularizer or `add_loss`")
            return tf.ones([])
        if found.divisor is None:
            self.refuse(_ONE_DIVISOR, "losses of several outputs with a mask or weights each")
        regularized = [v for v in self.model.trainable_weights if v.regularizer is not None]
        if found.divisor is not found.num_rows and num_added > len(regularized):
            self.refuse(_ONE_DIVISOR, "a masked or weighted loss beside `add_loss`")
        return found.divisor

    def _gradients_of(self, found: PassResult) -> list[Any]:
        """The gradients of a step: whole, or in shares, summed so where they are not summed yet."""
        gradients = list(found.gradients)
        if not self._in_shares:
            return gradients
        places, pending = ReplicaPlaces(self.model.strategy), self.model._partial_gradients()
        if pending is not None:
            gradients = summed(pending, gradients, found.variables, places)
        return in_shares(gradients, found.variables, places)

    def _held_gradients(self, variables, terms) -> list[list[tf.Variable]]:
        """What the terms of each weight are added to."""
        known, self._held = self._held, {}
        found = []
        for variable, own in zip(variables, terms, strict=True):
            _, held = known.get(id(variable), (None, []))
            held = held or self._made_for(variable, own)
            self._held[id(variable)] = (variable, held)
            found.append(held if own else [])
        return found

    def _made_for(self, variable, terms) -> list[tf.Variable]:
        """Where terms of a gradient are added up: that of a share on the device that has it."""
        is_whole, held = not self._in_shares, []
        devices = [self.device_of_sum(variable)] if is_whole else self.model.strategy.devices
        for term, device in zip(terms, devices, strict=False):
            # Of 16 bits, small terms would be lost in a large sum.
            dtype = tf.float32 if term.dtype.size == 2 else term.dtype
            with tf.init_scope(), tf.device(device):
                zeros = tf.zeros(variable.shape if is_whole else term.shape, dtype)
                held.append(ResourceVariable(zeros, trainable=False))
        return held

    def device_of_sum(self, variable: keras.Variable) -> str:
        """Where the gradients of a weight are added up, if they are whole."""
        return self.model.strategy.devices[0]

    def between_steps(self) -> AbstractContextManager:
        """Where an update is made outside of a step."""
        return self.model.strategy.program()

    @property
    def _noise(self) -> NoiseScale:
        if self._known_noise is None:
            self._known_noise = NoiseScale()
        return self._known_noise

    def _update_of_steps(self, *, is_full: bool) -> None:
        """Updates the weights with what is held, of all workers, and forgets it.

        Args:
            is_full: Whether it is of N steps.
        """
        pairs = list(self._held.values())
        found = [(variable, held) for variable, held in pairs if held]
        if not found:
            self.forget()
            return
        flat = [each for _, held in found for each in held]
        sums = [each.read_value() for each in flat]
        total = self._counts.divisor.read_value()
        if self.model._workers is not None and self.is_silent:
            sums, total = self.of_all_workers([variable for variable, _ in found], sums, total)
        if self._are_sums:
            total = tf.ones_like(total)
        means = []
        for each in sums:
            with tf.device(each.device):
                means.append(tf.math.divide_no_nan(each, tf.cast(total, each.dtype)))
        if self.sync.grows and is_full:
            self._noise.see(flat, means, self.model._workers if self._in_shares else None)
        remaining = iter(means)
        gradients = [self._gradient(variable, held, remaining) for variable, held in pairs]
        self.model.optimizer.apply_gradients(
            zip(gradients, [variable for variable, _ in pairs], strict=True)
        )
        self.forget()

    def _gradient(self, variable, held, means: Iterator[tf.Tensor]) -> Any:
        """What an optimizer takes: one that hands gradients on looks at whole ones."""
        own = list(itertools.islice(means, len(held)))
        if not own or not self._in_shares:
            return own[0] if own else None
        if not wrapped_by(self.model.optimizer):
            return ShardedGradient(own)
        return joined_rows([own], [variable], ReplicaPlaces(self.model.strategy))[0]

    def of_all_workers(self, variables, sums, divisor):
        """What the gradients of all workers' rows come to, and their divisors."""
        reducer = Reducer(None, self.model._workers)
        totals, (total,) = reducer.totals([[each] for each in sums], list, [divisor], variables)
        return totals, total

    def forget(self) -> None:
        """Drops the gradients that are held."""
        for held in itertools.chain(*(held for _, held in self._held.values())):
            held.assign(tf.zeros_like(held), read_value=False)
        self._counts.divisor.assign(0.0, read_value=False)
        self._counts.steps.assign(0.0, read_value=False)

    def finish(self) -> None:
        """Makes the update of what is left, as a last batch would be shorter."""
        super().finish()
        if float(self._counts.steps):
            with self.between_steps():
                self._update_of_steps(is_full=False)
        if self.sync.grows:
            self._grow_if_it_pays()

    def _grow_if_it_pays(self) -> None:
        noise = self._noise
        noise.forget_first()
        if noise.num_pairs < _LEAST_PAIRS:
            return
        ratio, steps = noise.ratio, self.num_steps
        if self.model._workers is not None:  # Where processors differ, so may the last digit.
            ratio = float(self.model._workers.broadcast([tf.constant(ratio, tf.float64)])[0])
        if ratio > 1:
            self._counts.wanted.assign(2.0 * steps)
            noise.restart()
            if self.model._is_chief:
                notice(
                    f"accumulate:auto: the gradient noise scale is {ratio:.3g} times the rows of "
                    f"an update; updates of {2 * steps} steps, in place of {steps}, from now on."
                )


def _with_inner(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else [optimizer, inner]


def _terms_of(gradient: Any) -> list:
    """What of a gradient is added up apart: its shares, or all of it."""
    if gradient is None:
        return []
    return list(gradient.terms) if isinstance(gradient, ShardedGradient) else [gradient]
