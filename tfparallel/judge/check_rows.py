"""Raises an error, before the first step, if a call mixes examples."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.extend import attach, attached, extend, is_own, original_class
from tfparallel.judge.kept_attributes import refers_to
from tfparallel.judge.proof import Fault, Proof, prove
from tfparallel.judge.propagation import exchanged
from tfparallel.seams.compiled import compile_arguments
from tfparallel.seams.keras import layers_in
from tfparallel.user_log import notice

_READ_LATER = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")

# What Python raises when code reads the value of a tensor in a trace.
_OF_VALUES = (AttributeError, NotImplementedError, TypeError)

_SHOWN = 5


class ExchangedMoments:
    """Extends `keras.layers.BatchNormalization`: marks its moments as exchanged for the judge."""

    def _moments(self, inputs, mask):
        if self.synchronized:  # By Keras, in a replica; the judge runs outside of replicas.
            with attached(self, synchronized=False):
                return tuple(map(exchanged, super()._moments(inputs, mask)))
        return tuple(map(exchanged, super()._moments(inputs, mask)))


def exchange_moments(layer: keras.Layer) -> None:
    """Marks moments of the batch as known to each piece, for the judge."""
    keras_own = keras.layers.BatchNormalization._moments
    for part in layers_in(layer):
        if getattr(original_class(part), "_moments", None) is keras_own:
            extend(part, ExchangedMoments)


def check_rows(
    layer: keras.Layer,
    call: Callable,
    args: tuple,
    kwargs: dict,
    *,
    shares: bool = False,
    tells: bool = True,
) -> None:
    """Raises an error if a layer's call gives other results in pieces.

    Prints the layers that draw other random values than on one device, since their draws do not say
    which values belong to which row (`draws/row_draws.py`).

    Args:
        layer: The built layer, its inner layers extended.
        call: Its own `__call__`.
        args: The arguments; tensors are `(batch, …)`.
        kwargs: The keyword arguments; tensors are `(batch, …)`.
        shares: Whether several pieces share the layer's attributes.
        tells: Whether this process prints for the job.

    Raises:
        ValueError: Names the layer at fault, and how to fix it.
    """
    reason = why_not_in_pieces(layer, call, args, kwargs)
    if reason is None and (shares or tf.executing_eagerly()):
        reason = why_not_shared(layer)
    if reason is None:
        reason = why_not_called_again(layer)
    if reason is not None:
        forget_steps(layer)
        raise ValueError(reason)
    drawing = layer._proof.drawing
    if drawing and tells:
        named = [f"{each.name} ({original_class(each).__name__})" for each in drawing]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        notice(
            "These layers produce different random values than on one device: "
            f"{', '.join(named[:_SHOWN])}{more}. The same seed gives the same run. All other "
            "layers produce the same values as on one device.",
            once=True,
        )


def why_not_in_pieces(layer: keras.Layer, call: Callable, args: tuple, kwargs: dict) -> str | None:
    """Returns why a layer gives other results in pieces.

    Args:
        layer: The built layer, its inner layers extended.
        call: Its own `__call__`.
        args: The arguments; tensors are `(batch, …)`.
        kwargs: The keyword arguments; tensors are `(batch, …)`.

    Returns:
        An error's text, with how to fix it; None if the results are equal.
    """
    try:
        proof = prove(layer, call, args, kwargs)
    except Exception as error:
        if _declares_its_rows(layer):
            return _refusal(layer, layer, f"it fails for another number of rows: {error}")
        if tf.executing_eagerly() and isinstance(error, _OF_VALUES):
            raise ValueError(
                "Examples must be computed independently. This is proved on a trace of the call, "
                "in which tensors have no values. A call without Python code that reads values is "
                f"required. Received: model '{layer.name}' with run_eagerly=True; "
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}. Use tensor "
                "operations instead of `.numpy()`, `float(…)` and `if`. To train without the "
                "proof, pass `check_rows=False`."
            ) from error
        raise  # As the step would, which is traced in the same way.
    attach(layer, _proof=proof)
    return None if proof.fault is None else refusal_of(layer, proof.fault)


def why_not_shared(layer: keras.Layer) -> str | None:
    """Returns which tensor one replica would read from another; call after `why_not_in_pieces`.

    Replicas share Python objects. If a layer keeps a tensor in an attribute, a method that runs
    after all replicas reads that of one replica; in an eager step, where each replica runs the
    method, this also happens after an exchange between them.
    """
    proof: Proof | None = getattr(layer, "_proof", None)
    if proof is None or not proof.stored:
        return None
    part, name = proof.stored[0]
    is_part = not (isinstance(layer, keras.Model) and layer.compiled)
    if is_part or any(is_own(layer, method) for method in _READ_LATER):
        where = "may be read by one of the model's own methods"
    elif tf.executing_eagerly() and proof.exchanges:
        where = "may be read after a batch normalization in an eager step"
    elif any(refers_to(each, [layer, part]) for each in _compiled_with(layer)):
        where = "may be read by a loss or a metric"
    else:
        return None
    return (
        "Replicas share a layer's attributes. A call must return any tensor that is read later. "
        f"Received: layer '{part.name}' of class {original_class(part).__name__} stores a tensor "
        f"in `self.{name}`, which {where}, possibly in another replica. Return the tensor, and "
        "pass it on as an argument."
    )


def _compiled_with(model: keras.Model) -> list:
    """Returns the losses and metrics that a model was compiled with."""
    arguments = compile_arguments(model) or {}
    names = ("loss", "metrics", "weighted_metrics")
    return keras.tree.flatten([arguments.get(name) for name in names])


def why_not_called_again(layer: keras.Layer) -> str | None:
    """Returns which attribute counts a layer's calls; call after `why_not_in_pieces`."""
    proof: Proof | None = getattr(layer, "_proof", None)
    if proof is None or not proof.counted:
        return None
    part, name = proof.counted[0]
    return (
        "A layer is called once per piece of the batch, more often than on one device. A call must "
        f"not change the layer's attributes. Received: layer '{part.name}' of class "
        f"{original_class(part).__name__} changes `self.{name}` in each call. Count in a variable "
        "(`add_weight`), or train with `tfparallel.model_parallel`."
    )


