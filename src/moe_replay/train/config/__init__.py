"""The configuration of a training run: a TOML file, a command line, and what is checked before anything starts."""

from moe_replay.train.config.train_config import TrainConfig

__all__ = ["TrainConfig"]
