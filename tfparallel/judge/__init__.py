"""Proves that pieces of a batch may be computed apart: where the rows are in each tensor."""
