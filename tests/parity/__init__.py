"""Parity: what a form of parallelism trains, beside what one device trains."""
