"""XLA on several devices: what each of them computes becomes programs of its own.

Keras compiles a step (`jit_compile=True`) as one program, which holds the variables of one device
alone. Here a step is traced as always, with its passes and its update marked
(`tf.xla.experimental.jit_scope`), and TensorFlow makes a program of neighbours on one device. What
it cannot compile stays outside: strings, Python's functions. So do sums between devices and
workers, and checks, which XLA would leave out.

XLA draws other random numbers than TensorFlow's kernels do. What is marked is compiled before it
first runs, so that all draws of a run are XLA's, as they are where Keras compiles.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfparallel.seams.keras import model_supports_jit
from tfparallel.seams.tensorflow import compile_at_first_run

__all__ = ["CompiledByDevice", "compiled_if"]


def compiled_if(is_wanted: bool) -> AbstractContextManager[Any]:
    """Has XLA compile the operations that are traced in it, each device's by themselves."""
    if not is_wanted or tf.executing_eagerly():
        return contextlib.nullcontext()
    compile_at_first_run()
    return tf.xla.experimental.jit_scope(compile_ops=_may_be_compiled)


def _may_be_compiled(node) -> bool:
    # XLA drops what only raises an error, and has sums between devices of its own. What a function
    # computes has been marked where it was traced, and checks in it were not.
    checks, calls = ("Assert", "CheckNumerics"), ("PartitionedCall", "StatefulPartitionedCall")
    return node.op not in (*checks, *calls) and not node.op.startswith("Collective")


class CompiledByDevice:
    """Extends a Keras model on several devices: `jit_compile` compiles what each of them does."""

    @property
    def _has_several_devices(self) -> bool:
        return True

    @property
    def _compiles(self) -> bool:
        """Whether XLA compiles what each device does."""
        return self._has_several_devices and self.jit_compile

    def _resolve_auto_jit_compile(self):
        if not self._has_several_devices:
            return super()._resolve_auto_jit_compile()
        # Keras says no under any strategy, and asks for the machine's devices, not the model's.
        has_gpu = any("GPU:" in device for device in self.layout.devices)
        return has_gpu and model_supports_jit(self)

    @contextlib.contextmanager
    def _not_as_one_program(self):
        """Has Keras make its functions without compiling them."""
        if not self._has_several_devices:
            yield
            return
        asked = self.jit_compile
        self.jit_compile = False
        try:
            yield
        finally:
            self.jit_compile = asked

    def make_train_function(self, force=False):
        """Makes the function of a step of `fit`, of which each device's part may be compiled."""
        with self._not_as_one_program():
            return super().make_train_function(force)

    def make_test_function(self, force=False):
        """Makes the function of a step of `evaluate`, likewise."""
        with self._not_as_one_program():
            return super().make_test_function(force)

    def make_predict_function(self, force=False):
        """Makes the function of a step of `predict`, likewise."""
        with self._not_as_one_program():
            return super().make_predict_function(force)
