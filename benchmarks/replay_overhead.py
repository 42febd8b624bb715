"""What recording and replaying cost: forward + backward of one micro-batch, against native routing, side by side.

python benchmarks/replay_overhead.py                      # a small model on the CPU, about a minute
python benchmarks/replay_overhead.py --device cuda        # 24 MoE layers, 64 experts, top 8, 16k tokens, bf16

Each repeat runs every mode once; a ratio is the median over repeats of (mode / native) within one repeat.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_replay as mr

SHAPES = {
    "cpu": {"layers": 4, "experts": 64, "top_k": 8, "hidden": 256, "intermediate": 128, "batch": 2, "width": 512},
    "cuda": {"layers": 24, "experts": 64, "top_k": 8, "hidden": 2048, "intermediate": 768, "batch": 4, "width": 4096},
}
MODES = ("native", "attached, idle", "record", "replay", "replay, some native", "replay, observed")


class Bench:
    """One model, one micro-batch, one function for each mode."""

    def __init__(self, device: str, shape: dict[str, int], checkpointing: bool) -> None:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=4096,
            hidden_size=shape["hidden"],
            moe_intermediate_size=shape["intermediate"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=max(1, shape["hidden"] // 128),
            num_key_value_heads=max(1, shape["hidden"] // 512),
            head_dim=128,
            num_experts=shape["experts"],
            num_experts_per_tok=shape["top_k"],
            use_cache=False,
        )
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        with torch.device(device):
            self.model = Qwen3MoeForCausalLM(config).train()
        torch.set_default_dtype(torch.float32)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.device = device
        ids = torch.randint(4096, (shape["batch"], shape["width"]))
        self.ids = ids.to(device)
        self.batch, self.partial = self._routes(ids)

    def _routes(self, ids: torch.Tensor) -> tuple[mr.RouteBatch, mr.RouteBatch]:
        """Recorded routes on the host, as they come from a rollout: all covered, and with one token in 16 uncovered."""
        replay = mr.attach(self.model)
        with torch.no_grad(), replay.record() as recording:
            self.model(self.ids)
        replay.detach()
        layout = mr.TokenLayout.padded([ids.shape[1]] * ids.shape[0])
        traces = recording.traces(layout, ids.numpy())
        holes = np.arange(ids.shape[1]) % 16 != 15
        cut = [mr.RouteTrace(t.token_ids, t.experts, t.layers, holes, num_experts=t.num_experts) for t in traces]
        return mr.RouteBatch.from_traces(traces, layout), mr.RouteBatch.from_traces(cut, layout)

    @contextmanager
    def attached(self, mode: str) -> Iterator[Callable[[], AbstractContextManager]]:
        """What the forward of a mode runs in; attaching itself is not timed."""
        if mode == "native":
            yield nullcontext
            return
        replay = mr.attach(self.model)
        contexts: dict[str, Callable[[], AbstractContextManager]] = {
            "attached, idle": nullcontext,
            "record": replay.record,
            "replay": lambda: replay.replay(self.batch),
            "replay, some native": lambda: replay.replay(self.partial),
            "replay, observed": lambda: replay.replay(self.batch, observe=True),
        }
        yield contexts[mode]
        replay.detach()

    def step(self, mode: str) -> float:
        """Seconds of one forward and backward."""
        with self.attached(mode) as context:
            self._synchronize()
            start = time.perf_counter()
            with context():
                loss = self.model(self.ids).logits.float().logsumexp(-1).mean()
            loss.backward()
            self._synchronize()
            elapsed = time.perf_counter() - start
        self.model.zero_grad(set_to_none=True)
        return elapsed

    def peak_bytes(self, mode: str) -> int:
        """On CUDA what was allocated at most; on the CPU the largest resident set of a process that does one step."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step(mode)
            return torch.cuda.max_memory_allocated()
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=self._report_peak, args=(mode, sender))
        process.start()
        peak = receiver.recv_bytes()
        process.join()
        return int(peak)

    def _report_peak(self, mode: str, sender) -> None:
        torch.set_num_threads(1)
        self.step(mode)
        sender.send_bytes(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024).encode())

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--checkpointing", action="store_true", help="recompute every layer in the backward")
    for name, value in SHAPES["cpu"].items():
        parser.add_argument(f"--{name}", type=int, help=f"default {value} on cpu, {SHAPES['cuda'][name]} on cuda")
    options = parser.parse_args()
    shape = {name: getattr(options, name) or default for name, default in SHAPES[options.device].items()}
    if options.device == "cpu":
        torch.set_num_threads(1)  # steadier, and forked processes may not use the threads of their parent

    bench = Bench(options.device, shape, options.checkpointing)
    print(f"{shape['layers']} MoE layers, {shape['experts']} experts, top {shape['top_k']}, hidden {shape['hidden']}, "
          f"{shape['batch']} x {shape['width']} tokens, {options.device}, "
          f"{'checkpointed, ' if options.checkpointing else ''}median of {options.repeats} repeats")  # fmt: skip
    peaks = {mode: bench.peak_bytes(mode) for mode in MODES}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for mode in MODES:
        bench.step(mode)
    for repeat in range(options.repeats):
        for mode in MODES if repeat % 2 else reversed(MODES):  # no mode always runs first
            times[mode].append(bench.step(mode))
        print(f"\rrepeat {repeat + 1} of {options.repeats}", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(f"{'mode':22} {'time':>9} {'ratio':>7} {'spread':>15}   {'peak memory':>11} {'ratio':>7}")
    for mode in MODES:
        ratios = sorted(a / b for a, b in zip(times[mode], times["native"], strict=True))
        quarter = len(ratios) // 4
        print(
            f"{mode:22} {statistics.median(times[mode]) * 1e3:6.1f} ms {statistics.median(ratios):7.3f} "
            f"{ratios[quarter]:6.3f} - {ratios[-1 - quarter]:6.3f}   {peaks[mode] / 2**20:7.0f} MiB "
            f"{peaks[mode] / peaks['native']:7.3f}"
        )


if __name__ == "__main__":
    main()
