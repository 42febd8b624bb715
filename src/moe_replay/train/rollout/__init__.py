"""Rollout phase: prompts are sampled in groups, scored, and given advantages."""
