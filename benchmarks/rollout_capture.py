"""Cost of routes for a rollout: tokens/s with and without capture, and bytes per token from server to trainer.

python benchmarks/rollout_capture.py               # vLLM on CPU, three engines in one run: a few minutes
python benchmarks/rollout_capture.py --bytes-only  # only the bytes, at the sizes of real models: seconds

Each repeat runs every engine once; a ratio is the median over repeats of (engine / vLLM without routes) within one.
"""

from __future__ import annotations

import argparse
import base64
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import moe_replay as mr
from moe_replay.engines.server.sample_wire import encode_samples
from moe_replay.records import FinishReason, Sample, SamplingParams

PROMPTS, PROMPT_TOKENS, GROUP, NEW_TOKENS, VOCABULARY = 4, 256, 4, 64, 1024
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 2**28}
SHAPES = {  # decoder layers, dense ones among them, experts, top_k
    "Qwen3-30B-A3B": (48, 0, 128, 8),
    "GLM-4.5": (92, 3, 160, 8),
    "DeepSeek-V3": (61, 3, 256, 8),
    "Qwen3-Next-80B": (48, 0, 512, 10),
}


def save_model(folder: str) -> None:
    """A random Qwen3-MoE of 8 layers, 32 experts, top 4."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def plain_vllm(folder: str, prompts: list[list[int]], routes: bool) -> Callable[[], Any]:
    """vLLM's own interface, with or without routes."""
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    llm = LLM(folder, skip_tokenizer_init=True, enable_return_routed_experts=routes, **ENGINE)
    params = VllmParams(
        n=GROUP, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return lambda: llm.generate(requests, params, use_tqdm=False)


def speed(repeats: int) -> None:
    """Tokens per second of three engines, against vLLM without routes."""
    from moe_replay.engines.vllm.engine import VllmEngine

    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        prompts = random.integers(1, VOCABULARY, (PROMPTS, PROMPT_TOKENS)).tolist()
        engine = VllmEngine(folder, **ENGINE)
        params = SamplingParams(n=GROUP, max_tokens=NEW_TOKENS, ignore_eos=True)
        runs = {
            "vLLM without routes": plain_vllm(folder, prompts, routes=False),
            "vLLM with routes": plain_vllm(folder, prompts, routes=True),
            "moe-replay: checked traces": lambda: engine.generate(prompts, params),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(repeats):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        engine.close()
    tokens = PROMPTS * GROUP * NEW_TOKENS
    base = seconds["vLLM without routes"]
    print(f"\n{'rollout':28} {'tokens/s':>9} {'of without':>11}")
    for name, taken in seconds.items():
        ratio = statistics.median(b / t for b, t in zip(base, taken, strict=True))
        print(f"{name:28} {tokens / statistics.median(taken):9.0f} {ratio:10.2f}x")


def group_of(decoder_layers: int, dense: int, experts: int, top_k: int, n: int, prompt: int, new: int) -> list[Sample]:
    """A group of samples with random routes."""
    random = np.random.default_rng(0)

    def routes(tokens: int) -> np.ndarray:
        scores = random.random((tokens, decoder_layers - dense, experts), np.float32)
        return np.argpartition(-scores, top_k, axis=-1)[..., :top_k]

    shared, samples = routes(prompt), []
    prompt_ids = random.integers(0, 150_000, prompt)
    for _ in range(n):
        ids = np.concatenate([prompt_ids, random.integers(0, 150_000, new)])
        valid = np.arange(len(ids)) < len(ids) - 1
        layers = range(dense, decoder_layers)
        trace = mr.RouteTrace(ids, np.concatenate([shared, routes(new)]), layers, valid, num_experts=experts)
        samples.append(
            Sample(
                prompt_ids=trace.token_ids[:prompt],
                completion_ids=trace.token_ids[prompt:],
                logprobs=np.zeros(new, np.float32),
                finish_reason=FinishReason.LENGTH,
                trace=trace,
                weight_version=0,
            )
        )
    return samples


def engine_bytes(sample: Sample, decoder_layers: int, dtype: type, npy: bool) -> int:
    """Bytes of the routes of one sample as engines send them: every layer, every prompt row, base64."""
    rows = np.zeros((len(sample.trace) - 1, decoder_layers, sample.trace.top_k), dtype)
    rows[:, list(sample.trace.layers)] = sample.trace.routed_experts[:-1]
    file = io.BytesIO()
    np.save(file, rows) if npy else file.write(rows.tobytes())
    return len(base64.b64encode(file.getvalue()))


def wire(n: int, prompt: int, new: int) -> None:
    """Bytes per sampled token."""
    print(f"\nbytes per sampled token: {n} samples of a prompt of {prompt} tokens, {new} new tokens each")
    print(f"{'model':16} {'base64 int32':>13} {'base64 .npy':>13} {'moe-replay':>13} {'less than int32':>16}")
    for name, shape in SHAPES.items():
        samples = group_of(*shape, n, prompt, new)
        narrow = np.uint8 if shape[2] <= 256 else np.uint16
        sizes = [
            sum(engine_bytes(sample, shape[0], np.int32, npy=False) for sample in samples),
            sum(engine_bytes(sample, shape[0], narrow, npy=True) for sample in samples),
            len(encode_samples(samples)),
        ]
        per_token = [size / (n * new) for size in sizes]
        print(f"{name:16} " + " ".join(f"{size:13.0f}" for size in per_token) + f" {sizes[0] / sizes[2]:15.1f}x")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes-only", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    wire(n=8, prompt=256, new=128)
    wire(n=8, prompt=1024, new=128)
    if not options.bytes_only:
        speed(options.repeats)


if __name__ == "__main__":
    main()
