"""Cluster membership and worker processes; imports no TensorFlow."""
