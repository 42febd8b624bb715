"""Engines that sample from a model and return, with each sample, the routes it really took."""
