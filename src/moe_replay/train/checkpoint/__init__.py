"""Checkpoints: complete or absent, and sufficient to resume bit for bit."""
