"""Places layers on devices, and checks the placement."""
