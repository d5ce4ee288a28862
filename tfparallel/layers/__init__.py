"""Layers split into parts, with one part on each device.

In a model's definition, they are the plain Keras layers of the same arguments, until
`tfparallel.tensor_parallel` splits them:

    def build():
        return keras.Sequential([
            keras.Input((64,)),
            tfparallel.layers.ColumnParallelDense(128, activation="gelu"),
            tfparallel.layers.RowParallelDense(64),
        ])

    model = tfparallel.tensor_parallel(build, devices=["CPU:0", "CPU:1"])
"""

from tfparallel.layers.attention import ParallelMultiHeadAttention
from tfparallel.layers.column_and_row import (
    ChannelParallelConv2D,
    ChannelReducingConv2D,
    ColumnParallelDense,
    RowParallelDense,
)
from tfparallel.layers.embedding import VocabParallelEmbedding
from tfparallel.layers.spatial import SpatialParallelConv2D, SpatialParallelPooling2D

__all__ = [
    "ChannelParallelConv2D",
    "ChannelReducingConv2D",
    "ColumnParallelDense",
    "ParallelMultiHeadAttention",
    "RowParallelDense",
    "SpatialParallelConv2D",
    "SpatialParallelPooling2D",
    "VocabParallelEmbedding",
]
