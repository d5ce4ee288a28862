"""Traces one replica, and replays its operations for the others."""
