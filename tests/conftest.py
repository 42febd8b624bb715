"""What every test run shares: the same examples each time, and no network."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)  # sums in several threads are not bit for bit the same twice

# Before anything imports huggingface_hub: a test that needs a download is a test that fails on a plane.
os.environ["HF_HUB_OFFLINE"] = "1"

# A red run must be red again for the next person. Deadlines measure the machine, not the code.
# To look for new examples: pytest --hypothesis-profile=explore
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("ci")
