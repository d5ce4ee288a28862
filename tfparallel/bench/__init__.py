"""Measuring collectives: who takes part, what is timed, what is checked, how it is shown."""
