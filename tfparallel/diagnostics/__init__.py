"""Programs that look at a run and say what is wrong with it."""
