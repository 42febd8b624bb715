"""Score and update phases: old log-probs, losses and policy updates."""
