"""Trajectories of a step: headers for all ranks, and a store from which each rank takes its share."""
