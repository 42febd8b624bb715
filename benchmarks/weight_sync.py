"""Cost of sending weights to vLLM: seconds, GB/s and extra memory of each transport, in one run.

python benchmarks/weight_sync.py                                  # a GPU that trainer and vLLM share
python benchmarks/weight_sync.py --models tiny --kinds http ipc nccl    # on a CPU

small: a random Qwen3-MoE of 0.8 B parameters, 1.6 GB. slice: 8 layers of Qwen3-30B-A3B at full width, 10.9 GB. The
trainer is this process, with all weights on its device. Two sets of weights, whose experts are numbered differently,
are sent alternately; each update is checked against the log-probs of the engine after an update by the first transport.
Extra memory is the peak increase on the device during an update, over all processes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from parts.qwen3_moe import SLICE, SMALL, TINY
from torch import Tensor

from moe_replay.engines.vllm.engine import VllmEngine
from moe_replay.train.config.sections import WeightSyncConfig
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.sync.weight_sync import EngineSync, SyncReport
from moe_replay.weights.identity import Probe
from moe_replay.weights.source import Group, TensorInfo

MODELS = {"tiny": TINY, "small": SMALL, "slice": SLICE}


def random_weights(config: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return random weights under their names in the checkpoint."""
    hidden, expert = config["hidden_size"], config["moe_intermediate_size"]
    dtype: torch.dtype = getattr(torch, config["torch_dtype"])
    heads, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes |= {f"{start}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{start}self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
        for name, size in {"q": heads, "k": kv, "v": kv}.items():
            shapes[f"{start}self_attn.{name}_proj.weight"] = (size, hidden)
        shapes |= {f"{start}self_attn.o_proj.weight": (hidden, heads)}
        shapes |= {f"{start}mlp.gate.weight": (config["num_experts"], hidden)}
        for number in range(config["num_experts"]):
            of_expert = f"{start}mlp.experts.{number}."
            shapes |= {f"{of_expert}{name}_proj.weight": (expert, hidden) for name in ("gate", "up")}
            shapes[f"{of_expert}down_proj.weight"] = (hidden, expert)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = 1 + 0.1 * torch.randn(shape, generator=generator, device=device).to(dtype)
        else:
            weights[name] = torch.randn(shape, generator=generator, device=device, dtype=dtype) / math.sqrt(shape[1])
    return weights


class Source:
    """Weights on one device; with `shift`, expert i has the weights of expert i + shift."""

    def __init__(self, weights: Mapping[str, Tensor], experts: int, shift: int) -> None:
        self._weights = {name: weights[_shifted(name, experts, shift)] for name in weights}

    def metadata(self) -> Sequence[TensorInfo]:
        return [TensorInfo.of(name, tensor) for name, tensor in self._weights.items()]

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        by_layer: dict[str, Group] = {}
        for name, tensor in self._weights.items():
            layer, inside, rest = name.partition("layers.")
            by_layer.setdefault(layer + inside + rest.partition(".")[0], []).append((name, tensor))
        yield from by_layer.values()


def _shifted(name: str, experts: int, shift: int) -> str:
    before, found, after = name.partition(".experts.")
    number, _, rest = after.partition(".")
    return f"{before}{found}{(int(number) + shift) % experts}.{rest}" if found else name


class MemoryWatch:
    """The least free memory of a device while it is open."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stop = device, threading.Event()
        self.extra_gib = math.nan

    def __enter__(self) -> MemoryWatch:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._before = self._least = torch.cuda.mem_get_info()[0]
            self._thread = threading.Thread(target=self._watch)
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._least = min(self._least, torch.cuda.mem_get_info(self._device)[0])

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._device.type == "cuda":
            self._thread.join()
            self.extra_gib = (self._before - self._least) / 2**30


def measure(name: str, options: argparse.Namespace, device: torch.device, folder: Path) -> list[dict[str, Any]]:
    """Return the figures of every kind with one model."""
    config = MODELS[name]
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(config, device)
    memory = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.3} if device.type == "cuda" else {}
    began = time.monotonic()
    engine = VllmEngine(
        folder, load_format="dummy", max_model_len=512, enforce_eager=True, dtype=config["torch_dtype"], **memory
    )
    print(f"{name}: vLLM started in {time.monotonic() - began:.0f} s", flush=True)
    sources = [Source(weights, config["num_experts"], shift) for shift in (0, 1)]
    tokens = [int(token) for token in torch.randint(2, config["vocab_size"], (128,))]
    probes: list[Probe | None] = [None, None]
    rows = []
    try:
        synced, version = SyncedEngine(engine), 0
        for kind in options.kinds:
            sync = EngineSync(WeightSyncConfig(transport=kind, chunk_mib=options.chunk_mib), device)
            reports: list[tuple[SyncReport, float]] = []
            for number in range(2 + (kind != "http") * 2 + options.repeats):
                version += 1
                with MemoryWatch(device) as watch:
                    report = sync.send(sources[number % 2], synced, version, probes[number % 2])
                reports.append((report, watch.extra_gib))
                if probes[number % 2] is None:
                    logprobs = engine.prompt_logprobs(tokens)
                    probes[number % 2] = Probe(token_ids=tokens, logprobs=logprobs, tolerance=1e-3)
                print(f"  {kind} {number}: {report.seconds:.3f} s, {watch.extra_gib:.2f} GiB extra", flush=True)
            first, later = reports[0], reports[1:]
            seconds = statistics.median(report.seconds for report, _ in later)
            rows.append(
                {
                    "model": name,
                    "kind": kind,
                    "gigabytes": round(first[0].nbytes / 1e9, 3),
                    "first_s": round(first[0].seconds, 3),
                    "median_s": round(seconds, 3),
                    "least_s": round(min(report.seconds for report, _ in later), 3),
                    "gb_per_s": round(first[0].nbytes / 1e9 / seconds, 2),
                    "extra_gib_first": round(first[1], 2),
                    "extra_gib": round(max(extra for _, extra in later), 2),
                }
            )
        scores = [probe.logprobs for probe in probes if probe is not None]
        differ = float(abs(scores[0] - scores[1]).max())
        print(f"  the two sets of weights differ by up to {differ:.2g} in log-probs", flush=True)
    finally:
        engine.close()
    return rows


def main() -> None:
    """Measure all kinds with all models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["small", "slice"])
    parser.add_argument("--kinds", nargs="+", default=["http", "ipc"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--chunk-mib", type=int, default=512)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, options, device, Path(folder))
        print()
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
