"""Everything that happens before the first step: inputs, preflight checks, ranks, engine."""
