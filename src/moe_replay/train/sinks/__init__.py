"""Metric sinks: where the metrics of a run go."""
