"""Imported last by the server of ranks: makes what every rank would make again, and keeps it out of collections.

A collection in a rank would copy every page of the server's objects.
"""

import gc
from importlib.util import find_spec
from unittest.mock import patch

from torch._dynamo import trace_rules

# By the first call of whatever is compiled, or excluded from it. A new process group drops it, since parts of
# torch.distributed may not have been imported before; here they have.
trace_rules.get_torch_obj_rule_map()
patch.object(trace_rules, "clear_lru_cache").start()

if find_spec("transformers.conversion_mapping") is not None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3_moe")  # of all models, by the first model that is loaded

gc.collect()
gc.freeze()
