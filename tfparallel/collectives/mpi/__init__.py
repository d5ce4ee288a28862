"""Collectives between workers over MPI, instead of TensorFlow's ring over gRPC."""
