"""What extends any optimizer of Keras's: it updates units at places. The package has the drawing.

An optimizer that hands gradients on to others (a loss scale, a map from weights to optimizers) runs
once, and they update.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.extend import attach, extend, original_class
from tfparallel.newer_keras import ScheduleFreeAdamW
from tfparallel.update import files
from tfparallel.update.built import prepare_built, trained_by, wrapped_by
from tfparallel.update.clipping import clip_parts, clip_shares
from tfparallel.update.elementwise import check_elementwise
from tfparallel.update.pending import PendingSums
from tfparallel.update.places import Places
from tfparallel.update.shares import cut_out, cut_share, joined, mark, shape_shared_out
from tfparallel.variables.split import SplitVariable, cut, parts_of, whole_of

__all__ = ["UnitOptimizer", "prepare", "updates_alike"]


class UnitOptimizer:
    """Extends any optimizer; `prepare` does it."""

    _places = Places()
    _in_shares = False  # Whether each place keeps and updates its share.
    _share_of: dict[int, keras.Variable] = {}  # By the id of a weight, or of a part.
    _pending: PendingSums | None = None  # What a step has left to sum.
    _index = 0  # Of the place at hand.
    _updated: Sequence[keras.Variable] = ()  # The units that are updated there.
    _is_expanded = False  # Whether gradients come clipped, as those of shares.
    _loaded: list[np.ndarray] | None = None

    def build(self, variables):
        """Makes the slots of the units, a copy of each at each place."""
        if self.built:
            return
        places, weights = self._places, list(variables)
        places.check(weights)
        attach(self, _slots={}, _whole_lists={})
        parts = parts_of(weights)
        left_out = getattr(self, "_exclude_from_weight_decay", set())
        for weight in weights:
            if isinstance(weight, SplitVariable) and self._var_key(weight) in left_out:
                left_out.update(map(self._var_key, weight.parts))
        units = self._made_shares(parts, left_out) if self._in_shares else parts
        with places.make():
            super().build(units)
        if self._sums_late:
            for accumulator in self._accumulated_gradients:
                if accumulator is not None:
                    files.mark_sum(accumulator)
        places.copy([*units, *_own_variables(self)])
        if self._in_shares and original_class(self) is ScheduleFreeAdamW:
            with tf.init_scope(), places.all():
                self._at_each(lambda k: self._begin_as_weights(units, k))
        for inner in wrapped_by(self):  # Some are made only now.
            if not isinstance(inner, UnitOptimizer):
                _extend(inner, places, shares=False)

    def apply(self, grads, trainable_variables=None):
        """Applies gradients of all rows: of weights, or of parts of weights, in their order."""
        if _is_in_replica():  # Of a loop of the user's own, where TensorFlow updates.
            super().apply(grads, trainable_variables)
            return
        given = trained_by(self).values() if trainable_variables is None else trainable_variables
        grads, weights = list(grads), list(given)
        parts = parts_of(weights)
        if len(grads) not in (len(parts), len(weights)) or not grads:
            super().apply(grads, trainable_variables)  # Which says so.
            return
        if len(grads) != len(parts):  # Of a loop of the user's own.
            grads = _cut_into_parts(grads, weights)
        if not self.built:
            self.build(weights)
        if wrapped_by(self):
            with self._places.all():
                super().apply(grads, parts)
        else:
            self._apply_at_places(grads, parts)

    @tf.autograph.experimental.do_not_convert  # As within Keras's own.
    def _apply_at_places(self, grads, parts):
        self._places.copy(parts)  # One that was made since.
        units = [self._share_of.get(id(part), part) for part in parts]
        changed = [part for part, g in zip(parts, grads, strict=True) if g is not None]
        with self._places.all():
            if self._in_shares:
                # A moving average is of all weights, also of those that others write.
                self._fill(self._shared if self.use_ema else changed)
            expanded = self._expanded(grads, parts, units)
            self._at_each(
                lambda k: super(UnitOptimizer, self).apply(expanded[k], units),
                alike=self._in_shares or (updates_alike(self) and self._agree_on(grads)),
                written=units,
            )
            attach(self, _is_expanded=False)
            if self._in_shares:
                self._join(self._shared if self.ema_overwrite_frequency else changed)
            self._at_each(lambda k: self._constrain(changed))

    def _at_each(self, update, *, alike: bool = True, written: Sequence = ()) -> None:
        """Calls a function of the index at each place; or at the first, which then sends."""
        places = self._places
        for index in range(len(places) if alike else 1):
            with places.at(index):
                attach(self, _index=index)
                update(index)
        attach(self, _index=0)
        if not alike:
            for variable in (*written, *_own_variables(self)):
                first, *others = places.copies(variable)
                for other in others:
                    with tf.device(other.device):
                        other.assign(first)

    def _agree_on(self, grads) -> bool:
        return len(self._places) == 1 or not self._places.may_differ(grads)

    def _expanded(self, grads, parts, units) -> list[list[Any]]:
        """At each place the gradients of its units."""
        places, indices = self._places, range(len(self._places))
        if self._sums_late:
            return self._accumulated(grads, parts)
        if self._pending:
            return self._summed_in_shares(grads, parts, units)
        if len(indices) == 1:
            return [grads]
        expanded = []
        for index in indices:
            with places.at(index):
                pairs = zip(grads, parts, strict=True)
                expanded.append([places.gradient(g, part, index) for g, part in pairs])
        return expanded

    # Terms of gradients that several steps add up, and that are summed at an update alone.

    @property
    def _sums_late(self) -> bool:
        """Whether each place accumulates terms of its own, and an update sums them."""
        places = self._places
        return bool(self.gradient_accumulation_steps and places.sums_late and places.number > 1)

    def pending_sums(self) -> PendingSums | None:
        """Where a step may leave terms of gradients for this optimizer to sum; None if nowhere.

        Not where it hands them on, to a loss scale that must see whether they are finite; nor what
        compression knows by the weight, or is divided by a scale.
        """
        workers = self._places.workers
        sums_shares = self._in_shares and workers is not None and workers.compression is None
        takes = self._sums_late or (sums_shares and self.loss_scale_factor is None)
        return self._pending if takes and not wrapped_by(self) else None

    def forget_pending(self) -> None:
        """Forgets what a step has left that was not applied: of a trace that failed."""
        self._pending.clear()

    def _accumulated(self, grads, parts):
        """What Keras accumulates at each place: a term; at an update nothing but what is there.

        That is then the sum of all terms that were accumulated anywhere.
        """
        places = self._places
        is_update = (self._iterations + 1) % self.gradient_accumulation_steps == 0
        is_first = places.workers is None or places.workers.worker_index == 0
        known = [(i, part) for i, part in enumerate(parts) if grads[i] is not None]
        # What the program itself differentiated, a regularizer say, is whole on every worker.
        terms = [self._terms(part, grads[i], is_first) for i, part in known]
        held = [self._accumulated_gradients[self._get_variable_index(part)] for _, part in known]
        copies = [[*places.copies(accumulator)] for accumulator in held]

        def sum_all():
            sums = []
            for own, accumulators in zip(terms, copies, strict=True):
                sums.append([])
                for term, accumulator in zip(own, accumulators, strict=True):
                    with tf.device(accumulator.device):
                        sums[-1].append(term + accumulator)
            reducer = Reducer(places.all_reduce_ops, places.workers)
            totals, _ = reducer.totals(sums, list, variables=[part for _, part in known])
            for index in range(len(places)):
                with places.at(index):
                    for total, accumulators in zip(totals, copies, strict=True):
                        accumulator = accumulators[index]
                        accumulator.assign(places.gradient(total, accumulator, index))

        tf.cond(is_update, sum_all, lambda: None)
        expanded = []
        for index in range(len(places)):
            own: list[Any] = [None] * len(grads)
            with places.at(index):
                for (i, _), of_all in zip(known, terms, strict=True):
                    own[i] = tf.where(is_update, tf.zeros_like(of_all[index]), of_all[index])
            expanded.append(own)
        return expanded

    def _terms(self, part, gradient, is_first) -> list[tf.Tensor]:
        """At each place a term of the gradient of a weight, all of which make up the whole."""
        terms = self._pending.take(part, gradient if is_first else None)
        if terms is not None:
            return terms
        whole = tf.convert_to_tensor(gradient)
        zeros = tf.zeros_like(whole)
        return [whole if is_first else zeros, *[zeros] * (len(self._places) - 1)]

    # Each place keeps and updates its share.

    def _made_shares(self, parts, left_out) -> list[keras.Variable]:
        written = [p.path for p in parts if getattr(p, "overwrite_with_gradient", False)]
        if written:
            raise ValueError(
                "Under shard_optimizer=True weights are updated by the optimizer. Received: "
                f"{written}, which take their gradient for their value. Leave shard_optimizer out."
            )
        places, shares = self._places, []
        for part in parts:
            number, *rest = shape_shared_out(part.shape, places.number)
            shape = (-(-number // places.number), *rest)
            with places.make(), places.beside(part):
                share = keras.Variable("zeros", shape, part.dtype, trainable=True, name=part.name)
            share._path = part.path  # Slots are named by it.
            mark(share, part)
            shares.append(share)
            if self._var_key(part) in left_out:
                left_out.add(self._var_key(share))
        places.copy(shares)
        by_id = {id(part): share for part, share in zip(parts, shares, strict=True)}
        attach(self, _share_of=by_id, _shared=parts)
        with tf.init_scope(), places.all():
            self._fill(parts)
        return shares

    def _begin_as_weights(self, shares, index) -> None:
        for slot, share in zip(self._momentums, shares, strict=True):
            self._places.copies(slot)[index].assign(self._places.copies(share)[index])

    def _summed_in_shares(self, grads, parts, units):
        """At each place its shares of gradients that no worker has the whole of, clipped."""
        places, number = self._places, self._places.number
        workers, (start, _), (_, end) = places.workers, places.bounds(1)[0], places.bounds(1)[-1]

        def rows_here(gradient, unit):  # Of one that is whole on every worker.
            shape = shape_shared_out(unit._sharded.shape, number)
            return cut_out(
                tf.convert_to_tensor(gradient), shape, start * unit.shape[0], end * unit.shape[0]
            )

        pending, wholes = [], []
        for i, (part, unit) in enumerate(zip(parts, units, strict=True)):
            terms = self._pending.take(part, None)
            if terms is not None:
                shape = shape_shared_out(part.shape, number)
                pending.append(i)
                wholes.append([cut_out(term, shape, 0, number * unit.shape[0]) for term in terms])
        self._pending.clear()
        here, _ = Reducer(places.all_reduce_ops, None).totals(wholes, list)
        sums = workers.reduce_scatter(here)
        pairs = zip(pending, sums, strict=True)
        sums = [total + rows_here(grads[i], units[i]) for i, total in pairs]
        others = [i for i in range(len(grads)) if i not in pending and grads[i] is not None]
        sums, clipped = clip_shares(self, sums, [grads[i] for i in others], workers)
        expanded: list[list[Any]] = [[None] * len(grads) for _ in range(len(places))]
        for i, total in zip(pending, sums, strict=True):
            for index, share in enumerate(tf.split(total, len(places))):
                expanded[index][i] = share
        for i, gradient in zip(others, clipped, strict=True):
            for index in range(len(places)):
                with places.at(index):
                    own = places.gradient(gradient, parts[i], index)
                    expanded[index][i] = self._cut(own, units[i], index)
        attach(self, _is_expanded=True)
        return expanded

    def _cut(self, gradient, share, index):
        """What the share of a place has of a gradient."""
        shape = shape_shared_out(share._sharded.shape, self._places.number)
        return cut_share(gradient, shape, self._places.bounds(share.shape[0])[index])

    def _fill(self, parts) -> None:
        """Gives each share what the copy of the weight at its place holds."""
        places = self._places
        for index in range(len(places)):
            with places.at(index):
                for part in parts:
                    share = self._share_of[id(part)]
                    own, whole = places.copies(share)[index], places.copies(part)[index]
                    with tf.device(own.device):
                        own.assign(self._cut(tf.convert_to_tensor(whole), share, index))

    def _join(self, parts) -> None:
        """Gives every copy of the weights what all shares hold."""
        places = self._places
        wholes = joined([self._share_of[id(part)] for part in parts], places)
        for index in range(len(places)):
            with places.at(index):
                for part, whole in zip(parts, wholes, strict=True):
                    copy = places.copies(part)[index]
                    with tf.device(copy.device):
                        copy.assign(whole)

    def _constrain(self, parts) -> None:
        """Constrains weights as a whole that Keras saw parts or shares of."""
        wholes = {id(whole_of(part)): whole_of(part) for part in parts}
        for whole in wholes.values():
            is_seen = not self._in_shares and not isinstance(whole, SplitVariable)
            if not is_seen and whole.constraint is not None:
                whole.assign(whole.constraint(whole))

    # What Keras calls at a place.

    def _backend_apply_gradients(self, grads, trainable_variables):
        attach(self, _updated=trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads):
        if _is_in_replica():
            return super()._clip_gradients(grads)
        if self._is_expanded:
            return grads
        parts = [getattr(unit, "_sharded", unit) for unit in self._updated]
        if self.clipnorm and any(whole_of(part) is not part for part in parts):
            clipped = clip_parts(self, grads, parts)
        else:
            clipped = super()._clip_gradients(grads)
        if not self._in_shares:
            return clipped
        pairs = zip(clipped, self._updated, strict=True)
        return [self._cut(gradient, share, self._index) for gradient, share in pairs]

    def _all_reduce_sum_gradients(self, grads_and_vars):
        if _is_in_replica():
            return super()._all_reduce_sum_gradients(grads_and_vars)
        # They are summed, and Keras's sum would have each update wait for all gradients. In the
        # order in which the backward pass finds them: last layer first.
        return [pair for pair in grads_and_vars[::-1] if pair[0] is not None]

    def update_step(self, gradient, variable, learning_rate):
        """Updates one unit, where it is."""
        held = variable.value if isinstance(variable, keras.Variable) else variable
        with self._places.updating(gradient, held):
            return super().update_step(gradient, variable, learning_rate)

    def _tf_apply(self, grads, trainable_variables=None):
        # Of `LossScaleOptimizer`, which insists on a replica.
        if _is_in_replica():
            super()._tf_apply(grads, trainable_variables)
        else:
            self._common_apply(grads, trainable_variables=trainable_variables)

    def _var_key(self, variable):
        return super()._var_key(self._places.known_as(variable))

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        """Makes a slot beside its unit; one of a part or of a share knows of which weight."""
        with self._places.beside(reference_variable):
            slot = super().add_variable_from_reference(reference_variable, name, initializer)
        files.mark_slot(slot, reference_variable, name, self._slots)
        return slot

    def finalize_variable_values(self, var_list):
        """Overwrites the weights with their averages, where there are some."""
        parts = parts_of(var_list)
        if wrapped_by(self) or not self.use_ema:
            super().finalize_variable_values(parts)
            return
        units = [self._share_of.get(id(part), part) for part in parts]
        finalize = super().finalize_variable_values
        with self._places.all():
            if self._in_shares:
                self._fill(parts)
            self._at_each(lambda k: finalize(units))
            if self._in_shares:
                self._join(parts)

    # What files and users see.

    @property
    def variables(self):
        """The variables of the optimizer, as they are on one device; `update/files.py` says how."""
        return files.shown(super().variables)

    def save_own_variables(self, store):
        """Saves the optimizer as on one device; with shares or sums every worker must call it.

        Raises:
            RuntimeError: If with shares not all workers have within two minutes.
        """
        if any(hasattr(variable, "_sharded") for variable in super().variables):
            files.wait_to_save(self._places)
        for index, value in enumerate(files.values(super().variables, self._places)):
            store[str(index)] = value

    def load_own_variables(self, store):
        """Loads the optimizer; each place takes its share.

        What one worker has loaded is all of it: it can be sent to the others by `loaded_values`.
        """
        if len(store.keys()) != len(self.variables):
            super().load_own_variables(store)  # Which says what is missing.
            return
        given = [np.asarray(store[str(index)]) for index in range(len(store.keys()))]
        if self._places.workers is not None:
            attach(self, _loaded=given)
        files.assign(super().variables, given, self._places)

    def loaded_values(self) -> list[np.ndarray] | None:
        """Returns what was loaded last, and forgets it; None if nothing was since."""
        loaded = self._loaded
        attach(self, _loaded=None)
        return loaded

    def set_weights(self, weights):
        """Assigns values to all variables, as they are on one device."""
        if self.built:
            self.load_own_variables({str(i): value for i, value in enumerate(weights)})
        else:
            super().set_weights(weights)  # Which says so.

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        """What `tf.train.Checkpoint` writes: wholes, as on one device and on any other number."""
        children = dict(super()._trackable_children(save_type, **kwargs))
        held = vars(self).setdefault("_whole_lists", {})
        return children | files.trackable_lists(self, children, held)


def prepare(
    optimizer: keras.Optimizer, places: Places, *, shares: bool = False, parts: bool = False
) -> None:
    """Makes a Keras optimizer update at places, in place.

    Args:
        optimizer: Any Keras optimizer. The slots of one that was built elsewhere are made again,
            with their values.
        places: The places.
        shares: Whether each place keeps and updates its share of the slots.
        parts: Whether weights may lie in parts.

    Raises:
        PlacementError: With parts, if the update looks at more than one element at a time.
        ValueError: With shares, likewise; or if the optimizer accumulates gradients.
    """
    if parts or shares:
        check_elementwise(optimizer, shares=shares)
    if _is_prepared(optimizer, places, shares):
        _extend(optimizer, places, shares)
        return
    with tf.init_scope():
        prepare_built(optimizer, lambda: _extend(optimizer, places, shares))


def _is_prepared(optimizer, places, shares) -> bool:
    """Whether what an optimizer has made, and those that it hands on to, is where it would be."""
    inner = wrapped_by(optimizer)
    if not all(_is_prepared(each, places, shares) for each in inner):
        return False
    if not optimizer.built:
        return True
    if isinstance(optimizer, UnitOptimizer):
        return optimizer._places == places and optimizer._in_shares == (shares and not inner)
    apart = {id(optimizer._iterations), id(optimizer._learning_rate)}
    return not shares and places.hold([v for v in optimizer._variables if id(v) not in apart])


def _extend(optimizer, places, shares) -> None:
    inner = wrapped_by(optimizer)
    if not isinstance(optimizer, UnitOptimizer):
        pending = PendingSums(takes_sparse=not shares)
        extend(optimizer, UnitOptimizer, _pending=pending, _slots={})
    attach(optimizer, _places=places, _in_shares=shares and not inner)
    if places.strategy is not None:
        object.__setattr__(optimizer, "_distribution_strategy", places.strategy)
    if optimizer.built:
        places.copy(_own_variables(optimizer))
    for each in inner:
        _extend(each, places, shares)


def _own_variables(optimizer) -> list[keras.Variable]:
    """The variables of an optimizer, without the model's."""
    trained = {id(variable) for variable in getattr(optimizer, "_trainable_variables", ())}
    return [variable for variable in optimizer._variables if id(variable) not in trained]


def updates_alike(optimizer) -> bool:
    """Whether an update is known to give the same each time, of the same variables.

    An optimizer or a schedule of the user's own may draw, or keep a state that nobody knows of.
    """
    own = [original_class(optimizer), type(optimizer._learning_rate)]
    return all(cls.__module__.startswith("keras.") for cls in own)


def _cut_into_parts(gradients, weights) -> list[Any]:
    return [
        part
        for gradient, weight in zip(gradients, weights, strict=True)
        for part in (cut(gradient, weight) if isinstance(weight, SplitVariable) else [gradient])
    ]


def _is_in_replica() -> bool:
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
