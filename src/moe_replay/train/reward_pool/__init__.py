"""Reward functions in separate processes, with a limit for each sample."""
