"""The state of a run: collected, written, verified and read again."""
