"""Layers split into parts, a part on each device."""

from tfparallel.layers.attention import ParallelMultiHeadAttention
from tfparallel.layers.convolution import ChannelParallelConv2D
from tfparallel.layers.dense import ColumnParallelDense, RowParallelDense
from tfparallel.layers.embedding import VocabParallelEmbedding
from tfparallel.layers.spatial import SpatialParallelConv2D, SpatialParallelPooling2D

__all__ = [
    "ChannelParallelConv2D",
    "ColumnParallelDense",
    "ParallelMultiHeadAttention",
    "RowParallelDense",
    "SpatialParallelConv2D",
    "SpatialParallelPooling2D",
    "VocabParallelEmbedding",
]
