"""The type that a task computes in, and whether XLA compiles it: what the flags say of both."""

from collections.abc import Callable

import keras

from tfparallel.seams.compiled import compile_arguments

__all__ = ["compiling", "use_precision"]


def use_precision(precision: str | None) -> None:
    """Makes all layers that are made from now on compute in a type.

    Call it before the task file is imported, which may make layers.

    Args:
        precision: What `--precision` says; None leaves Keras's own.
    """
    if precision is not None:
        keras.config.set_floatx("float64" if precision == "float64" else "float32")
        keras.config.set_dtype_policy(precision)


def compiling(
    compile_model: Callable[[keras.Model], None], jit_compile: bool | None
) -> Callable[[keras.Model], None]:
    """What compiles a task's model as the task does, and for XLA as the flag says.

    Args:
        compile_model: The task's own.
        jit_compile: What `--jit_compile` says; None leaves the task's choice.
    """

    def compile_as_asked(model: keras.Model) -> None:
        compile_model(model)
        if jit_compile is not None:
            model.jit_compile = jit_compile
            if compile_arguments(model) is not None:  # What is saved with the model.
                compile_arguments(model)["jit_compile"] = model.jit_compile

    return compile_as_asked
