"""An engine behind HTTP (`moe-replay rollout`), and its client."""
