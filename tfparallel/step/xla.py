"""XLA on several devices: what each of them computes becomes programs of its own.

Keras compiles a step (`jit_compile=True`) as one program, which holds the variables of one device
alone. Here a step is traced as always, with its passes and its update marked
(`tf.xla.experimental.jit_scope`), and TensorFlow makes programs of neighbouring operations on one
device. What it cannot compile stays outside: strings, Python's functions. So do sums between
devices and workers, and checks, which XLA would leave out; and loops, branches and functions of the
model's own, since a mark ends where another graph begins.

XLA draws other random numbers than TensorFlow's kernels do. What is marked is compiled before it
first runs, so that its draws are XLA's from the first step on, as they are where Keras compiles. A
draw in a loop, or from a constant seed, would not be, and is refused.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.engine.graphs import called_by, with_inner
from tfparallel.seams.tensorflow import compile_at_first_run, without_fused_kernels

__all__ = ["CompiledByDevice", "compiled_if"]


@contextlib.contextmanager
def compiled_if(is_wanted: bool) -> Iterator[None]:
    """Has XLA compile the operations that are traced in it, each device's by themselves.

    Raises:
        ValueError: If a loop, a branch or a function in it draws random numbers, or something
            draws them from a constant seed.
    """
    if not is_wanted or tf.executing_eagerly():
        yield
        return
    compile_at_first_run()
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    with tf.xla.experimental.jit_scope(compile_ops=_may_be_compiled):
        yield
    _refuse_draws_not_by_xla(graph.get_operations()[num_before:])


def _may_be_compiled(node) -> bool:
    # XLA drops what only raises an error, and has sums between devices of its own. A function is
    # not compiled as a whole, with the checks in it: that of a stage marks what it computes itself.
    checks, calls = ("Assert", "CheckNumerics"), ("PartitionedCall", "StatefulPartitionedCall")
    return node.op not in (*checks, *calls) and not node.op.startswith("Collective")


def _refuse_draws_not_by_xla(operations) -> None:
    inner = itertools.chain.from_iterable(map(called_by, operations))
    within = itertools.chain.from_iterable(graph.get_operations() for graph in inner)
    for operation in with_inner(within):
        if "Random" in operation.type and not _is_marked(operation):
            raise ValueError(_refusal(operation, "in a loop, a branch or a function of its own"))
    for operation in operations:
        # TensorFlow computes beforehand what is the same in each step.
        is_seeded = operation.type == "StatelessRandomGetKeyCounter"
        if is_seeded and tf.get_static_value(operation.inputs[0]) is not None:
            raise ValueError(_refusal(operation, "from a seed that never changes"))


def _refusal(operation, where: str) -> str:
    return (
        f"A layer draws random numbers {where}, which XLA does not compile on several devices; on "
        "one it does, and draws others. A draw in the layer's `call`, by a "
        "`keras.random.SeedGenerator`, or a model that XLA does not compile, is required. "
        f"Received: '{operation.name}', and `jit_compile=True` (on GPUs \"auto\" means it). Draw "
        "before the loop, as `LSTM(dropout=…)` does, or compile with `jit_compile=False`."
    )


def _is_marked(operation) -> bool:
    try:
        return operation.get_attr("_XlaCompile")
    except ValueError:
        return False


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
        # A step on two GPUs is hundreds of programs (docs/internals/gpu.md), slower than none.
        return False

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
        return self._made("train_function", super().make_train_function, force)

    def make_test_function(self, force=False):
        """Makes the function of a step of `evaluate`, likewise."""
        return self._made("test_function", super().make_test_function, force)

    def make_predict_function(self, force=False):
        """Makes the function of a step of `predict`, likewise."""
        return self._made("predict_function", super().make_predict_function, force)

    def _made(self, name, make, force):
        known = getattr(self, name)
        with self._not_as_one_program():
            make(force)
        if self._compiles and getattr(self, name) is not known:
            setattr(self, name, _keeping_marks(getattr(self, name)))
        return getattr(self, name)


def _keeping_marks(function):
    @functools.wraps(function)
    def called(*arguments):
        with without_fused_kernels():
            return function(*arguments)

    return called
