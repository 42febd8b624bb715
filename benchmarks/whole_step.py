"""The trainer's part of a step against a plain loop and TRL: the same model, sequences and micro-batches, in one run.

    python benchmarks/whole_step.py --device cuda           # 8 layers of Qwen3-30B-A3B in full width, bfloat16
    python benchmarks/whole_step.py --tiny                  # a tiny model on the CPU: that everything runs
    python benchmarks/whole_step.py --device cuda --write benchmarks/baselines/h200.json
    python benchmarks/whole_step.py --device cuda --compare benchmarks/baselines/h200.json
    python benchmarks/whole_step.py --found new.json --compare benchmarks/baselines/h200.json     # without a run
    python benchmarks/whole_step.py --device cuda --memory auto     # ours with the memory that a run here would use
    python benchmarks/whole_step.py --device cuda --turns 8                       # what dispatch plans bring, see below

ours r3, ours native   FSDP2 backend and Learner. `score` and `update` with a separate old-log-prob pass, `step` as by
                       default: both together, without that pass. Optimizer, checks and metrics are included
megatron r3, native    the same with the Megatron backend on one rank
plain                  Transformers, the head in slices, recomputed layers, AdamW; on CUDA varlen attention and each
                       layer compiled. No replay, no checks
trl                    GRPOTrainer of TRL with the sequences given by a rollout function; `step` only

`--turns` runs R3 with dispatch plans, R3 without and native routing in turn in one process, on one backend: medians of
so many turns, and of their ratios to the turn of R3 without plans beside them. `--kernels` shows where R3 and native
routing differ: the kernels of one scoring pass and of one update, and the time in which the device waits.

Every variant runs in its own process, one after the other. MFU counts operations as docs/metrics.md does. `--compare`
ends with status 1 if a rate of ours, or its ratio to the plain loop or to TRL, is 5 % below the baseline's, or memory
5 % above.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from parts.kernels import Profile, difference, profile_of
from parts.plain_loop import PlainLoop
from parts.qwen3_moe import SLICE
from parts.qwen3_moe import TINY as TINY_MODEL
from parts.training import config_of, now, routed, routed_by_folder, unrouted, write_model

from moe_replay.train.backends import fsdp
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.backends.megatron import MegatronBackend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.learner import Learner
from moe_replay.train.setup import launch
from moe_replay.train.trajectories.store import InProcessStore
from moe_replay.utils.device import peak_tflops
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.model_sizes import ModelSizes

LOSS = 0.05
VARIANTS = ("ours r3", "ours native", "megatron r3", "megatron native", "plain", "trl")
OWN = ("ours", "megatron")
WORK = {"tiny": (8, 64, 256), "full": (32, 2048, 16384)}  # sequences, tokens of each, tokens of a micro-batch
TURNS = {"r3, plans": ("r3", True), "r3, no plans": ("r3", False), "native": ("off", False)}
"""Mode, and whether rows are planned."""
PACKAGES = {"megatron": ("megatron",), "trl": ("trl", "datasets")}
MODEL_KEYS = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "num_experts"),
)
Result = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; on a CPU there is no other")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--memory",
        choices=("lean", "auto"),
        default="lean",
        help="of ours: layers recomputed and gathered weights freed, or both decided as `moe-replay train` does",
    )
    parser.add_argument("--write", type=Path, help="write the results to this file")
    parser.add_argument("--turns", type=int, help="compare dispatch plans, in so many turns, in place of the variants")
    parser.add_argument(
        "--kernels", type=int, nargs="?", const=20, help="with --turns: so many kernels of R3 and native routing"
    )
    parser.add_argument("--found", type=Path, help="results of an earlier run, in place of a run")
    parser.add_argument("--compare", type=Path, help="baseline to compare with")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # of a child process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.size = "tiny" if arguments.tiny or arguments.device == "cpu" else "full"
    if arguments.turns:
        show_turns(take_turns(arguments))
        return
    if arguments.variant:
        print(json.dumps(measure(arguments.variant, arguments)))
        return
    found = json.loads(arguments.found.read_text()) if arguments.found else run(arguments)
    show(found)
    if arguments.write:
        arguments.write.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.compare and (losses := compare(found, json.loads(arguments.compare.read_text()))):
        print(*losses, sep="\n")
        raise SystemExit(1)


# ---- one run ---------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every variant in its own process; return what each measured."""
    device = torch.device(arguments.device)
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = TINY_MODEL if arguments.size == "tiny" else SLICE
        write_model(Path(folder), {key: model[key] for key in MODEL_KEYS} | {"mlp_only_layers": []}, device)
        for variant in arguments.variants:
            if not all(map(find_spec, PACKAGES.get(variant.split()[0], ()))):
                print(f"{variant}: not installed, left out")
                continue
            command = [sys.executable, __file__, "--variant", variant, "--folder", folder, "--device", arguments.device]
            command += ["--repeats", str(arguments.repeats), "--memory", arguments.memory]
            command += ["--tiny"] if arguments.tiny else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{variant} failed with status {done.returncode}")
            results[variant] = json.loads(done.stdout.splitlines()[-1])
            print(f"{variant}: {results[variant]}", flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    sequences, tokens, _ = WORK[arguments.size]
    return {
        "device": name,
        "torch": torch.__version__,
        "work": f"{sequences} sequences of {tokens} tokens",
        "results": results,
    }


def measure(variant: str, arguments: argparse.Namespace) -> Result:
    """Return tokens per second, MFU and peak memory of one variant."""
    device, folder = torch.device(arguments.device), arguments.folder
    sequences, tokens, budget = WORK[arguments.size]
    model = read_config(folder)
    if variant.startswith(OWN):
        seconds = _ours(variant, folder, device, WORK[arguments.size], arguments.repeats, arguments.memory)
    else:
        loop = {"plain": _plain, "trl": _trl}[variant]
        seconds = loop(unrouted(model, sequences, tokens), folder, device, budget, arguments.repeats)
    return _rates(seconds, ModelSizes.of(model), sequences, tokens, device)


def _rates(seconds: Result, sizes: ModelSizes, sequences: int, tokens: int, device: torch.device) -> Result:
    flops = sizes.forward_flops([tokens] * sequences, sequences * (tokens - tokens // 2))
    needed = {"score": flops.forward, "update": flops.update(frozen=False), "step": flops.update(frozen=False)}
    peak = peak_tflops(device, torch.bfloat16)
    found: Result = {}
    for part, taken in seconds.items():
        found[f"{part}_seconds"] = taken
        found[f"{part}_tokens_per_second"] = sequences * tokens / taken
        if peak is not None:
            found[f"{part}_mfu"] = needed[part] / taken / peak / 1e12
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def _median(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the seconds that some work takes, after one run to warm up."""
    taken = []
    for _ in range(repeats + 1):
        began = now(device)
        work()
        taken.append(now(device) - began)
    return statistics.median(taken[1:])


# ---- variants --------------------------------------------------------------------------------------------------------


def _settings(
    folder: Path, device: torch.device, budget: int, mode: str, old_logprobs: str = "auto", kind: str = "fsdp"
) -> TrainConfig:
    return config_of(
        folder,
        device,
        model={"gradient_checkpointing": True},
        backend={"kind": kind},
        replay={"mode": mode},
        algorithm={"old_logprobs": old_logprobs},
        batch={"tokens_per_micro_batch": budget},
        optim={"lr": 1e-7},
    )


def _ours(
    variant: str, folder: Path, device: torch.device, work: tuple[int, int, int], repeats: int, memory: str
) -> Result:
    """Return the seconds of a separate scoring pass, of the update behind it, and of both in one."""
    name, _, routing = variant.partition(" ")
    kind, mode = ("megatron" if name == "megatron" else "fsdp"), ("r3" if routing == "r3" else "off")
    sequences, tokens, budget = work
    trajectories = routed_by_folder(folder, device, sequences, tokens)
    with launch.process_group(device):
        settings = [_settings(folder, device, budget, mode, source, kind) for source in ("always", "auto")]
        if memory == "auto":
            settings = [_with_memory_of_a_run(one, folder, device) for one in settings]
        backend = (MegatronBackend if kind == "megatron" else FsdpBackend)(settings[0], str(folder), device)
        separate, together = (Learner(one, backend) for one in settings)
        parts = [_one_step(separate, trajectories, device) for _ in range(repeats + 1)]
        step = _median(lambda: _one_step(together, trajectories, device), device, repeats)
    return {name: statistics.median(one[name] for one in parts[1:]) for name in parts[0]} | {"step": step}


def _with_memory_of_a_run(settings: TrainConfig, folder: Path, device: torch.device) -> TrainConfig:
    model = settings.model.model_copy(update={"gradient_checkpointing": "auto"})
    settings = settings.model_copy(update={"model": model})
    return launch.with_memory_decided(settings, str(folder), device, lambda line: print(line, file=sys.stderr))


def _one_step(learner: Learner, trajectories: list[Any], device: torch.device) -> Result:
    """Return the seconds of scoring and of the update."""
    metrics, store = learner.new_metrics(), InProcessStore()
    updates = learner.prepare(store.put(trajectories), store)
    times = [now(device)]
    learner.score(updates, metrics, step=1)
    times.append(now(device))
    learner.update(updates, metrics, step=1)
    learner.summarize(metrics, updates)
    times.append(now(device))
    return {"score": times[1] - times[0], "update": times[2] - times[1]}


def _plain(trajectories: list[Any], folder: Path, device: torch.device, budget: int, repeats: int) -> Result:
    loop = PlainLoop(folder, device, trajectories, budget)
    score, update = _median(loop.score, device, repeats), _median(loop.update, device, repeats)
    return {"score": score, "update": update, "step": update}  # one update needs no old log-probs


def _trl(trajectories: list[Any], folder: Path, device: torch.device, budget: int, repeats: int) -> Result:
    from parts.trl_step import trl_steps

    taken = trl_steps(folder, device, trajectories, budget, steps=repeats + 1)
    return {"step": statistics.median(taken[1:])}


# ---- dispatch plans --------------------------------------------------------------------------------------------------


def take_turns(arguments: argparse.Namespace) -> list[dict[str, Result]]:
    """Return the seconds of each variant in every turn, after one turn to warm up."""
    device = torch.device(arguments.device)
    sequences, tokens, budget = WORK[arguments.size]
    turns = []
    with tempfile.TemporaryDirectory() as name, launch.process_group(device):
        folder = Path(name)
        model = TINY_MODEL if arguments.size == "tiny" else SLICE
        write_model(folder, {key: model[key] for key in MODEL_KEYS} | {"mlp_only_layers": []}, device)
        fsdp.PLANS_ALONE = True
        backend = FsdpBackend(_settings(folder, device, budget, "off"), str(folder), device)
        trajectories = routed(backend.model, backend.replay, sequences, tokens)
        learners = {mode: Learner(_settings(folder, device, budget, mode, "always"), backend) for mode in ("r3", "off")}
        for _ in range(arguments.turns + 1):
            turns.append({})
            for variant, (mode, backend.replay.plans_rows) in TURNS.items():
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                turns[-1][variant] = _one_step(learners[mode], trajectories, device)
                if device.type == "cuda":
                    turns[-1][variant]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if arguments.kernels:
            backend.replay.plans_rows = False
            profiles = {mode: _profiles(learners[mode], trajectories, device) for mode in learners}
            for part in ("score", "update"):
                r3, native = (profiles[mode][part] for mode in ("r3", "off"))
                print(difference(f"{part}, R3", r3, "native", native, arguments.kernels))
    return turns[1:]


def _profiles(learner: Learner, trajectories: list[Any], device: torch.device) -> dict[str, Profile]:
    """Return the kernels of a scoring pass, and of the update behind it."""
    metrics, store = learner.new_metrics(), InProcessStore()
    updates = learner.prepare(store.put(trajectories), store)
    return {
        "score": profile_of(lambda: learner.score(updates, metrics, step=1), device),
        "update": profile_of(lambda: learner.update(updates, metrics, step=1), device),
    }


def show_turns(turns: list[dict[str, Result]]) -> None:
    """Print the medians of each variant, and of its ratios to R3 without plans in the same turn."""
    print("| | score | update | score / without plans | update / without plans | peak |\n|---|---|---|---|---|---|")
    for variant in TURNS:
        cells = [f"{statistics.median(turn[variant][part] for turn in turns):.4f} s" for part in ("score", "update")]
        for part in ("score", "update"):
            ratios = [turn[variant][part] / turn["r3, no plans"][part] for turn in turns]
            cells.append(f"{statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")
        peak = max(turn[variant].get("peak_gib", 0.0) for turn in turns)
        print(f"| {variant} | {' | '.join(cells)} | {peak:.1f} GiB |")


# ---- results ---------------------------------------------------------------------------------------------------------


def ratios(results: dict[str, Result]) -> Result:
    """Return the tokens per second of ours over those of the others, and with replay over without."""
    found: Result = {}
    for ours, other in (
        ("ours r3", "plain"),
        ("ours r3", "trl"),
        ("ours native", "plain"),
        ("ours native", "trl"),
        ("ours r3", "ours native"),
        ("megatron r3", "plain"),
        ("megatron r3", "ours r3"),
        ("megatron r3", "megatron native"),
    ):
        for part in ("score", "update", "step"):
            key = f"{part}_tokens_per_second"
            if key in results.get(ours, {}) and key in results.get(other, {}):
                found[f"{ours} / {other}, {part}"] = results[ours][key] / results[other][key]
    return found


def show(found: dict[str, Any]) -> None:
    """Print one row for each variant, and the ratios."""
    print(f"{found['work']} on {found['device']}, torch {found['torch']}")
    print("| | score | update | step | peak |\n|---|---|---|---|---|")
    for variant, result in found["results"].items():
        cells = []
        for part in ("score", "update", "step"):
            mfu = f" ({result[f'{part}_mfu']:.1%})" if f"{part}_mfu" in result else ""
            cells.append(f"{result[f'{part}_seconds']:.3f} s{mfu}" if f"{part}_seconds" in result else "")
        cells.append(f"{result['peak_gib']:.1f} GiB" if "peak_gib" in result else "")
        print(f"| {variant} | {' | '.join(cells)} |")
    for name, ratio in ratios(found["results"]).items():
        print(f"{name}: {ratio:.3f}")


def compare(found: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """Return a line for each value of ours that is worse than the baseline's by more than `LOSS`."""
    for key in ("device", "work"):
        if found[key] != baseline[key]:
            raise SystemExit(f"the baseline is of another {key}: {baseline[key]}, not {found[key]}")
    pairs = dict(_compared(found["results"], baseline["results"]))
    losses = [
        f"LOSS {name}: {new:.4g}, {abs(new / old - 1):.1%} {'above' if is_size else 'below'} the baseline of {old:.4g}"
        for name, (new, old, is_size) in pairs.items()
        if (new > old * (1 + LOSS) if is_size else new < old * (1 - LOSS))
    ]
    missing = [name for name in baseline["results"] if name.startswith(OWN) and name not in found["results"]]
    return losses + [f"LOSS {name}: not measured" for name in missing]


def _compared(found: dict[str, Result], baseline: dict[str, Result]) -> Any:
    """Yield (name, (new, old, whether it is a size)) of everything that both have."""
    for variant in (name for name in baseline if name.startswith(OWN) and name in found):
        for key, old in baseline[variant].items():
            if key in found[variant] and (key.endswith("_tokens_per_second") or key == "peak_gib"):
                yield f"{variant}, {key}", (found[variant][key], old, key == "peak_gib")
    new, old = ratios(found), ratios(baseline)
    yield from ((name, (new[name], old[name], False)) for name in old if name in new)


if __name__ == "__main__":
    main()
