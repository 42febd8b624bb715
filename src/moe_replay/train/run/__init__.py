"""The folder of a run: checkpoints, metrics, progress."""
