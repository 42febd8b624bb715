"""Ranks and engines of a run on a Ray cluster."""
