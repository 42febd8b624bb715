"""Stands in for SGLang's kernel package, which is built for GPUs: importable, and an error wherever it is called.

SGLang imports names from it on CPU as well, and calls the first two operations below when it starts. That they do
nothing is right: they bind threads to cores and open shared memory between ranks. What ranks of tensor parallel would
exchange there goes over torch's own group. Every computation falls back to torch.

SGLang also pins the memory of its table of routes for copies from a GPU, whatever the device. Without a GPU there is
nothing to pin it for, and the one call of the CUDA runtime that does it succeeds here without doing anything.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from hollow import hollow_out

_OPERATIONS = torch.library.Library("sgl_kernel", "DEF")
_OPERATIONS.define("init_cpu_threads_env(str cpu_ids) -> str")
_OPERATIONS.define("initialize(int size, int rank) -> ()")
_OPERATIONS.impl("init_cpu_threads_env", lambda cpu_ids: "threads are not bound", "CompositeExplicitAutograd")
_OPERATIONS.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def _sum_over_ranks(data: torch.Tensor, operation: int) -> None:
    dist.all_reduce(data)


def _gather_ranks(data: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(data) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, data.contiguous())
    return torch.cat(parts, dim)


_OPERATIONS.define("shm_allreduce(Tensor(a!) data, int operation) -> ()")  # SGLang asks for sums only
_OPERATIONS.define("shm_allgather(Tensor data, int dim) -> Tensor")
_OPERATIONS.impl("shm_allreduce", _sum_over_ranks, "CompositeExplicitAutograd")
_OPERATIONS.impl("shm_allgather", _gather_ranks, "CompositeExplicitAutograd")

if not torch.cuda.is_available():
    _SUCCESS = 0
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda pointer, size, flags: _SUCCESS)

__getattr__ = hollow_out("sgl_kernel")
