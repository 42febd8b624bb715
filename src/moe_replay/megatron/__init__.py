"""Megatron-Core: checkpoints in and out, and running it without a GPU."""
