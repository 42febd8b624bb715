"""Implementations of the `doctor`, `inspect`, `plan`, `convert`, `verify` and `train --dry-run` commands."""
