"""Extends any Keras optimizer to update units at places; the package docstring has the drawing.

An optimizer that wraps others (a loss scale, a map from weights to optimizers) runs once, and the
wrapped ones update.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.extend import attach, attached, extend, original_class
from tfparallel.keras_compat import ScheduleFreeAdamW
from tfparallel.seams.optimizers import (
    accumulators_of,
    apply_in_replica,
    check_known,
    count_of,
    leaves_out,
    momentums_of,
    rate_of,
    set_decay,
    weights_of,
)
from tfparallel.update import whole_slots
from tfparallel.update.built_optimizers import own_variables, trained_by, wrapped_by
from tfparallel.update.clipping import clip_parts, clip_shares
from tfparallel.update.constraints import apply_constraints
from tfparallel.update.optimizer_kinds import is_keras_class, is_keras_object, updates_alike
from tfparallel.update.pending_sums import PendingSums
from tfparallel.update.places import Places
from tfparallel.update.shares import Shares
from tfparallel.variables.mesh_replica import is_in_replica
from tfparallel.variables.split import cut_all, parts_of, whole_of


class UnitOptimizer:
    """Extends any optimizer, by `prepare` (`place_optimizer.py`)."""

    _places = Places()
    _in_shares = False  # Whether each place keeps and updates its share.
    _shares: Shares | None = None
    _pending: PendingSums | None = None  # Terms of gradients that a step left to sum.
    _index = 0  # The place that is being updated.
    _updated: Sequence[keras.Variable] = ()  # The units that are updated there.
    _factors: dict[int, tf.Tensor] | None = None  # The clipping factors of the shares' gradients.
    _rate: Any = None  # The learning rate of all places, if they must not compute their own.
    _loaded: list[np.ndarray] | None = None
    _units: Sequence[tuple] = ()  # Pairs of a part of a weight and the unit that is updated.

    def build(self, variables):
        """Creates the slots of the units, with a copy at each place."""
        if self.built:
            return
        places, weights = self._places, list(variables)
        places.before_build(weights)
        parts = parts_of(weights)
        shares = Shares(parts, places) if self._in_shares else None
        units = parts if shares is None else shares.variables
        pairs = tuple(zip(parts, units, strict=True))
        attach(self, _slots={}, _whole_lists={}, _shares=shares, _units=pairs)
        self._leave_out_units()
        with places.make():
            super().build(units)
        self._mark_sums(whole_slots.mark_sum)
        places.copy([*units, *own_variables(self)])
        if self._in_shares and original_class(self) is ScheduleFreeAdamW:
            with tf.init_scope(), places.all():
                self._at_each(lambda _: self._begin_as_weights(), [None] * len(places))
        for inner in wrapped_by(self):  # `MultiOptimizer` may have created some in `build`.
            if not isinstance(inner, UnitOptimizer):
                extend_for(inner, places, shares=False)

    def exclude_from_weight_decay(self, *args, **kwargs):
        """Excludes variables from weight decay, even after the slots were created."""
        super().exclude_from_weight_decay(*args, **kwargs)
        self._leave_out_units()

    def _leave_out_units(self) -> None:
        """Excludes the units of excluded weights, too."""
        for part, unit in self._units:
            whole = whole_of(part)
            if unit is not whole:
                set_decay(self, unit, not (leaves_out(self, whole) or leaves_out(self, part)))

    def apply(self, grads, trainable_variables=None):
        """Applies gradients over all rows, for weights or for parts of weights, in order."""
        if is_in_replica():  # In a custom loop, TensorFlow updates the copies.
            super().apply(grads, trainable_variables)
            return
        weights = trained_by(self).values() if trainable_variables is None else trainable_variables
        grads, weights = list(grads), list(weights)
        parts = parts_of(weights)
        if len(grads) not in (len(parts), len(weights)) or not grads:
            super().apply(grads, trainable_variables)  # Keras raises the error.
            return
        if len(grads) != len(parts):  # A custom loop has gradients of whole weights.
            grads = cut_all(grads, weights)
        if not self.built:
            self.build(weights)
        if wrapped_by(self):
            with self._places.all():
                super().apply(grads, parts)
        else:
            self._apply_at_places(grads, parts)

    @tf.autograph.experimental.do_not_convert  # Keras's own methods are not, either.
    def _apply_at_places(self, grads, parts):
        units = self._units_of(parts)
        check_known(self, units)
        self._places.copy(parts)  # For weights that were created after the optimizer was built.
        changed = [part for part, g in zip(parts, grads, strict=True) if g is not None]
        with self._places.all():
            if self._in_shares:
                # Moving averages cover all weights, even those written by other code.
                self._shares.fill(self._shares.parts if self.use_ema else changed)
            alike = self._in_shares or (self._updates_alike and self._agree_on(grads))
            is_update, factors = self._is_update, None
            if self._in_shares:
                expanded, factors = self._shares.expanded(grads, parts, self._pending, self)
            else:
                expanded = self._expanded(grads, parts, len(self._places) if alike else 1)
            with attached(self, _rate=self._rate_of_all(), _factors=factors):
                self._at_each(
                    lambda grads_at_place: super(UnitOptimizer, self).apply(grads_at_place, units),
                    expanded,
                    alike=alike,
                    written=(*units, *own_variables(self)),
                )
            if self._in_shares:
                is_averaged = self.ema_overwrite_frequency
                joined = self._shares.parts if is_averaged else changed
                self._shares.join(joined, True if is_averaged else is_update)
            apply_constraints(
                changed, self._at_each, in_shares=self._in_shares, num_places=len(self._places)
            )

    def _at_each(self, update, arguments: Sequence, *, alike: bool = True, written: Sequence = ()):
        """Runs an update at each place.

        Args:
            update: The function.
            arguments: Its argument at each place.
            alike: Whether the result is the same at all places; else only the first place runs it,
                and sends the `written` variables.
            written: The variables that the update writes.
        """
        places = self._places

        def at_one(index, argument):
            attach(self, _index=index)
            update(argument)

        if self._in_shares:
            for index, argument in enumerate(arguments):  # A different share at each place.
                with places.at(index):
                    at_one(index, argument)
        else:
            places.each(at_one, arguments if alike else arguments[:1])
        attach(self, _index=0)
        if not alike:
            for variable in written:
                first, *others = places.copies(variable)
                for other in others:
                    with tf.device(other.device):
                        other.assign(first)

    def _agree_on(self, grads) -> bool:
        return len(self._places) == 1 or not self._places.may_differ(grads)

    def _expanded(self, grads, parts, number: int) -> list[list[Any]]:
        """The gradients of the units at each of the first places."""
        places = self._places
        if self._sums_late:
            sums, scale = accumulators_of(self, parts), self.loss_scale_factor
            return self._pending.accumulated(grads, parts, sums, self._is_update, scale, places)
        if number == 1:
            return [grads]
        expanded = []
        for index in range(number):
            with places.at(index):
                pairs = zip(grads, parts, strict=True)
                expanded.append([places.gradient(g, part, index) for g, part in pairs])
        return expanded

    @property
    def _is_update(self) -> tf.Tensor | bool:
        """Whether Keras updates in this call instead of only accumulating."""
        steps = self.gradient_accumulation_steps
        return (count_of(self) + 1) % steps == 0 if steps else True

    @property
    def _sums_late(self) -> bool:
        """Whether each place accumulates its own terms, and an update sums them."""
        places = self._places
        is_asked = self.gradient_accumulation_steps and places.sums_late and places.number > 1
        return bool(is_asked and not self._in_shares and self._updates_alike)

    @property
    def _updates_alike(self) -> bool:
        """Whether the update is known to give the same result at all places."""
        units = weights_of(self)
        return updates_alike(self) and all(is_keras_object(unit.constraint) for unit in units)

    def _mark_sums(self, mark) -> None:
        if self.gradient_accumulation_steps and not wrapped_by(self):
            for accumulator in accumulators_of(self):
                if accumulator is not None:
                    mark(accumulator, self._places if self._sums_late else None)

    def _rate_of_all(self):
        """The learning rate, if it is given, or shares could compute different ones; else None."""
        if self._rate is not None:
            return self._rate
        is_own = self._in_shares and not is_keras_object(rate_of(self))
        return self._get_current_learning_rate() if is_own else None

    def _get_current_learning_rate(self):
        return super()._get_current_learning_rate() if self._rate is None else self._rate

    def pending_sums(self) -> PendingSums | None:
        """Where a step may leave terms of gradients for this optimizer to sum; None if nowhere.

        A wrapping optimizer needs whole gradients: a loss scale checks whether they are finite.
        Gradients that are compressed, weight by weight, must also be whole.
        """
        workers = self._places.workers
        sums_shares = self._in_shares and workers is not None and workers.compression is None
        takes = self._sums_late or sums_shares
        return self._pending if takes and self.built and not wrapped_by(self) else None

    def forget_pending(self) -> None:
        """Clears terms that were never applied, because the trace of their step failed."""
        self._pending.clear()

    def _units_of(self, parts) -> list[keras.Variable]:
        return parts if self._shares is None else list(map(self._shares.of, parts))

    def _begin_as_weights(self) -> None:
        index = self._index
        for slot, share in zip(momentums_of(self), self._shares.variables, strict=True):
            self._places.copies(slot)[index].assign(self._places.copies(share)[index])

    # Called by Keras, at a place.

    def _backend_apply_gradients(self, grads, trainable_variables):
        attach(self, _updated=trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads):
        if is_in_replica():
            return super()._clip_gradients(grads)
        if self._factors is not None:
            return clip_shares(self, grads, [self._factors[id(unit)] for unit in self._updated])
        if self.clipnorm and any(whole_of(unit) is not unit for unit in self._updated):
            return clip_parts(self, grads, self._updated)
        return super()._clip_gradients(grads)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        if is_in_replica():
            return super()._all_reduce_sum_gradients(grads_and_vars)
        # They are already summed, and Keras's sum would make each update wait for all gradients.
        # The backward pass computes the last layer first; but a user's own update may count.
        ordered = grads_and_vars
        if is_keras_class(original_class(self)):
            ordered = ordered[::-1]
        return [pair for pair in ordered if pair[0] is not None]

    def update_step(self, gradient, variable, learning_rate):
        """Updates one unit on its device."""
        storage = variable.value if isinstance(variable, keras.Variable) else variable
        with self._places.updating(gradient, storage):
            return super().update_step(gradient, variable, learning_rate)

    def _tf_apply(self, grads, trainable_variables=None):
        # `LossScaleOptimizer` calls this. Keras's own method requires a replica.
        if is_in_replica():
            super()._tf_apply(grads, trainable_variables)
        else:
            apply_in_replica(self, grads, trainable_variables)

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        """Creates a slot beside its unit, and marks the slot of a part or share with its weight."""
        with self._places.beside(reference_variable):
            slot = super().add_variable_from_reference(reference_variable, name, initializer)
        whole_slots.mark_slot(slot, reference_variable, name, self._slots)
        return slot

    def finalize_variable_values(self, var_list):
        """Overwrites the weights with their averages, if there are any."""
        parts = parts_of(var_list)
        if wrapped_by(self) or not self.use_ema:
            super().finalize_variable_values(parts)
            return
        units = self._units_of(parts)
        finalize = super().finalize_variable_values
        with self._places.all():
            if self._in_shares:
                self._shares.fill(parts)
            self._at_each(lambda _: finalize(units), [None] * len(self._places))
            if self._in_shares:
                self._shares.join(parts)

    # The view of files and users.

    @property
    def variables(self):
        """The variables of the optimizer, as on one device (`update/whole_slots.py`)."""
        return whole_slots.shown(self._held_variables)

    @property
    def _held_variables(self) -> list[keras.Variable]:
        """The variables, with separate parts and shares, including those of inner optimizers."""
        units = {}
        for inner in wrapped_by(self):
            if isinstance(inner, UnitOptimizer):
                for group in whole_slots.grouped(inner._held_variables):
                    units[id(whole_slots.shown(group)[0])] = group
        return [unit for each in super().variables for unit in units.get(id(each), [each])]

    def save_own_variables(self, store):
        """Saves the optimizer as on one device; with shares or sums, every worker must call it.

        Raises:
            RuntimeError: If every worker must call it, and not all do within two minutes.
        """
        if self._places.workers is not None and whole_slots.holds_pieces(self):
            whole_slots.wait_to_save(self._places.workers, "optimizer")
        for index, group in enumerate(whole_slots.grouped(self._held_variables)):
            store[str(index)] = whole_slots.value(group, self._places)

    def in_pieces(self) -> dict[int, tuple[list[keras.Variable], Places]]:
        """The arguments of functions in `whole_slots`, by the `id` of each of `variables`."""
        groups = whole_slots.grouped(self._held_variables)
        return {id(whole_slots.shown(group)[0]): (group, self._places) for group in groups}

    def load_own_variables(self, store):
        """Loads the optimizer; each place takes its share.

        One worker loads the whole state, and `loaded_values` returns it for the others.
        """
        if len(store.keys()) != len(self.variables):
            super().load_own_variables(store)  # Keras reports what is missing.
            return
        values = [np.asarray(store[str(index)]) for index in range(len(store.keys()))]
        if self._places.workers is not None and whole_slots.holds_pieces(self):
            attach(self, _loaded=values)
        whole_slots.assign_all(self._held_variables, values, self._places)

    def loaded_values(self) -> list[np.ndarray] | None:
        """Returns the last loaded values once; None if there are none."""
        loaded = self._loaded
        attach(self, _loaded=None)
        return loaded

    def set_weights(self, weights):
        """Assigns values to all variables, as on one device.

        Raises:
            ValueError: If the number or the shapes of the values differ.
        """
        variables, weights = [getattr(v, "_shown", v) for v in self.variables], list(weights)
        if not self.built:
            super().set_weights(weights)  # Keras raises, since it is not built.
            return
        shapes = [[tuple(np.shape(each)) for each in group] for group in (variables, weights)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"Optimizer '{self.name}' has {len(variables)} variables of shapes {shapes[0]}. "
                f"A value for each is required. Received: {len(weights)} values of shapes "
                f"{shapes[1]}."
            )
        whole_slots.assign_all(self._held_variables, map(np.asarray, weights), self._places)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        """Lets `tf.train.Checkpoint` write whole variables, as on any number of devices."""
        children = dict(super()._trackable_children(save_type, **kwargs))
        lists = vars(self).setdefault("_whole_lists", {})
        return children | whole_slots.trackable_lists(self, children, lists)


def extend_for(optimizer: keras.Optimizer, places: Places, shares: bool) -> None:
    """Makes an optimizer, and those that it wraps, update at places; extends them in place."""
    inner = wrapped_by(optimizer)
    if not isinstance(optimizer, UnitOptimizer):
        extend(optimizer, UnitOptimizer, _pending=PendingSums(), _slots={})
    # Set each time: in a strategy's scope, an optimizer is extended before it is sharded.
    optimizer._pending.takes_sparse = not shares
    attach(optimizer, _places=places, _in_shares=shares and not inner)
    strategy = places.strategy or tf.distribute.get_strategy()
    object.__setattr__(optimizer, "_distribution_strategy", strategy)
    if optimizer.built:
        places.copy(own_variables(optimizer))
        optimizer._mark_sums(whole_slots.change_sum)
    for each in inner:
        extend_for(each, places, shares)
