"""An unmodified `vllm serve`, sampled from and trained with by its own endpoints."""
