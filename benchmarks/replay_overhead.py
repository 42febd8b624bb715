"""Cost of recording and replaying: forward and backward of one micro-batch against native routing.

python benchmarks/replay_overhead.py                      # a small model on the CPU, about a minute
python benchmarks/replay_overhead.py --device cuda        # 24 MoE layers, 64 experts, top 8, 16k tokens, bf16
python benchmarks/replay_overhead.py --device cuda --model megatron --checkpointing   # 48 layers, 128 experts, 32k

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
from torch import nn

import moe_replay as mr

SHAPES = {
    "cpu": {"layers": 4, "experts": 64, "top_k": 8, "hidden": 256, "intermediate": 128, "batch": 2, "width": 512},
    "cuda": {"layers": 24, "experts": 64, "top_k": 8, "hidden": 2048, "intermediate": 768, "batch": 4, "width": 4096},
    "megatron": {
        "layers": 48,
        "experts": 128,
        "top_k": 8,
        "hidden": 1024,
        "intermediate": 256,
        "batch": 16,
        "width": 2048,
    },
}
VOCABULARY = 4096
MODES = ("native", "attached, idle", "record", "replay", "replay, some native", "replay, observed")


def transformers_model(shape: dict[str, int], device: str, checkpointing: bool) -> nn.Module:
    """A Qwen3-MoE, bf16 on CUDA."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
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
        model = Qwen3MoeForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class GroupedExperts(nn.Module):
    """The experts of one Megatron-Core layer as two grouped matrix products of torch."""

    def __init__(self, num_local_experts: int, config, pg_collection=None) -> None:
        super().__init__()
        inner, outer = config.moe_ffn_hidden_size, config.hidden_size
        self.up = nn.Parameter(torch.randn(num_local_experts, outer, 2 * inner) * outer**-0.5)
        self.down = nn.Parameter(torch.randn(num_local_experts, inner, outer) * inner**-0.5)

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """hidden (tokens, H) sorted by expert, with the gate weight of each."""
        ends = tokens_per_expert.to(hidden.device).cumsum(0).to(torch.int32)
        gate, value = torch._grouped_mm(hidden, self.up, offs=ends).chunk(2, dim=-1)
        scaled = nn.functional.silu(gate) * value * probs[:, None].to(hidden.dtype)
        return torch._grouped_mm(scaled, self.down, offs=ends), None


def megatron_model(shape: dict[str, int], device: str, checkpointing: bool) -> nn.Module:
    """A Megatron-Core GPT on one rank, of plain torch parts (no TransformerEngine)."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if device == "cpu":
        from moe_replay.megatron import cpu as megatron_cpu

        megatron_cpu.enable()
    elif not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 forgets to define it where TransformerEngine is missing
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        num_attention_heads=max(1, shape["hidden"] // 128),
        num_moe_experts=shape["experts"],
        moe_router_topk=shape["top_k"],
        moe_ffn_hidden_size=shape["intermediate"],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_cpu_initialization=device == "cpu",
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **(recompute if checkpointing else {}),
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if device == "cuda":  # 128 experts one by one would measure nothing but kernel launches
        for layer in spec.layer_specs:
            layer.submodules.mlp.submodules.experts = ModuleSpec(GroupedExperts)
    model = GPTModel(config, spec, VOCABULARY, shape["width"], position_embedding_type="rope")
    return model.to(device, dtype).train()


class Bench:
    """One model, one micro-batch, one function for each mode."""

    def __init__(self, kind: str, device: str, shape: dict[str, int], checkpointing: bool) -> None:
        torch.manual_seed(0)
        self.kind, self.device = kind, device
        self.model = {"transformers": transformers_model, "megatron": megatron_model}[kind](
            shape, device, checkpointing
        )
        ids = torch.randint(VOCABULARY, (shape["batch"], shape["width"]))
        self.ids = ids.to(device)
        self.batch, self.partial = self._routes(ids)

    def _logits(self) -> torch.Tensor:
        if self.kind == "transformers":
            return self.model(self.ids).logits
        width = self.ids.shape[1]
        positions = torch.arange(width, device=self.device).expand_as(self.ids)
        causal = torch.ones((1, 1, width, width), dtype=torch.bool, device=self.device).triu(1)
        return self.model(self.ids, positions, causal)

    def _routes(self, ids: torch.Tensor) -> tuple[mr.RouteBatch, mr.RouteBatch]:
        """Recorded routes on the host, as they come from a rollout: all covered, and with one token in 16 uncovered."""
        replay = mr.attach(self.model)
        with torch.no_grad(), replay.record() as recording:
            self._logits()
        replay.detach()
        layout = mr.TokenLayout.padded([ids.shape[1]] * ids.shape[0])
        layout = layout.sequence_major() if self.kind == "megatron" else layout
        traces = recording.traces(layout, ids.numpy())
        holes = np.arange(ids.shape[1]) % 16 != 15
        cut = [mr.RouteTrace(t.token_ids, t.routed_experts, t.layers, holes, num_experts=t.num_experts) for t in traces]
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
                loss = self._logits().float().logsumexp(-1).mean()
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
    parser.add_argument("--model", choices=["transformers", "megatron"], default="transformers")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:], help="besides native")
    parser.add_argument("--checkpointing", action="store_true", help="recompute every layer in the backward")
    for name, value in SHAPES["cpu"].items():
        parser.add_argument(f"--{name}", type=int, help=f"default {value} on cpu")
    options = parser.parse_args()
    defaults = SHAPES["megatron" if (options.device, options.model) == ("cuda", "megatron") else options.device]
    shape = {name: getattr(options, name) or default for name, default in defaults.items()}
    if options.device == "cpu":
        torch.set_num_threads(1)  # steadier, and forked processes may not use the threads of their parent

    bench = Bench(options.model, options.device, shape, options.checkpointing)
    print(
        f"{options.model}: {shape['layers']} MoE layers, {shape['experts']} experts, top {shape['top_k']}, "
        f"hidden {shape['hidden']}, {shape['batch']} x {shape['width']} tokens, {options.device}, "
        f"{'checkpointed, ' if options.checkpointing else ''}median of {options.repeats} repeats"
    )
    modes = ["native", *options.modes]
    bench.step("native")  # warm up
    peaks = {mode: bench.peak_bytes(mode) for mode in modes}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for repeat in range(options.repeats):
        for mode in modes if repeat % 2 else reversed(modes):  # no mode always runs first
            times[mode].append(bench.step(mode))
        print(f"\rrepeat {repeat + 1} of {options.repeats}", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(f"{'mode':22} {'time':>9} {'ratio':>7} {'spread':>15}   {'peak memory':>11} {'ratio':>7}")
    for mode in modes:
        ratios = sorted(a / b for a, b in zip(times[mode], times["native"], strict=True))
        quarter = len(ratios) // 4
        print(
            f"{mode:22} {statistics.median(times[mode]) * 1e3:6.1f} ms {statistics.median(ratios):7.3f} "
            f"{ratios[quarter]:6.3f} - {ratios[-1 - quarter]:6.3f}   {peaks[mode] / 2**20:7.0f} MiB "
            f"{peaks[mode] / peaks['native']:7.3f}"
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
