"""Data sets that Python feeds: TensorFlow does not copy the arrays that a generator returns.

A tensor of such a data set is the program's own array if that is aligned to 64 bytes, and a kernel
that computes in place overwrites it.
"""

import tensorflow as tf

__all__ = ["copied_from_python"]

_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}


def copied_from_python(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set of the same elements, none of which is an array of the program."""
    if not _calls_python(dataset):
        return dataset
    # `map` passes the parts of a tuple one by one, even of a tuple of one.
    is_tuple = type(dataset.element_spec) is tuple

    def copied(*parts):
        element = parts if is_tuple else parts[0]
        return tf.nest.map_structure(_copy, element, expand_composites=True)

    return dataset.map(copied)


def _copy(tensor):
    # None is a missing part. A variant, such as an absent label of Keras's, is no array.
    if tensor is None or tensor.dtype == tf.variant:
        return tensor
    return tf.raw_ops.DeepCopy(x=tensor)


def _calls_python(dataset) -> bool:
    for function in dataset._functions():
        graph = function.function.graph.as_graph_def()
        nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
        if any(node.op in _PYTHON for node in nodes):
            return True
    return any(map(_calls_python, dataset._inputs()))
