"""How much of the train/inference mismatch is routing."""
