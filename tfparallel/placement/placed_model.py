"""The Keras model whose layers stand on several devices."""

import contextlib
import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.checkpoint.model_files import can_be_streamed, save_streamed
from tfparallel.data.rows_of_replica import count_rows
from tfparallel.extend import original_class
from tfparallel.flight.marks import mark
from tfparallel.judge.check_rows import proof_in_words
from tfparallel.layout.layout import Layout
from tfparallel.placement.gradients import gradients
from tfparallel.placement.layer_devices import PlacementError
from tfparallel.placement.processes import after_writes, has_others, naming_lost_process
from tfparallel.seams.compiled import loss_of_batch
from tfparallel.seams.keras import layers_in, takes_training
from tfparallel.step.build import build_ahead
from tfparallel.step.jit_compile import compiled_by_device
from tfparallel.step.one_step import OneStep, PassResult
from tfparallel.step.read_inputs import read_inputs
from tfparallel.tracing.audit import noting
from tfparallel.update.built import check_known
from tfparallel.update.place_optimizer import prepare
from tfparallel.update.places import Places
from tfparallel.variables.replica import device_at_work
from tfparallel.variables.split import share_in_parts

__all__ = ["PlacedLayer", "PlacedModel"]


class PlacedLayer:
    """Extends a layer: what it builds and computes is on its device, its losses included.

    The gradients' operations are placed by `gradients.py`.
    """

    def __call__(self, *args, **kwargs):
        """Calls the layer on its device."""
        device = device_at_work(self._device)
        with tf.device(device), noting("forward", self.name, device):
            return super().__call__(*args, **kwargs)


class PlacedModel(OneStep):
    """Extends a functional or Sequential model of placed layers."""

    @property
    def layout(self) -> Layout:
        """What is where."""
        share = share_in_parts(self.weights) if self._layout.splits else None
        return dataclasses.replace(
            self._layout, share_in_parts=share, proof=proof_in_words(self)
        )

    def compile(self, *args, **kwargs):
        """Compiles the model, as `keras.Model.compile`."""
        super().compile(*args, **kwargs)
        if self.optimizer is not None:
            check_known(self)
            self._place_updates()

    def _build_optimizer(self):
        """Makes the slots, each beside its weight: in the first step, as Keras does."""
        self._place_updates()
        weights = self.trainable_variables
        if weights and not self.optimizer.built and all(map(_has_its_variables, layers_in(self))):
            self.optimizer.build(weights)

    def _place_updates(self):
        prepare(self.optimizer, Places())

    def _trained(self):
        """The variables that hold what is trained."""
        return self._parts(self.trainable_weights)

    def _parts(self, variables):
        """The variables that hold the values of these: themselves, unless they lie in parts."""
        return variables

    def compile_from_config(self, config):
        """Compiles the model as a saved one, or another, was."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None:  # Its state is read next.
            self._build_optimizer()

    def _begin(self, call):
        call.enter(naming_lost_process(self._by_device))
        super()._begin(call)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if self.optimizer is not None and self.train_function is None:
            self._build_optimizer()
        build_ahead(self, iterator, data_batch, self._beside_the_loss())
        self._tell_callbacks(iterator)

    def make_train_function(self, force=False):
        """Builds the step of `fit`, which waits for what was written eagerly before it."""
        if force or self.train_function is None:
            check_known(self)
            if self.optimizer is not None:  # A step that is called by itself needs it, too.
                self._build_optimizer()
        super().make_train_function(force)
        self.train_function = _after_writes(self.train_function)
        return self.train_function

    def make_test_function(self, force=False):
        """Builds the step of `evaluate`, likewise."""
        super().make_test_function(force)
        self.test_function = _after_writes(self.test_function)
        return self.test_function

    def make_predict_function(self, force=False):
        """Builds the step of `predict`, likewise."""
        super().make_predict_function(force)
        self.predict_function = _after_writes(self.predict_function)
        return self.predict_function

    def save(self, filepath, overwrite=True, zipped=None, **kwargs):
        """Writes plain Keras, as `keras.Model.save`; a `.keras` file variable by variable."""
        if can_be_streamed(self, str(filepath), overwrite, zipped, kwargs):
            save_streamed(self, str(filepath))
        else:
            super().save(filepath, overwrite=overwrite, zipped=zipped, **kwargs)

    def quantize(self, *args, **kwargs):
        """Refuses to quantize layers that are placed; plain ones can be.

        Raises:
            PlacementError: Always.
        """
        raise PlacementError(
            "A model's layers cannot be quantized once they are placed: Keras quantizes layers of "
            f"its own classes alone. A quantized model is required. Received: `quantize` on layers "
            f"on {self.devices}. Save the model, load the file, which is plain Keras, call "
            "`quantize` there, and place the result."
        )

    @property
    def placement(self) -> dict[str, str]:
        """The device of each layer, by the layer's name, in topological order."""
        return self._layout.placement

    @property
    def devices(self) -> list[str]:
        """The devices, in the order of the stages."""
        return list(self._layout.devices)

    @property
    def _by_device(self) -> dict[str, str]:
        """What is lost with a device, by name."""
        return self.placement

    @property
    def _last_device(self) -> str:
        """Where the outputs are."""
        return self._layout.device(pipeline=self._layout.mesh.pipeline - 1)

    @compiled_by_device
    def train_step(self, data):
        """One step of training, as Keras's own; every operation on its layer's device."""
        mark("input", keras.tree.flatten(data))
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        x = read_inputs(self, x)
        found = self._passes(x, y, sample_weight)
        mark("passes", found.gradients)
        return self._trained_on(found, x, y, sample_weight)

    @compiled_by_device
    def test_step(self, data):
        """One step of evaluation, as Keras's own."""
        return super().test_step(data)

    @compiled_by_device
    def predict_step(self, data):
        """One step of prediction, as Keras's own."""
        return super().predict_step(data)

    def _passes(self, x, y, sample_weight) -> PassResult:
        """All rows forward and backward."""
        # `run_eagerly`: a tape alone can differentiate, and takes no care of devices.
        tape = tf.GradientTape() if tf.executing_eagerly() else None
        with self._beside_the_loss(), tape or contextlib.nullcontext():
            y_pred = self(x, training=True) if takes_training(self) else self(x)
            loss = loss_of_batch(self, x, y, y_pred, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
            # Not before the call, in which an activation with weights makes them.
            trained = self._trained()
            found = gradients(scaled, trained) if trained and tape is None else []
        if trained and tape is not None:
            found = tape.gradient(scaled, [variable.value for variable in trained])
        num_rows = count_rows(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))
        return PassResult(loss, num_rows, trained, found, y_pred)

    def _beside_the_loss(self):
        return tf.device(self._last_device)


def _after_writes(function: Callable) -> Callable:
    return after_writes(function) if has_others() else function


def _has_its_variables(layer: keras.Layer) -> bool:
    """Whether a layer makes no more variables; one given as an activation does when called."""
    return layer.built or original_class(layer).build is keras.Layer.build
