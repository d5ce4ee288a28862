"""Programs that diagnose a training run or its environment."""
