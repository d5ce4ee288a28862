"""A layer or model whose call in a program is divided over the replicas."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfparallel.draws.replica_seeds import drawing_by_row
from tfparallel.extend import attach
from tfparallel.judge.check_rows import check_rows
from tfparallel.replication.replicated_call import ReplicatedCall
from tfparallel.seams.keras import clear_losses, compute_output_spec, in_stateless_scope
from tfparallel.tracing.trial_trace import traced_apart
from tfparallel.update.pending_sums import PendingSums


class ReplicatedLayer:
    """Extends a layer or model to divide its calls in a program over the replicas."""

    # The proofs of eager calls, by what reads the outputs, and by kind of arguments.
    _judged_eagerly: Mapping[tuple[Any, str], Any] = {}

    def __call__(self, *args, **kwargs):
        """Calls the layer; in a program, on all replicas."""
        if not self._is_called_by_program(args, kwargs):
            return super().__call__(*args, **kwargs)
        if not self.built:
            self._build_under_scope(args, kwargs)
        self._look_at_rows(self._call_of_layer, args, kwargs)
        return self._call_on_replicas(self._call_of_layer, args, kwargs)

    @property
    def _call_of_layer(self):
        """The layer's original `__call__`, unreplicated."""
        return super().__call__

    def _look_at_rows(self, call, args, kwargs, read_by=None):
        """Refuses a call that mixes examples.

        Args:
            call: The layer's original `__call__`, or one that returns what a loss reads.
            args: The arguments of the call.
            kwargs: Its keyword arguments.
            read_by: The compiled loss, if only the outputs that it or a metric reads are returned.
        """
        setting = getattr(self, "_check_rows", None)
        looks = self._strategy.check_rows if setting is None else setting
        looks = looks and self._strategy.place is None  # Apart, the step has already been judged.
        is_divided = self._strategy.num_replicas > 1
        if not looks or not (is_divided or getattr(self, "_accumulates", False)):
            return
        # Every trace is judged; an eager step would be judged in every call.
        kind = read_by, str(keras.tree.map_structure(_type_of, (args, kwargs)))
        proof = self._judged_eagerly.get(kind) if tf.executing_eagerly() else None
        if proof is None:
            workers = self._strategy.workers
            tells = is_divided and (workers is None or workers.worker_index == 0)
            check_rows(self, drawing_by_row(call), args, kwargs, shares=is_divided, tells=tells)
            proof = self._proof
        if tf.executing_eagerly():
            attach(self, _proof=proof, _judged_eagerly={**self._judged_eagerly, kind: proof})

    def _call_on_replicas(self, call, args, kwargs, **options):
        """Calls a function of this layer on each replica, and adds its losses to the layer."""
        partial = self._partial_gradients()
        replicated = ReplicatedCall(self, call, self._strategy, partial, **options)
        outputs, losses = replicated(args, kwargs)
        clear_losses(self)
        if losses:
            keras.Layer.add_loss(self, losses)  # A functional model refuses its own.
        return outputs

    def _is_called_by_program(self, args, kwargs) -> bool:
        strategy = getattr(self, "_strategy", None)
        return (
            strategy is not None
            and strategy.program_is_running
            and tf.distribute.in_cross_replica_context()
            and not in_stateless_scope()  # Keras infers shapes, or builds.
            and not any(
                isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((args, kwargs))
            )
        )

    def _build_under_scope(self, args, kwargs):
        # Inside the trace of a step a variable would be created outside the strategy.
        args, kwargs = keras.tree.map_structure(_symbolic, (args, kwargs))
        with tf.init_scope(), self._strategy.scope(), traced_apart():
            compute_output_spec(super().__call__, *args, **kwargs)

    def _partial_gradients(self) -> PendingSums | None:
        return None


def judge_anew(layer: keras.Layer) -> None:
    """Forgets which eager calls of a layer were judged, since it may have changed."""
    if isinstance(layer, ReplicatedLayer):
        attach(layer, _judged_eagerly={})


def _type_of(leaf):
    if not hasattr(leaf, "shape"):
        return leaf
    return type(leaf).__name__, len(leaf.shape), tuple(leaf.shape[1:]), leaf.dtype


def _symbolic(leaf):
    if not isinstance(leaf, tf.Tensor):
        return leaf
    return keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))
