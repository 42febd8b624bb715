"""Run by a Python that has the installed wheel, numpy and torch, far from the checkout: the whole core at work."""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import moe_replay as mr
from moe_replay.engines.vllm.engine import VllmEngine
from moe_replay.replay.adapters.transformers import RouterRule

LAYERS, EXPERTS, TOP_K = (1, 2), 6, 2


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(rows @ self.weight.T, TOP_K, dim=-1)


class Layer(nn.Module):
    def __init__(self, routes: bool) -> None:
        super().__init__()
        self.gate = Gate() if routes else None
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return rows.tanh()
        weights, chosen = self.gate(rows)
        return rows + (weights.softmax(-1)[..., None] * self.experts[chosen]).sum(-2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(Layer(layer in LAYERS) for layer in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(input_ids).flatten(0, 1)
        for layer in self.layers:
            rows = layer(rows)
        return rows


assert not find_spec("transformers"), "this environment should have numpy and torch alone"
assert Path(sys.prefix) in Path(mr.__file__).parents, mr.__file__

torch.manual_seed(0)
model = Model()
topology = mr.MoeTopology(3, tuple(mr.routes.MoeLayer(layer, EXPERTS, TOP_K) for layer in LAYERS))
replay = mr.attach(model, [RouterRule("Gate", num_experts=EXPERTS, top_k=TOP_K)], topology)
ids = [[1, 2, 3, 4], [5, 6]]
layout = mr.TokenLayout.padded([4, 2], side="left")
fed = torch.tensor(layout.fed_token_ids(ids, pad=0)).long()

with torch.no_grad(), replay.record() as recording:
    recorded = model(fed)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "routes")
    with mr.TraceWriter(file) as writer:
        for trace in recording.traces(layout, ids):
            writer.append(mr.RouteTrace.from_bytes(trace.to_bytes()))
    with mr.TraceFile(file) as written:
        traces = list(written)

with torch.no_grad():
    before = model(fed)
    for layer in LAYERS:
        model.layers[layer].gate.weight.add_(torch.randn(EXPERTS, 8))
with replay.replay(mr.RouteBatch.from_traces(traces, layout), observe=True) as replaying:
    model(fed).sum().backward()
taken = mr.RouteBatch.from_traces(traces, layout)
assert torch.equal(recorded, before)
assert not torch.equal(replaying.native().routed_experts, taken.routed_experts)
assert model.layers[1].gate.weight.grad.abs().sum() > 0

said = ""
try:
    VllmEngine("nothing")
except mr.errors.MissingExtraError as error:
    said = str(error)
assert "moe-replay[vllm]" in said

command = Path(sys.prefix, "bin", "moe-replay")
done = subprocess.run([command, "rollout", "--help"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
assert done.returncode == 3, done
assert "moe-replay[cli]" in done.stderr, done.stderr
print("the wheel works")
