"""Cost of captured routes and sampling masks for vLLM on a GPU: tokens/s, all variants in one run.

python benchmarks/rollout_gpu.py                                  # 64, 512 and 1024 sequences, CUDA graphs
python benchmarks/rollout_gpu.py --sequences 512 --variants plain kv_slot --profile
python benchmarks/rollout_gpu.py --beside vllm-0.30               # a folder with another vLLM, in the same run

plain           vLLM without routes
kv_slot, vllm   our engine with routes, by our capture and by vLLM's own
masks           vLLM without routes, with sampling masks; compared with plain at the same top_k and top_p

A random Qwen3-MoE of 0.8 B parameters (15 MoE layers, 64 experts, top 8) samples after prompts of 64 tokens. Each
variant runs in a separate process; they start together and then alternate, so that a ratio compares neighbours in time.
A short warm-up batch of each is not counted. --profile samples one more batch of each size with timers in the worker.
--tiny is a smoke test on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from parts.qwen3_moe import SMALL, TINY

PROMPT = 64
WARM_UP = 32  # tokens
ANSWER = "answer: "
TRUNCATION = {"top_k": 50, "top_p": 0.95}
Rates = dict[str, list[float]]


@dataclass(frozen=True)
class Batch:
    """What a process is asked to sample; its answer is tokens/s, or a profile."""

    sequences: int
    tokens: int
    seed: int
    truncated: bool = False
    profiled: bool = False


def main() -> None:
    """Start one process for each variant, have them sample in turn, and print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sequences", type=int, nargs="+", default=[64, 512, 1024])
    options.add_argument("--tokens", type=int, nargs="+", default=[512, 256, 192], help="of a completion, per size")
    options.add_argument("--variants", nargs="+", default=["plain", "kv_slot", "vllm"])
    options.add_argument("--beside", type=Path, help="folder with another vLLM: its variants sample in turn with these")
    options.add_argument("--mask-sequences", type=int, default=512, help="size of the batches with masks")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--profile", action="store_true", help="say where the time of a step goes")
    options.add_argument("--output", type=Path, help="file for everything that was measured, as JSON")
    options.add_argument("--eager", action="store_true", help="no CUDA graphs: a quick look")
    options.add_argument("--tiny", action="store_true", help="a tiny model in float32, on a CPU")
    options.add_argument("--child", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        serve(chosen)
        return
    began = time.perf_counter()
    children = {variant: Child(variant) for variant in chosen.variants}
    if chosen.beside:  # without masks, which not every vLLM has
        of_routes = [variant for variant in chosen.variants if variant != "masks"]
        children |= {f"{variant} beside": Child(variant, chosen.beside) for variant in of_routes}
    versions = {variant: child.answer() for variant, child in children.items()}  # they start side by side
    print(f"vLLM {versions}, started in {time.perf_counter() - began:.0f} s", flush=True)
    found: dict[str, Any] = {"versions": versions, "routes": {}, "masks": {}, "profiles": {}}
    tokens = dict(zip(chosen.sequences, [*chosen.tokens, *chosen.tokens[-1:] * len(chosen.sequences)], strict=False))
    of_routes = {variant: child for variant, child in children.items() if variant != "masks"}
    for count in chosen.sequences:
        found["routes"][count] = in_turn(of_routes, Batch(count, tokens[count], 0), chosen.repeats)
    if "masks" in children:
        of_masks = {name: children[name] for name in ("plain", "masks") if name in children}
        batch = Batch(chosen.mask_sequences, tokens.get(chosen.mask_sequences, 256), 0, truncated=True)
        found["masks"][chosen.mask_sequences] = in_turn(of_masks, batch, chosen.repeats)
    if chosen.profile:
        for count in chosen.sequences:
            batch = Batch(count, tokens[count], 99, profiled=True)
            found["profiles"][count] = {name: child.ask(batch) for name, child in of_routes.items()}
    for child in children.values():
        child.end()
    for title, rates in (("routes", found["routes"]), ("sampling masks", found["masks"])):
        if rates:
            print(f"\n{title}, median tokens/s and median share of plain:\n{table(rates, versions, tokens)}")
    for count, profiles in found["profiles"].items():
        print(f"\na step of {count} sequences:\n{profile_table(profiles)}")
    if chosen.output:
        chosen.output.write_text(json.dumps(found, indent=1))


def in_turn(children: dict[str, Child], batch: Batch, repeats: int) -> Rates:
    """Return tokens/s of each variant in each repeat; none of them always comes first."""
    rates: Rates = {variant: [] for variant in children}
    for child in children.values():
        child.ask(replace(batch, tokens=WARM_UP))
    for repeat in range(repeats):
        for variant in (*children,) if repeat % 2 else reversed((*children,)):
            rates[variant].append(children[variant].ask(replace(batch, seed=repeat + 1)))
    print(batch.sequences, {variant: [round(rate) for rate in every] for variant, every in rates.items()}, flush=True)
    return rates


def table(rates: dict[int, Rates], versions: dict[str, Any], tokens: dict[int, int]) -> str:
    """Median tokens/s of each variant, and the median over repeats of its share of plain."""
    columns = " | ".join(f"{count} sequences of {PROMPT} + {tokens.get(count, 256)}" for count in rates)
    lines = [f"| | {columns} |", "|---" * (len(rates) + 1) + "|"]
    for variant in next(iter(rates.values())):
        cells = []
        for found in rates.values():
            beside = " beside" if variant.endswith(" beside") else ""
            plain = found.get(f"plain{beside}", found[variant])
            shares = [one / other for one, other in zip(found[variant], plain, strict=True)]
            cells.append(
                f"{statistics.median(found[variant]):,.0f} ({statistics.median(shares):.3f}: "
                f"{min(shares):.3f} to {max(shares):.3f})"
            )
        lines.append(f"| {variant.removesuffix(' beside')}, vLLM {versions[variant]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def profile_table(profiles: dict[str, dict[str, float]]) -> str:
    """Return what the timers have measured, a line for each."""
    names = sorted({name for profile in profiles.values() for name in profile})
    lines = ["| | " + " | ".join(profiles) + " |", "|---" * (len(profiles) + 1) + "|"]
    for name in names:
        cells = (f"{profile[name]:.4g}" if name in profile else "" for profile in profiles.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Child:
    """A process with one engine, which samples when it is asked to."""

    def __init__(self, variant: str, packages: Path | None = None) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", variant]
        self.cache = tempfile.TemporaryDirectory()  # of compiled code: two that start at once must not share one
        environment = os.environ | {"VLLM_CACHE_ROOT": self.cache.name}
        if packages is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, env=environment)

    def ask(self, batch: Batch) -> Any:
        """Return the answer to one line."""
        assert self.process.stdin is not None
        print(json.dumps(asdict(batch)), file=self.process.stdin, flush=True)
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
        self.cache.cleanup()


def serve(chosen: argparse.Namespace) -> None:
    """Sample the batches that come in on stdin, and print tokens/s of each."""
    import vllm

    model = (TINY if chosen.tiny else SMALL | {"num_hidden_layers": 16}) | {"mlp_only_layers": [0]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        options = {
            "dtype": model["torch_dtype"],
            "load_format": "dummy",
            "max_model_len": PROMPT + max(chosen.tokens) + 64,
            "max_num_seqs": max(chosen.sequences),
            "gpu_memory_utilization": 0.8 / (len(chosen.variants) * (2 if chosen.beside else 1)),  # free at the start
            "kv_cache_memory_bytes": 2**27 if chosen.tiny else 12 * 10**9,  # room for 1024 sequences
            "enforce_eager": chosen.eager or chosen.tiny,
        }
        if not options["enforce_eager"]:
            options["cudagraph_capture_sizes"] = sorted({1, 2, 4, 8, *chosen.sequences})  # a quick start
        routes = chosen.child in ("kv_slot", "vllm")
        sampler = RoutedEngine(folder, options, chosen) if routes else Plain(folder, options, chosen)
        print(ANSWER + json.dumps(vllm.__version__), flush=True)
        for line in sys.stdin:
            batch = Batch(**json.loads(line))
            chance = np.random.default_rng([batch.sequences, batch.seed])
            prompts = chance.integers(2, model["vocab_size"], (batch.sequences, PROMPT)).tolist()
            if batch.profiled:
                sampler.profile(True)
            began = time.perf_counter()
            tokens = sampler.run(prompts, batch)
            seconds = time.perf_counter() - began
            told = {**sampler.profile(False), "batch_s": seconds} if batch.profiled else tokens / seconds
            print(ANSWER + json.dumps(told), flush=True)
        sampler.close()


class RoutedEngine:
    """The engine that the trainer uses."""

    def __init__(self, folder: str, options: dict[str, Any], chosen: argparse.Namespace) -> None:
        from parts.step_timers import use_timed_workers

        from moe_replay.engines.vllm.engine import VllmEngine

        if chosen.profile:
            use_timed_workers()
        self.engine = VllmEngine(folder, capture=chosen.child, **options)
        self.timed: dict[str, float] = {}

    def run(self, prompts: list[list[int]], batch: Batch) -> int:
        """Sample, and return the number of tokens."""
        from moe_replay.records import SamplingParams

        params = SamplingParams(n=1, max_tokens=batch.tokens, ignore_eos=True)
        found = self.engine.generate(prompts, params)
        if self.timed:
            self.timed["after_last_token_s"] = time.perf_counter() - self.timed.pop("last_token")
        return sum(len(one.completion_ids) for group in found for one in group)

    def profile(self, on: bool) -> dict[str, float]:
        """Time steps and what follows the last of them from now on, or return what was measured."""
        if not on:
            told = {name: value for name, value in self.timed.items() if name != "last_token"}
            return told | self.time_steps(on)
        self.time_steps(on)
        output, build, timed = self.engine._output, self.engine._sample, self.timed
        timed.update(last_token=0.0, traces_s=0.0)

        async def timed_output(*arguments: Any) -> Any:
            found = await output(*arguments)
            timed["last_token"] = time.perf_counter()
            return found

        def timed_build(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = build(*arguments)
            timed["traces_s"] += time.perf_counter() - began
            return found

        vars(self.engine).update(_output=timed_output, _sample=timed_build)
        return {}

    def time_steps(self, on: bool) -> dict[str, float]:
        """Start or stop the timers of our worker; vLLM's own has none."""
        if self.engine.capture != "kv_slot":
            return {}
        return self.engine._loop.run(self.engine._llm.collective_rpc("replay_profile", args=(on,)))[0]

    def close(self) -> None:
        """End vLLM."""
        self.engine.close()


class Plain:
    """vLLM without routes, with the same settings otherwise."""

    def __init__(self, folder: str, options: dict[str, Any], chosen: argparse.Namespace) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs

        self.loop = asyncio.new_event_loop()
        settings: dict[str, Any] = {
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
        }
        self.masked = chosen.child == "masks"
        if self.masked:
            settings["return_sampling_mask"] = True
        elif chosen.profile:
            kind = "CpuTimedWorker" if chosen.tiny else "GpuTimedWorker"
            settings["worker_cls"] = f"parts.step_timers.{kind}"
        self.llm = self.loop.run_until_complete(self.start(AsyncEngineArgs(model=folder, **settings, **options)))

    async def start(self, arguments: Any) -> Any:
        """Start vLLM inside the loop that it will run in."""
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(arguments)

    def run(self, prompts: list[list[int]], batch: Batch) -> int:
        """Sample, and return the number of tokens."""
        return self.loop.run_until_complete(self.sample_all(prompts, batch))

    async def sample_all(self, prompts: list[list[int]], batch: Batch) -> int:
        """All prompts at once."""
        return sum(await asyncio.gather(*(self.sample(number, prompt, batch) for number, prompt in enumerate(prompts))))

    async def sample(self, number: int, prompt: list[int], batch: Batch) -> int:
        """One prompt."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=batch.tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **(TRUNCATION if batch.truncated or self.masked else {}),
        )
        last = None
        async for output in self.llm.generate({"prompt_token_ids": prompt}, params, f"{time.monotonic_ns()}.{number}"):
            last = output
        assert last is not None
        return len(last.outputs[0].token_ids)

    def profile(self, on: bool) -> dict[str, float]:
        """Time steps from now on, or return what was measured."""
        return self.loop.run_until_complete(self.llm.collective_rpc("replay_profile", args=(on,)))[0]

    def close(self) -> None:
        """End vLLM."""
        self.llm.shutdown()


if __name__ == "__main__":
    main()
