"""The sub-commands of `tfparallel`, one module each, and their common setup."""
