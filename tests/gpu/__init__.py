"""Trials of every parallelism on GPUs: `make test-gpu`."""
