"""Rollout worker processes: each samples, plays and scores a part of the groups of a step, for rank 0."""
