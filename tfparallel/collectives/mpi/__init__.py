"""Collectives between workers through MPI, instead of TensorFlow's ring over gRPC."""
