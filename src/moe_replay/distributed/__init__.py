"""Collectives over bytes and the ranks of a job."""
