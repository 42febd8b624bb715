"""A policy small enough to be saved a hundred times in a test: a torch model with dropout, and AdamW."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import moe_replay as mr
from moe_replay.utils.files import Write
from tests.support.weight_sources import IteratorSource


class SmallPolicy:
    """What `Checkpoints` asks of a backend, done with real files."""

    topology = mr.MoeTopology(num_layers=1, moe_layers=(mr.routes.MoeLayer(0, 8, 2),), model_type="small")
    device = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def train(self, steps: int) -> list[float]:
        """Losses of some steps on random data with dropout: both draw from the generator."""
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(4, 6)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def everything(self) -> list[Tensor]:
        """Weights and the optimizer's state, in a fixed order."""
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        moments = [state[name].clone() for state in self.optimizer.state.values() for name in sorted(state)]
        return weights + moments

    def is_like(self, other: list[Tensor]) -> bool:
        own = self.everything()
        return len(own) == len(other) and all(map(torch.equal, own, other))

    def stage(self) -> Write:
        copied = copy.deepcopy(self)

        def write(folder: Path) -> list[Path]:
            copied.save(folder)
            return [path for path in copied._own(folder).rglob("*") if path.is_file()]

        return write

    def _own(self, folder: Path) -> Path:
        return folder

    def save(self, folder: Path) -> None:
        torch.save(self.model.state_dict(), folder / "model.pt")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    def weight_source(self) -> IteratorSource:
        return IteratorSource(self.weights)

    def adapter(self) -> None:
        return None

    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.everything())
