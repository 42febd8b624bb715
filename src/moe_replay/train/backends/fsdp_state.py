"""What one rank of an FSDP2 run needs to resume: its shards of what is trained, and their moments."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe_replay.train.backends.rank_state import Optimized, RankState
from moe_replay.train.backends.regions import RegionMap, Rows
from moe_replay.train.backends.sharded_model import row_offset


class FsdpState(RankState):
    """The trained parameters and the buffers of a sharded model, and the optimizer's state.

    Frozen parameters come from `model.path`, the settings of the optimizer from the configuration.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, moments: bool = True) -> None:
        super().__init__({"kind": "fsdp"}, moments=moments)
        self._model = model
        self._optimizer = optimizer
        # Between passes the root module holds gathered parameters in place of these, which the optimizer steps.
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def weights(self) -> Iterator[tuple[Tensor, RegionMap]]:
        """Yield trained parameters, tied ones once, and the buffers that a checkpoint of the model holds."""
        state = self._model.state_dict()  # gathered parameters are freed, so that what is restored is used
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        yield from ((parameter, _rows(f"model.{name}", parameter)) for name, parameter in self._trained.items())
        yield from (
            (tensor, _rows(f"model.{name}", tensor)) for name, tensor in state.items() if name not in parameters
        )

    def optimized(self) -> Iterator[Optimized]:
        """Yield each trained parameter with its moments."""
        for name, parameter in self._trained.items():
            yield Optimized(parameter, self._optimizer.state[parameter], _rows(f"optimizer.{name}", parameter))


def _rows(name: str, tensor: Tensor) -> Rows:
    """Return the rows of a tensor that this rank holds: as `torch.chunk` cuts them, or all."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Rows(name, shape)
    return Rows(name, shape, row_offset(tensor))
