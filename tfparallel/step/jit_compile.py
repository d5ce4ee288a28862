"""XLA on several devices: a step of `fit` becomes a few programs on each device.

With `jit_compile=True`, Keras compiles a step as one program, which can only use the variables of
one device. Here a step is traced as usual, and its graph is cut where devices exchange tensors, and
around operations that XLA cannot compile: strings, Python functions, sums between workers, checks.
Between the cuts, each device runs one program (`xla/`).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.seams.keras import model_supports_jit
from tfparallel.startup import without_collections
from tfparallel.step.graph_preparation import prepared_for_cpus
from tfparallel.xla.compiled_step import in_programs


def compiled_by_device(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles the `_take_step` of a `CompiledByDevice` with XLA, if the model asks for it.

    Disables garbage collection during the trace, since nearly all of its objects live on.
    """

    @functools.wraps(step)
    def called(self, kind, of_keras, data):
        bound = functools.partial(step, self, kind, of_keras)
        if tf.executing_eagerly():
            return bound(data)
        with without_collections():
            if not self._compiles:
                return bound(data)
            devices, inside = self._devices_of_programs, self._sums_in_programs
            return in_programs(bound, devices, data, exchanges_inside=inside)

    return called


class CompiledByDevice:
    """Extends a Keras model on several devices; `jit_compile` compiles each device's part."""

    @property
    def _has_several_devices(self) -> bool:
        return True

    @property
    def _compiles(self) -> bool:
        """Whether XLA compiles each device's part of a step."""
        return self._has_several_devices and self.jit_compile

    @property
    def _devices_of_programs(self) -> Sequence[str]:
        """The devices of this process."""
        return self.layout.devices

    @property
    def _sums_in_programs(self) -> bool:
        """Whether sums over the devices run inside a program and do not cut the step."""
        return False

    def _resolve_auto_jit_compile(self):
        if not self._has_several_devices:
            return super()._resolve_auto_jit_compile()
        # Keras disables it under any strategy, and checks the machine's devices, not the model's.
        has_gpu = any("GPU:" in device for device in self.layout.devices)
        return has_gpu and model_supports_jit(self)

    @contextlib.contextmanager
    def _made_for_devices(self, name):
        """Makes Keras create a function for several devices, not as one program."""
        if not self._has_several_devices:
            yield
            return
        previous, jit_compile = getattr(self, name), self.jit_compile
        self.jit_compile = False
        try:
            yield
        finally:
            self.jit_compile = jit_compile
        function = getattr(self, name)
        if function is not previous and not any("GPU:" in device for device in self.layout.devices):
            setattr(self, name, prepared_for_cpus(function))

    def make_train_function(self, force=False):
        """Creates the function of a step of `fit`; each device's part may be compiled."""
        with self._made_for_devices("train_function"):
            super().make_train_function(force)
        return self.train_function

    def make_test_function(self, force=False):
        """Creates the function of a step of `evaluate`; each device's part may be compiled."""
        with self._made_for_devices("test_function"):
            super().make_test_function(force)
        return self.test_function

    def make_predict_function(self, force=False):
        """Creates the function of a step of `predict`; each device's part may be compiled."""
        with self._made_for_devices("predict_function"):
            super().make_predict_function(force)
        return self.predict_function
