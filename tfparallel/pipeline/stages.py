"""A functional model cut into stages: the calls of each, and the tensors between them.

```
   x ──► │ embed │──► │ attend │──► │ mlp │──► logits
         └───┬───┘    └────────┘    └──▲──┘
             └──────── skipped ────────┘        sent from stage 0 to stage 2, once
```

A call belongs to the stage of its layer, or to the last stage whose outputs it reads if that comes
later: a layer that is called in two stages computes on each stage's own device.

Uses internals of Keras: the nodes of a functional model, and the context of a call.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.pipeline.masks import Masks, nodes_in_order
from tfparallel.pipeline.pass_context import current_pass
from tfparallel.seams.functional import LEAVES_TRAINING, calling_with, functional_of, in_training
from tfparallel.seams.keras import mask_of, set_mask


class PartOf(NamedTuple):
    """The key of the positions of an output on one device (`divided_outputs.py`)."""

    output: int
    index: int


class LogitsOf(NamedTuple):
    """The key of the logits behind a tensor (`step/logits.py`)."""

    output: int | PartOf


Key = int | PartOf | LogitsOf  # The id of a symbolic tensor.
Values = dict[Key, Any]


def symbol_of(key: Key) -> int:
    """Returns the id of the symbolic tensor that a key belongs to."""
    return key if isinstance(key, int) else symbol_of(key.output)


def values_of(values: Values, keys: Collection[int]) -> Values:
    """Returns the values of some symbolic tensors, with their parts and the logits behind them."""
    return {key: value for key, value in values.items() if symbol_of(key) in keys}


class Stage:
    """The computation of one stage.

    Attributes:
        index: From 0.
        nodes: Its calls, producers before consumers.
        places: The place of each among the model's calls.
        inputs: The symbolic tensors that it reads from elsewhere.
        outputs: The symbolic tensors that other stages or the model's caller read.
        layers: The layers that it calls.
    """

    def __init__(self, index: int, model: keras.Model):
        self.index = index
        self.nodes: list = []
        self.places: list[int] = []
        self.calls_with: list = []  # The `training` value before and after each call.
        self.inputs: dict[int, keras.KerasTensor] = {}
        self.outputs: dict[int, keras.KerasTensor] = {}
        self._model = model

    @property
    def layers(self) -> list[keras.Layer]:
        """The layers that it calls, each once."""
        operations = {id(node.operation): node.operation for node in self.nodes}
        return [op for op in operations.values() if isinstance(op, keras.Layer)]

    def run(self, inputs: Values, masks: Masks) -> Values:
        """Makes the calls, in training.

        Args:
            inputs: The tensors of `inputs`, by the symbolic tensor's id. They keep their masks.
            masks: Which calls find a mask.

        Returns:
            The tensors of `outputs`, by the symbolic tensor's id, with the masks that they were
            made with; and those of `inputs` that are model outputs.
        """
        values, stage_pass = dict(inputs), current_pass()
        # Tensors that other stages also read, by id: calls here may remove their masks.
        shared = {id(tensor): (tensor, mask_of(tensor)) for tensor in inputs.values()}
        with calling_with(self._model, training=True) as context:
            calls = zip(self.nodes, self.places, self.calls_with, strict=True)
            for node, place, (training, training_after) in calls:
                context.training = training
                if stage_pass is not None:
                    stage_pass.place = place
                read = [values[id(symbol)] for symbol in node.input_tensors]
                masks.take_off(node, [tensor if id(tensor) in shared else None for tensor in read])
                args, kwargs = node.arguments.fill_in(values)
                outputs = in_training(node.operation)(*args, **kwargs)
                if LEAVES_TRAINING and context.training is not training_after:
                    raise _training_error(node.operation, context.training)
                for symbol, tensor in zip(node.outputs, keras.tree.flatten(outputs), strict=True):
                    values[id(symbol)] = tensor
                    if id(symbol) in self.outputs:
                        shared.setdefault(id(tensor), (tensor, mask_of(tensor)))
        for tensor, mask in shared.values():
            if mask is not None:
                set_mask(tensor, mask)
        return {key: values[key] for key in (*self.outputs, *inputs) if key in values}


def cut_stages(model: keras.Model, stage_of: Mapping[str, int], num_stages: int) -> list[Stage]:
    """Cuts a functional or Sequential model.

    Args:
        model: The model.
        stage_of: The stage of each layer, by name.
        num_stages: The number of stages; a stage may have no layer.
    """
    functional = functional_of(model)
    stages = [Stage(index, model) for index in range(num_stages)]
    made_by: dict[int, int] = {}  # The stage of a tensor; the model's inputs have none.
    training = True
    for place, node in enumerate(nodes_in_order(functional)):
        before = [made_by.get(id(tensor), 0) for tensor in node.input_tensors]
        index = max([stage_of.get(node.operation.name, 0), *before])
        stages[index].nodes.append(node)
        stages[index].places.append(place)
        training_after = _training_after(node, training)
        stages[index].calls_with.append((training, training_after))
        training = training_after
        for tensor in node.input_tensors:
            _read(stages, made_by, tensor, index)
        made_by.update((id(tensor), index) for tensor in node.outputs)
    for tensor in functional.outputs:
        # The loss is computed after the last stage, on its device.
        _read(stages, made_by, tensor, num_stages - 1)
        if id(tensor) in made_by:
            stages[made_by[id(tensor)]].outputs[id(tensor)] = tensor
    return stages


def _training_after(node, training):
    """Returns the `training` value that later calls find on one device, after this call."""
    is_given = LEAVES_TRAINING and isinstance(node.operation, keras.Layer)
    return node.arguments.kwargs.get("training", training) if is_given else training


def _training_error(layer, training):
    return ValueError(
        "Stages must know in advance with which `training` each layer is called. Received: "
        f"layer {layer.name!r}, which calls an inner layer with training={training}; in Keras "
        f"{keras.__version__} that also applies to all layers after it. Use data_parallel, or "
        "Keras before 3.16."
    )


def _read(stages, made_by, tensor, reader):
    maker = made_by.get(id(tensor))
    if maker == reader:
        return
    stages[reader].inputs[id(tensor)] = tensor
    if maker is not None:
        stages[maker].outputs[id(tensor)] = tensor


def with_mask_of(tensor: tf.Tensor, original: tf.Tensor) -> tf.Tensor:
    """Copies the mask that Keras keeps on a tensor."""
    mask = mask_of(original)
    if mask is not None:
        set_mask(tensor, tf.identity(mask))
    return tensor
