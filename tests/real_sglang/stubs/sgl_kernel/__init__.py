"""Stands in for SGLang's kernel package, which is built for GPUs: importable, and an error wherever it is called.

SGLang imports names from it on CPU as well, and calls the two operations below when it starts. That they do nothing is
right: they bind threads to cores and open shared memory between ranks. Every computation falls back to torch.

SGLang also pins the memory of its table of routes for copies from a GPU, whatever the device. Without a GPU there is
nothing to pin it for, and the one call of the CUDA runtime that does it succeeds here without doing anything.
"""

from types import SimpleNamespace

import torch
from hollow import hollow_out

_OPERATIONS = torch.library.Library("sgl_kernel", "DEF")
_OPERATIONS.define("init_cpu_threads_env(str cpu_ids) -> str")
_OPERATIONS.define("initialize(int size, int rank) -> ()")
_OPERATIONS.impl("init_cpu_threads_env", lambda cpu_ids: "threads are not bound", "CompositeExplicitAutograd")
_OPERATIONS.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")

if not torch.cuda.is_available():
    _SUCCESS = 0
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda pointer, size, flags: _SUCCESS)

__getattr__ = hollow_out("sgl_kernel")
