"""Layers split into parts, a part on each device."""

from tfparallel.layers.attention import ParallelMultiHeadAttention
from tfparallel.layers.convolution import ChannelParallelConv2D
from tfparallel.layers.dense import ColumnParallelDense, RowParallelDense
from tfparallel.layers.embedding import VocabParallelEmbedding

__all__ = [
    "ChannelParallelConv2D",
    "ColumnParallelDense",
    "ParallelMultiHeadAttention",
    "RowParallelDense",
    "VocabParallelEmbedding",
]
