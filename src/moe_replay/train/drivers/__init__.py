"""Driver processes: each samples, plays and scores a share of a step's groups, beside the process of rank 0."""
