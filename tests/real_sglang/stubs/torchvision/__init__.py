"""Stands in for torchvision, whose builds do not match a CPU torch: SGLang imports it, for image models only."""

from hollow import hollow_out

__version__ = "0.0.0"
__getattr__ = hollow_out("torchvision")
