"""Traces one replica and replays it for the others; traces for inspection alone."""
