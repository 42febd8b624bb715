"""What captured routes cost vLLM on a GPU: tokens/s plain, with vLLM's own capture and with ours, in one run.

python benchmarks/rollout_gpu.py                                  # 64, 512 and 1024 sequences, CUDA graphs
python benchmarks/rollout_gpu.py --sequences 512 --captures plain ours

A random Qwen3-MoE of 0.8 B parameters (15 MoE layers, 64 experts, top 8) samples 512 tokens after prompts of 64. Each
capture has a process of its own; they start at once and then sample in turn, so that a share compares neighbours in
time. The first batch of each is not counted; the median of the others is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, COMPLETION = 64, 512
ANSWER = "answer: "
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 16,
    "mlp_only_layers": [0],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def main() -> None:
    """Start one process for each capture, have them sample in turn, and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sequences", type=int, nargs="+", default=[64, 512, 1024])
    options.add_argument("--captures", nargs="+", default=["plain", "ours", "vllm"])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--eager", action="store_true", help="no CUDA graphs: a quick look")
    options.add_argument("--child", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        serve(chosen.child, chosen.sequences, chosen.eager, 0.8 / len(chosen.captures))
        return
    began = time.perf_counter()
    children = {capture: Child(capture) for capture in chosen.captures}
    versions = {capture: child.answer() for capture, child in children.items()}  # they start side by side
    print(f"vLLM {versions}, started in {time.perf_counter() - began:.0f} s", flush=True)
    rates: dict[str, dict[int, list[float]]] = {capture: {n: [] for n in chosen.sequences} for capture in children}
    for count in chosen.sequences:
        for repeat in range(chosen.repeats + 1):
            for capture in (*children,) if repeat % 2 else reversed((*children,)):  # none always runs first
                rate = children[capture].ask([count, repeat])
                if repeat:  # the first batch warms up
                    rates[capture][count].append(rate)
        print(count, {capture: [round(rate) for rate in found[count]] for capture, found in rates.items()}, flush=True)
    for child in children.values():
        child.end()
    print(table(rates, versions, chosen.sequences))


def table(rates: dict[str, dict[int, list[float]]], versions: dict[str, Any], sequences: list[int]) -> str:
    """Median tokens/s of each capture, and the median over repeats of its share of plain."""
    columns = " | ".join(f"{count} sequences" for count in sequences)
    lines = [f"| capture | {columns} |", "|---" * (len(sequences) + 1) + "|"]
    for capture, found in rates.items():
        cells = []
        for n in sequences:
            plain = rates.get("plain", rates[capture])[n]
            share = statistics.median(a / b for a, b in zip(found[n], plain, strict=True))
            cells.append(f"{statistics.median(found[n]):,.0f} tokens/s ({share:.3f})")
        lines.append(f"| {capture}, vLLM {versions[capture]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Child:
    """A process with one engine, which samples when it is asked to."""

    def __init__(self, capture: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", capture]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: Any) -> Any:
        """Return the answer to one line."""
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """Return the next line that is an answer: vLLM may print others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise SystemExit(f"{self.process.args} ended with status {self.process.wait()}")

    def end(self) -> None:
        """Close its input, and wait until it has ended."""
        self.process.communicate()


def serve(capture: str, sequences: list[int], eager: bool, memory: float) -> None:
    """Sample batches of the sizes that come in on stdin, and print tokens/s of each."""
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        options = {
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_model_len": PROMPT + COMPLETION + 64,
            "max_num_seqs": 1024,
            "gpu_memory_utilization": memory,  # must be free at the start
            "kv_cache_memory_bytes": 12 * 10**9,  # room for 1024 sequences
            "enforce_eager": eager,
        }
        if not eager:
            options["cudagraph_capture_sizes"] = sorted({1, 2, 4, 8, *sequences})  # a quick start
        sampler = Plain(folder, options) if capture == "plain" else Ours(folder, options, capture)
        print(ANSWER + json.dumps(vllm.__version__), flush=True)
        for line in sys.stdin:
            count, repeat = json.loads(line)
            prompts = np.random.default_rng([count, repeat]).integers(2, MODEL["vocab_size"], (count, PROMPT)).tolist()
            began = time.perf_counter()
            tokens = sampler.run(prompts)
            print(ANSWER + json.dumps(tokens / (time.perf_counter() - began)), flush=True)
        sampler.close()


class Ours:
    """The engine that the trainer uses."""

    def __init__(self, folder: str, options: dict[str, Any], capture: str) -> None:
        from moe_replay.rollout.types import SamplingParams
        from moe_replay.rollout.vllm import VllmEngine

        self.engine = VllmEngine(folder, capture=capture, **options)
        self.params = SamplingParams(n=1, max_tokens=COMPLETION, ignore_eos=True)

    def run(self, prompts: list[list[int]]) -> int:
        """Sample, and return the number of tokens."""
        return sum(len(one.completion_ids) for group in self.engine.generate(prompts, self.params) for one in group)

    def close(self) -> None:
        """End vLLM."""
        self.engine.close()


class Plain:
    """vLLM without routes, with the same settings otherwise."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs

        self.loop = asyncio.new_event_loop()
        settings = {
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
        }
        self.llm = self.loop.run_until_complete(self.start(AsyncEngineArgs(model=folder, **settings, **options)))

    async def start(self, arguments: Any) -> Any:
        """Start vLLM inside the loop that it will run in."""
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(arguments)

    def run(self, prompts: list[list[int]]) -> int:
        """Sample, and return the number of tokens."""
        return self.loop.run_until_complete(self.sample_all(prompts))

    async def sample_all(self, prompts: list[list[int]]) -> int:
        """All prompts at once."""
        return sum(await asyncio.gather(*(self.sample(number, prompt) for number, prompt in enumerate(prompts))))

    async def sample(self, number: int, prompt: list[int]) -> int:
        """One prompt."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=COMPLETION,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        last = None
        async for output in self.llm.generate({"prompt_token_ids": prompt}, params, f"{time.monotonic_ns()}.{number}"):
            last = output
        assert last is not None
        return len(last.outputs[0].token_ids)

    def close(self) -> None:
        """End vLLM."""
        self.llm.shutdown()


if __name__ == "__main__":
    main()
