"""Reward functions in processes of their own, with a limit for each sample."""
