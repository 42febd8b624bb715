"""Rollout engines: they return samples with their routes, and take new weights."""
