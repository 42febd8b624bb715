"""Everything a run writes for people: run folder, console, completions, metrics."""
