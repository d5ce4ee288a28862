"""Asynchronous training: workers that do not wait for each other, and a server of the weights."""
