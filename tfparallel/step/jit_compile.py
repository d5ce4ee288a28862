"""XLA on several devices: a step of `fit` is few programs on each of them.

Keras compiles a step (`jit_compile=True`) as one program, which holds the variables of one device
alone. Here a step is traced as always, and its graph is cut where devices exchange something, and
around what XLA cannot compile: strings, Python's functions, sums between workers, checks. What is
between the cuts is one program on each device (`xla/`).
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

__all__ = ["CompiledByDevice", "compiled_by_device"]


def compiled_by_device(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Has XLA compile a method that takes a step of a `CompiledByDevice`, if it asks for it.

    While the step is traced nothing is collected: nearly all that a trace makes lives on.
    """

    @functools.wraps(step)
    def called(self, data):
        if tf.executing_eagerly():
            return step(self, data)
        with without_collections():
            if not self._compiles:
                return step(self, data)
            return in_programs(
                functools.partial(step, self),
                self._devices_of_programs,
                data,
                exchanges_inside=self._sums_in_programs,
            )

    return called


class CompiledByDevice:
    """Extends a Keras model on several devices: `jit_compile` compiles what each of them does."""

    @property
    def _has_several_devices(self) -> bool:
        return True

    @property
    def _compiles(self) -> bool:
        """Whether XLA compiles what each device does."""
        return self._has_several_devices and self.jit_compile

    @property
    def _devices_of_programs(self) -> Sequence[str]:
        """This process's devices."""
        return self.layout.devices

    @property
    def _sums_in_programs(self) -> bool:
        """Whether these are summed over within a program, and do not cut the step."""
        return False

    def _resolve_auto_jit_compile(self):
        if not self._has_several_devices:
            return super()._resolve_auto_jit_compile()
        # Keras says no under any strategy, and asks for the machine's devices, not the model's.
        has_gpu = any("GPU:" in device for device in self.layout.devices)
        return has_gpu and model_supports_jit(self)

    @contextlib.contextmanager
    def _made_for_devices(self, name):
        """Has Keras make a function for several devices, and not as one program."""
        if not self._has_several_devices:
            yield
            return
        known, asked = getattr(self, name), self.jit_compile
        self.jit_compile = False
        try:
            yield
        finally:
            self.jit_compile = asked
        made = getattr(self, name)
        if made is not known and not any("GPU:" in device for device in self.layout.devices):
            setattr(self, name, prepared_for_cpus(made))

    def make_train_function(self, force=False):
        """Makes the function of a step of `fit`, of which each device's part may be compiled."""
        with self._made_for_devices("train_function"):
            super().make_train_function(force)
        return self.train_function

    def make_test_function(self, force=False):
        """Makes the function of a step of `evaluate`, likewise."""
        with self._made_for_devices("test_function"):
            super().make_test_function(force)
        return self.test_function

    def make_predict_function(self, force=False):
        """Makes the function of a step of `predict`, likewise."""
        with self._made_for_devices("predict_function"):
            super().make_predict_function(force)
        return self.predict_function
