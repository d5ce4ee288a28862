"""Asynchronous training: workers that do not wait for each other, and parameter servers."""
