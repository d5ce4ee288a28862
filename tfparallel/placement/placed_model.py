"""The Keras model of `model_parallel`: its layers are on several devices."""

import contextlib
import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.checkpoint.model_files import can_be_streamed, save_streamed
from tfparallel.extend import original_class
from tfparallel.flight.marks import mark
from tfparallel.judge.check_rows import proof_in_words
from tfparallel.layout.layout import Layout
from tfparallel.piece import count_rows
from tfparallel.placement.gradients import gradients
from tfparallel.placement.processes import after_writes, has_others, naming_lost_process
from tfparallel.problems import PlacementError
from tfparallel.seams.compiled import loss_of_batch
from tfparallel.seams.keras import layers_in, takes_training
from tfparallel.step.build import build_ahead
from tfparallel.step.jit_compile import compiled_by_device
from tfparallel.step.one_step import OneStep, PassResult
from tfparallel.step.read_inputs import read_inputs
from tfparallel.tracing.audit import noting
from tfparallel.update.built_optimizers import check_known
from tfparallel.update.place_optimizer import prepare
from tfparallel.update.places import Places
from tfparallel.variables.mesh_replica import device_at_work
from tfparallel.variables.split import share_in_parts


class PlacedLayer:
    """Extends a layer: it builds and computes on its device, including its losses.

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
        """The layout of the model."""
        share = share_in_parts(self.weights) if self._layout.splits else None
        return dataclasses.replace(
            self._layout, share_in_parts=share, proof=proof_in_words(self)
        )

    def _prepare_compiled(self):
        super()._prepare_compiled()
        if self.optimizer is not None:
            check_known(self)
            self._place_updates()

    def _build_optimizer(self):
        """Builds the slots, each beside its weight."""
        if self.optimizer is not None:
            self._place_updates()
        if all(map(_has_its_variables, layers_in(self))):
            super()._build_optimizer()

    def _place_updates(self):
        prepare(self.optimizer, Places())

    def _trained(self):
        """Returns the variables that hold the trainable weights."""
        return self._parts(self.trainable_weights)

    def _parts(self, variables):
        """Returns the variables that hold these values: the variables themselves or their parts."""
        return variables

    def compile_from_config(self, config):
        """Compiles the model like a saved model, or another one."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        self._build_optimizer()  # Keras restores its state next.

    def _begin(self, call):
        call.enter(naming_lost_process(self._by_device))
        super()._begin(call)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        build_ahead(self, iterator, data_batch, self._beside_the_loss())
        self._tell_callbacks(iterator)

    def make_train_function(self, force=False):
        """Builds the step of `fit`, which waits for earlier eager writes."""
        if force or self.train_function is None:
            check_known(self)
        super().make_train_function(force)
        self.train_function = _after_writes(self.train_function)
        return self.train_function

    def make_test_function(self, force=False):
        """Builds the step of `evaluate`, which waits for earlier eager writes."""
        super().make_test_function(force)
        self.test_function = _after_writes(self.test_function)
        return self.test_function

    def make_predict_function(self, force=False):
        """Builds the step of `predict`, which waits for earlier eager writes."""
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
        """Raises an error: only plain layers can be quantized.

        Raises:
            PlacementError: Always.
        """
        raise PlacementError(
            "Placed layers cannot be quantized, because Keras quantizes only layers of its own "
            f"classes. The model must be quantized first. Received: `quantize` on layers "
            f"on {self.devices}. Save the model, load the file, which is plain Keras, call "
            "`quantize` on it, and place the result."
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
        """What each device holds, by name, for the error if the device is lost."""
        return self.placement

    @property
    def _last_device(self) -> str:
        """The device of the outputs."""
        return self._layout.device(pipeline=self._layout.mesh.pipeline - 1)

    @compiled_by_device
    def _take_step(self, kind, of_keras, data):
        if kind != "fit":
            return of_keras(data)
        mark("input", keras.tree.flatten(data))
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        x = read_inputs(self, x)
        result = self._passes(x, y, sample_weight)
        mark("passes", result.gradients)
        return self._trained_on(result, x, y, sample_weight)

    def _passes(self, x, y, sample_weight) -> PassResult:
        """Runs the forward and backward pass of all rows."""
        # With `run_eagerly`, only a tape can differentiate; it ignores devices.
        tape = tf.GradientTape() if tf.executing_eagerly() else None
        with self._beside_the_loss(), tape or contextlib.nullcontext():
            y_pred = self(x, training=True) if takes_training(self) else self(x)
            loss = loss_of_batch(self, x, y, y_pred, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
            # After the call: an activation with weights creates them in it.
            trained = self._trained()
            found_gradients = gradients(scaled, trained) if trained and tape is None else []
        if trained and tape is not None:
            found_gradients = tape.gradient(scaled, [variable.value for variable in trained])
        num_rows = count_rows(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))
        return PassResult(loss, num_rows, trained, found_gradients, y_pred)

    def _beside_the_loss(self):
        return tf.device(self._last_device)


def _after_writes(function: Callable) -> Callable:
    return after_writes(function) if has_others() else function


def _has_its_variables(layer: keras.Layer) -> bool:
    """Returns whether a layer's variables all exist; activations create theirs when called."""
    return layer.built or original_class(layer).build is keras.Layer.build
