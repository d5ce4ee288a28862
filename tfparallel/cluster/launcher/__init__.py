"""Runs the workers of this host: starts them, reads what they print, restarts and ends them."""
