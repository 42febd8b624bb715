"""Replay inside trainers that are not ours."""
