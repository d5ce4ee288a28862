"""Shortens TensorFlow's graph optimization of a step on several CPU devices.

Before the first run of a function, Grappler's passes rewrite its graph, most of them twice. The
graph of N replicas has N times the nodes, and the passes take more than N times as long. On CPUs,
two of them change nothing, and the second round next to nothing. Without these, the step is the
same and its first run is shorter (docs/internals/data_parallel.md, "A shorter first epoch").
"""

import functools
from collections.abc import Callable
from typing import Any

from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from tfparallel.seams.tensorflow import functions_prepared_as

# Swapping is for GPUs, and CPUs do not change the layout of images.
_ON_CPUS = {
    "meta_optimizer_iterations": RewriterConfig.ONE,
    "memory_optimization": RewriterConfig.NO_MEM_OPT,
    "layout_optimizer": RewriterConfig.OFF,
}


def prepared_for_cpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes TensorFlow skip graph passes that have no effect for a function on CPU devices."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        with functions_prepared_as(for_cpus):
            return function(*args, **kwargs)

    return called


def for_cpus(config: ConfigProto) -> None:
    """Disables the passes, unless the user has set them."""
    options = config.graph_options.rewrite_options
    for name, value in _ON_CPUS.items():
        if not getattr(options, name):
            setattr(options, name, value)
