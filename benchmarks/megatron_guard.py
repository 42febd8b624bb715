"""Cost of the guard around a trainer's own replay on Megatron-Core, as in verl and ms-swift, on one micro-batch.

python benchmarks/megatron_guard.py                  # a small model on the CPU, about a minute
python benchmarks/megatron_guard.py --device cuda    # 48 layers, 128 experts, top 8, 16k tokens, bf16

replay           Megatron's own replay: forward and backward without a guard
check            routes of the samples laid out on the host, and compared with what is on every router: one device sync
check, observed  the routers' own choices too, and their counts for the alignment check

Each repeat runs every mode once; a ratio is the median over repeats of (mode / replay) within one repeat.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from replay_overhead import SHAPES, VOCABULARY, megatron_model

import moe_replay as mr
from moe_replay.integrations.hosts import ReplaySettings
from moe_replay.integrations.megatron_guard import RouterGuard

MODES = ("replay", "check", "check, observed")


def routers_of(chunk: Any) -> list[tuple[int, Any]]:
    routers = [layer.mlp.router for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    return [(router.layer_number - 1, router.router_replay) for router in routers]


class Bench:
    """One model and one micro-batch, of which Megatron replays the routes."""

    def __init__(self, device: str, shape: dict[str, int]) -> None:
        torch.manual_seed(0)
        self._device = torch.device(device)
        self._model: Any = megatron_model(shape, device, checkpointing=False)
        ids = torch.randint(VOCABULARY, (shape["batch"], shape["width"]))
        self._ids = ids.to(device)
        self._layout = mr.TokenLayout.padded([ids.shape[1]] * ids.shape[0]).sequence_major()
        replay = mr.attach(self._model)
        with torch.no_grad(), replay.record() as recording:
            self._logits()
        self._traces = recording.traces(self._layout, ids.numpy())
        replay.detach()
        self._routes = mr.RouteBatch.from_traces(self._traces, self._layout).to(device)
        settings = ReplaySettings(mode="R3")
        self._guard = RouterGuard("Megatron", [self._model], settings, routers_of, self._device, compares_ids=True)

    def _logits(self) -> torch.Tensor:
        width = self._ids.shape[1]
        positions = torch.arange(width, device=self._ids.device).expand_as(self._ids)
        causal = torch.ones((1, 1, width, width), dtype=torch.bool, device=self._ids.device).triu(1)
        return self._model(input_ids=self._ids, position_ids=positions, attention_mask=causal)

    def _set_targets(self) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        RouterReplay.clear_global_indices()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        for layer, router in routers_of(self._model):
            router.set_target_indices(self._routes.layer(layer)[0].long())

    def step(self, mode: str) -> float:
        """Seconds of one forward and backward; on the CPU those of this process, for machines that do other work."""
        clock = time.perf_counter if self._device.type == "cuda" else time.process_time
        self._set_targets()
        self._synchronize()
        start = clock()
        loss = self._forward(mode).float().logsumexp(-1).mean()
        loss.backward()
        self._synchronize()
        elapsed = clock() - start
        self._model.zero_grad(set_to_none=True)
        self._guard.metrics.finish(is_update=True)  # once an update, however many micro-batches it has
        return elapsed

    def _forward(self, mode: str) -> torch.Tensor:
        if mode == "replay":
            return self._logits()
        layers = tuple(layer for layer, _ in routers_of(self._model))
        expected = mr.RouteBatch.from_traces(self._traces, self._layout, layers, device=self._device)
        observes = mode == "check, observed"
        logits, native = self._guard.check(self._logits, self._model, expected, observes=observes)
        self._guard.metrics.add_routes(expected, native, self._layout)
        return logits

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    for name, value in SHAPES["cpu"].items():
        parser.add_argument(f"--{name}", type=int, help=f"default {value} on cpu")
    options = parser.parse_args()
    defaults = SHAPES["cpu"] if options.device == "cpu" else SHAPES["megatron"] | {"batch": 8}
    shape = {name: getattr(options, name) or default for name, default in defaults.items()}
    if options.device == "cpu":
        torch.set_num_threads(1)
    bench = Bench(options.device, shape)
    print(
        f"{shape['layers']} MoE layers, {shape['experts']} experts, top {shape['top_k']}, hidden {shape['hidden']}, "
        f"{shape['batch']} x {shape['width']} tokens, {options.device}, median of {options.repeats} repeats"
    )
    for mode in MODES:
        bench.step(mode)  # warm up
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(options.repeats):
        for mode in MODES if repeat % 2 else reversed(MODES):  # no mode always runs first
            times[mode].append(bench.step(mode))
    for mode in MODES:
        ratios = sorted(a / b for a, b in zip(times[mode], times["replay"], strict=True))
        quarter = len(ratios) // 4
        middle, fastest = statistics.median(times[mode]) * 1e3, min(times[mode]) * 1e3
        print(
            f"{mode:16} {middle:8.1f} ms, fastest {fastest:8.1f} ms   ratio {statistics.median(ratios):.3f} "
            f"({ratios[quarter]:.3f} - {ratios[-1 - quarter]:.3f})"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
