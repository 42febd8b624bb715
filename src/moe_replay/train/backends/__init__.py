"""What trains the policy: one interface, one file for each way to spread a model over ranks."""
