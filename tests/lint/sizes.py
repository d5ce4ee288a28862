"""How large the tensors of a traced step are, in a batch of so many rows.

TensorFlow infers shapes from that of the batch, whose number of rows alone is not known when a step
is traced. The arithmetic by which a batch is cut into rows is done by it on the way.
"""

import numpy as np
import tensorflow as tf

from tests.lint.edges import Edge, Step


class Sizes:
    """Of the tensors of a step.

    Args:
        step: What ran on which device.
        num_rows: Of a batch.
    """

    def __init__(self, step: Step, num_rows: int):
        self._step, self._num_rows = step, num_rows
        self._graph, self._outputs = tf.Graph(), {}

    def num_bytes(self, edge: Edge) -> int:
        """The size of a tensor that changes its memory.

        Raises:
            ValueError: If it cannot be known before the step runs.
        """
        device, name, output = edge.tensor
        with self._graph.as_default():
            shape = self._tensor(device, f"{name}:{output}").shape
        if not shape.is_fully_defined():
            raise ValueError(f"The size of {edge} is not known: {shape}")
        return int(np.prod(shape, dtype=np.int64)) * edge.dtype.size

    def _tensor(self, device, name):
        node, output = self._step.through_calls(*self._step.made_by(device, name))
        key = (node.device, node.name)
        if key not in self._outputs:
            self._outputs[key] = self._inferred(node)
        return self._outputs[key][output]

    def _inferred(self, node):
        """What an operation returns, as far as its shape goes."""
        if node.op == "IteratorGetNext":
            dtypes, shapes = node.attr["output_types"].list, node.attr["output_shapes"].list
            return [
                tf.compat.v1.placeholder(
                    tf.as_dtype(dtype), [self._num_rows, *tf.TensorShape(shape)[1:]]
                )
                for dtype, shape in zip(dtypes.type, shapes.shape, strict=True)
            ]
        if node.op == "_Arg" and "_handle_shapes" in node.attr:  # A variable.
            (shape,) = node.attr["_handle_shapes"].list.shape
            (dtype,) = node.attr["_handle_dtypes"].list.type
            return [tf.raw_ops.VarHandleOp(shape=tf.TensorShape(shape), dtype=tf.as_dtype(dtype))]
        if node.op == "_Arg":  # Made before the step.
            return [tf.compat.v1.placeholder(tf.as_dtype(node.attr["T"].type))]
        if node.op == "LookupTableFindV2":  # One for each key.
            keys = self._tensor(node.device, node.input[1])
            return [tf.compat.v1.placeholder(tf.as_dtype(node.attr["Tout"].type), keys.shape)]
        names = [name for name in node.input if not name.startswith("^")]
        inputs = {f"input{i}:0": self._tensor(node.device, name) for i, name in enumerate(names)}
        alone = tf.compat.v1.GraphDef()
        copy = alone.node.add()
        copy.CopyFrom(node)
        copy.name, copy.device = "node", ""
        copy.attr.pop("_class", None)
        copy.ClearField("input")
        copy.input.extend(inputs)
        tf.import_graph_def(alone, input_map=inputs, name=f"node{len(self._outputs)}")
        return self._graph.get_operation_by_name(f"node{len(self._outputs)}/node").outputs
