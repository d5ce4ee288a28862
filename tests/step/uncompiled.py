"""Programs that TensorFlow's own kernels run, since XLA runs all-reduces between GPUs alone."""

import tensorflow as tf

from tfparallel.collectives import nccl
from tfparallel.xla import compiled_step


class WithoutXla:
    """Stands where `compiled_step.py` has `tf`: functions are not compiled, and keep their device.

    Attributes:
        traced: Of each function that would be compiled, its device and its graph.
    """

    def __init__(self):
        self.traced = []

    def __getattr__(self, name):
        return getattr(tf, name)

    def function(self, function, jit_compile=None, **options):
        def call():
            device = tf.zeros([]).device

            def placed():
                with tf.device(device if jit_compile else None):
                    return function()

            program = tf.function(placed, **options)
            if jit_compile:
                self.traced.append((device, program.get_concrete_function()))
            return program()

        return call


def sums_run_on_cpus(monkeypatch) -> WithoutXla:
    """Has programs run on CPUs whose sums are inside."""
    without_xla = WithoutXla()
    monkeypatch.setattr(compiled_step, "tf", without_xla)
    monkeypatch.setattr(nccl, "refusal", lambda devices: "")
    return without_xla
