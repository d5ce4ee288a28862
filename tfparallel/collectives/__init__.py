"""Collectives between replicas and between workers."""
