"""GRPO post-training in which the routes of the rollout are replayed in the trainer."""
