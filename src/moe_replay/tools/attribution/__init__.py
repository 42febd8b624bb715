"""Attribution of the train/inference mismatch to routing."""
