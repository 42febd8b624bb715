"""Trajectories of a step: heads for all ranks, and a store from which each rank takes its share."""
