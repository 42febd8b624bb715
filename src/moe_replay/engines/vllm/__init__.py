"""vLLM in processes of this machine: its start, its routes, its weights."""
