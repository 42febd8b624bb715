"""Tensors from some ranks to some others, all of them in flight at once."""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist


class Exchange:
    """Sends and receives of this rank, which `run` starts together.

    Two ranks must name what passes between them in the same order. Ranks that exchange nothing need not call it.
    """

    def __init__(self) -> None:
        self._operations: list[dist.P2POp] = []

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to a rank; it must not change before `run` has returned."""
        if tensor.numel():
            self._operations.append(dist.P2POp(dist.isend, tensor.detach().contiguous(), to))

    def receive(self, into: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what a rank sends."""
        if into.numel():
            self._operations.append(dist.P2POp(dist.irecv, into, source))

    def run(self) -> None:
        """Wait until everything has been sent and received."""
        operations, self._operations = self._operations, []
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