def rows_per_example(layer: keras.Layer) -> list | None:
    """Returns how many rows each output of a layer is proved to have for each example.

    An int; a `Size`, which is the same in all pieces; or None if it is unknown. None without proof.
    """
    proof: Proof | None = getattr(layer, "_proof", None)
    return None if proof is None or proof.fault is not None else proof.rows_per_example


def has_rows(layer: keras.Layer) -> bool:
    """Returns whether each output of a layer is proved to have one row for each example."""
    numbers = rows_per_example(layer)
    return numbers is not None and all(number == 1 for number in numbers)


def keeps_number_of_rows(layer: keras.Layer) -> bool:
    """Returns whether Python knows the number of rows of each output if it knows the inputs'."""
    return rows_per_example(layer) is not None and layer._proof.keeps_number


def proof_in_words(layer: keras.Layer) -> str | None:
    """Returns the proof of the last judged call of a layer; None if there is none."""
    proof: Proof | None = getattr(layer, "_proof", None)
    return None if proof is None else str(proof)


def refusal_of(layer: keras.Layer, fault: Fault) -> str:
    """Returns the text of an error for a fault in a layer or model."""
    return _refusal(layer, fault.layer, str(fault))


def _declares_its_rows(layer) -> bool:
    """Returns whether a model declares its number of rows."""
    return any(tensor.shape[0] is not None for tensor in getattr(layer, "inputs", None) or ())


def _refusal(layer: keras.Layer, at_fault: keras.Layer, why: str) -> str:
    return (
        "A layer mixes examples, so the batch cannot be divided. The result for each example must "
        f"depend on that example alone. Received: layer '{at_fault.name}' of class "
        f"{original_class(at_fault).__name__} in model '{layer.name}': {why}. Gather the "
        "rows in the layer with `tfparallel.all_gather` (under `data_parallel`), use "
        "`keras.layers.BatchNormalization`, or train on one device. To train anyway, to different "
        "weights than one device's, pass `check_rows=False`."
    )


def forget_steps(layer: keras.Layer, kinds: Sequence[str] = ("train", "test", "predict")) -> None:
    """Makes a model trace its steps anew, after an interrupted trace or with other weights."""
    for kind in kinds:
        if isinstance(layer, keras.Model):
            setattr(layer, f"{kind}_function", None)
