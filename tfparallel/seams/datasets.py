"""Data sets that Python feeds: TensorFlow does not copy the arrays that a generator returns.

A tensor of such a data set is the program's own array if that is aligned to 64 bytes, and a kernel
that computes in place overwrites it.
"""

import tensorflow as tf

__all__ = ["copied_from_python"]

_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}


def copied_from_python(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set of the same elements, none of which is an array of the program."""
    return dataset.map(_copied) if _calls_python(dataset) else dataset


def _copied(*element):
    copies = tf.nest.map_structure(_copy, element, expand_composites=True)
    return copies if len(copies) > 1 else copies[0]


def _copy(tensor):
    # A variant, such as an absent label of Keras's, is no array.
    return tensor if tensor.dtype == tf.variant else tf.raw_ops.DeepCopy(x=tensor)


def _calls_python(dataset) -> bool:
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
        if any(node.op in _PYTHON for node in nodes):
            return True
    return any(map(_calls_python, dataset._inputs()))
