"""Collectives: what the replicas exchange."""
