"""What each fault looks like: k3, F(2), mean ratio, agreement and the verdict of the shift test, by planted fault.

    python -m experiments.faults             # trains, samples, plants, measures: an hour on two cores of a CPU
    python -m experiments.faults --held-out  # the gate on models that its limits were not set with
    python -m experiments.faults --draw      # the tables from the results that are kept

Small trained models (`fault_models.py`), one for each seed, are sampled by the real vLLM on a CPU in bfloat16, and
scored by the trainer in float32, as `moe-replay verify` does there. Faults of routes are those of the test suite
(`tests/verification/faults.py`), planted in the traces of the healthy samples, four at a time. Faults of the engine are
planted in the engine: it samples with the weights, the cache or the adapter that the fault leaves it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice
from math import ceil, floor, log10
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.fault_models import SCALE, load, prepare
from experiments.model import END_ID, IDS
from experiments.results import spread
from experiments.study import table_text
from experiments.task import problems
from moe_replay.demo.files import default_cache
from moe_replay.demo.warm_start import one_thread
from moe_replay.errors import MoeReplayError
from moe_replay.records import Sample, SamplingParams
from moe_replay.tools.attribution import attribute
from moe_replay.verification.attribution import R3
from moe_replay.verification.signatures import GATE, LOWER, NO_FAULT, NUMBERS, Signature, is_beyond, judge
from tests.verification.faults import GALLERY, Traces, another_micro_batch, stale_rows_of_a_cached_prefix
from tests.verification.routes import with_routes

if TYPE_CHECKING:
    from moe_replay.engines.vllm.engine import VllmEngine

RESULT = Path(__file__).parent / "results" / "faults" / "signatures.json"
HELD_OUT = RESULT.with_name("held_out.json")
SEEDS, HELD_OUT_SEEDS = range(5), range(5, 6)
PROMPTS = 48
TOGETHER = 4
"""Samples that a fault of routes is planted in together."""
SHORTEST = 40
"""Tokens of a prompt, so that a block of the prefix cache is full."""
INTERRUPTED = 24
"""Tokens of a completion before it is retracted."""
PLANTED = 8
"""Samples that faults of routes are planted in; those of the engine are in all of them."""
TEMPERATURE = 0.8
"""Of samples that the trainer scores at 1."""
TOP_P = 0.95
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": PROMPTS,
    "block_size": 32,
    "kv_cache_memory_bytes": 2**26,
    "enable_prefix_caching": True,
}
ROUNDED = "router in bfloat16 on the wire, else float32"
MARGIN = 3.0
"""Between the worst healthy value and a threshold; of agreement, in the distance from 1."""
MERGE_BARS = {"prime-rl": ("k3", 0.015), "verl": ("probability", 0.01)}
"""Bars in use elsewhere: mismatch KL, and mean difference of the probabilities of sampled tokens."""
HEALTHY, HEALTHY_AGAIN, HEALTHY_FLOAT32 = "healthy", "healthy, other samples", "healthy, float32"


# ---- sampling --------------------------------------------------------------------------------------------------------


def prompts_of(seed: int) -> list[list[int]]:
    """Return token ids of held-out problems with long prompts."""
    asked = problems(Random(f"faults {seed}"), SCALE.asked, held_out=True)
    long = (problem.prompt for problem in asked if len(problem.prompt) >= SHORTEST)
    return [[IDS[letter] for letter in prompt] for prompt in islice(long, PROMPTS)]


def sampled(engine: VllmEngine, prompts: Sequence[Sequence[int]], seed: int, **changed: Any) -> list[Sample]:
    """Return a sample of each prompt."""
    params = {"max_tokens": SCALE.max_tokens, "stop_token_ids": (END_ID,), "seed": seed} | changed
    return [sample for (sample,) in engine.generate(prompts, SamplingParams(**params))]


def sample_all(folders: dict[int, Path]) -> dict[int, dict[str, list[Sample]]]:
    """Return, by seed and arm, the samples of a healthy engine and of engines with a fault."""
    from moe_replay.engines.vllm.engine import VllmEngine

    samples = {}
    first = next(iter(folders.values()))
    with VllmEngine(first / "before", dtype="bfloat16", **OPTIONS) as engine:
        for seed, folder in folders.items():
            samples[seed] = dict(sample_bfloat16(engine, folder, seed))
            print(f"seed {seed}: sampled", flush=True)
    with VllmEngine(first / "after", dtype="float32", **OPTIONS) as engine:
        for seed, folder in folders.items():
            engine.update_weights(folder / "after", 0)
            samples[seed][HEALTHY_FLOAT32] = sampled(engine, prompts_of(seed), seed)
            engine.update_weights(folder / "router_bf16", 0)
            samples[seed][ROUNDED] = sampled(engine, prompts_of(seed), seed)
    return samples


def sample_bfloat16(engine: VllmEngine, folder: Path, seed: int) -> Iterator[tuple[str, list[Sample]]]:
    """Yield the arms of an engine in bfloat16; each update but one drops the prefix cache."""
    prompts = prompts_of(seed)
    engine.update_weights(folder / "before", 0)
    yield "old weights, 20 updates", sampled(engine, prompts, seed)
    begun = sampled(engine, prompts, seed, max_tokens=INTERRUPTED)
    keep_prefix_cache(engine, lambda: engine.update_weights(folder / "after", 0))
    yield "prefix cache kept over a sync", sampled(engine, prompts, seed)
    engine.update_weights(folder / "one_before", 0)
    yield "old weights, one update", sampled(engine, prompts, seed)
    engine.update_weights(folder / "after", 0)
    yield HEALTHY, sampled(engine, prompts, seed)
    yield HEALTHY_AGAIN, sampled(engine, prompts, seed + 1000)
    yield "temperature left out by the trainer", sampled(engine, prompts, seed, temperature=TEMPERATURE)
    yield "top-p without its mask", sampled(engine, prompts, seed, top_p=TOP_P)
    yield "retracted, old log-probs kept", continued(engine, begun, seed)
    engine.update_weights(folder / "expert_slice", 0)
    yield "expert-parallel slice of another rank", sampled(engine, prompts, seed)


def keep_prefix_cache(engine: VllmEngine, update: Callable[[], None]) -> None:
    """Update weights while the engine cannot drop its cached prefixes, and says that it has."""

    async def pretend() -> bool:
        return True

    dropped = engine._replicas.reset_prefix_cache
    engine._replicas.reset_prefix_cache = pretend  # type: ignore[method-assign]
    update()
    engine._replicas.reset_prefix_cache = dropped  # type: ignore[method-assign]


def continued(engine: VllmEngine, begun: Sequence[Sample], seed: int) -> list[Sample]:
    """Continue samples of older weights: all routes are those of the new weights, the first log-probs are not."""
    open_ended = [sample for sample in begun if sample.completion_ids[-1] != END_ID]
    rest = sampled(engine, [sample.trace.token_ids.tolist() for sample in open_ended], seed)
    return [
        replace(
            after,
            prompt_ids=before.prompt_ids,
            completion_ids=np.concatenate([before.completion_ids, after.completion_ids]),
            logprobs=np.concatenate([before.logprobs, after.logprobs]),
        )
        for before, after in zip(open_ended, rest, strict=True)
    ]


# ---- faults of routes ------------------------------------------------------------------------------------------------


def planted(samples: Sequence[Sample]) -> Iterator[tuple[str, list[Sample]]]:
    """Yield every fault of the test suite by name, with the samples that it spoils."""
    chosen = samples[: len(samples) - len(samples) % TOGETHER]
    groups: list[Traces] = []
    ordered: list[Sample] = []
    for start in range(0, len(chosen), TOGETHER):  # the suite's first sample is its longest
        group = sorted(chosen[start : start + TOGETHER], key=lambda sample: -len(sample.trace))
        groups.append([sample.trace for sample in group])
        ordered += group
    for fault in GALLERY:
        if fault.plant in OF_OTHER_SAMPLES:
            spoil = OF_OTHER_SAMPLES[fault.plant]
            spoilt = [spoil(group, groups[number - 1]) for number, group in enumerate(groups)]
        else:
            spoilt = [fault.plant(group) for group in groups]
        traces = [trace for group in spoilt for trace in group]
        name = fault.name.replace("_", " ")
        yield name, [replace(sample, trace=trace) for sample, trace in zip(ordered, traces, strict=True)]


def _of_another_group(traces: Traces, others: Traces, tokens: int) -> Traces:
    """Give the first tokens of each trace the routes of a sample of another micro-batch."""
    made = []
    for trace, other in zip(traces, others, strict=True):
        taken = min(tokens, len(trace) - 1, len(other) - 1)
        routes = np.concatenate([other.routed_experts[:taken], trace.routed_experts[taken:]])
        made.append(with_routes(trace, routes))
    return made


OF_OTHER_SAMPLES: dict[Any, Callable[[Traces, Traces], Traces]] = {
    another_micro_batch: lambda traces, others: _of_another_group(traces, others, 10**6),
    stale_rows_of_a_cached_prefix: lambda traces, others: _of_another_group(traces, others, SHORTEST),
}
"""Faults for which the test suite invents routes; here they are those of other samples of the same model."""


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(folder: Path, samples: dict[str, list[Sample]], seed: int) -> dict[str, dict[str, Any]]:
    """Return the signature of each arm of a seed, by its name."""
    trainer, adapted = load(folder / "after"), load(folder / "lora")
    arms = {name: (trainer, drawn) for name, drawn in samples.items()}
    arms["LoRA ignored by the engine"] = adapted, samples[HEALTHY]
    arms |= {name: (trainer, spoilt) for name, spoilt in planted(samples[HEALTHY][:PLANTED])}
    measured = {}
    with one_thread():
        for name, (model, drawn) in arms.items():
            measured[name] = measured_arm(model, drawn)
            print(f"seed {seed}: {name}: {measured[name]}", flush=True)
    return measured


def measured_arm(model: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the signature of samples as plain numbers, or why the trainer refuses them."""
    try:
        found = attribute(model, samples, tokens_per_micro_batch=512)
    except MoeReplayError as refused:
        return {"refused": type(refused).__name__}
    rollout, scored = np.exp(np.array(found.scatter[R3])).T
    numbers = asdict(Signature.of(found)) | {"probability": float(np.abs(rollout - scored).mean())}
    return {key: value if isinstance(value, str) else float(f"{value:.5g}") for key, value in numbers.items()}


# ---- thresholds and tables -------------------------------------------------------------------------------------------

Measured = dict[str, dict[str, dict[str, Any]]]
"""Signatures by seed and arm."""


def limits_of(measured: Measured) -> dict[str, float]:
    """Return the limits that the healthy arms set, as `plan.md` says, rounded to two digits on the lenient side."""
    healthy = [*by_arm(measured)[HEALTHY], *by_arm(measured)[HEALTHY_AGAIN]]
    limits = {}
    for name in GATE:
        values = [one[name] for one in healthy]
        if name in LOWER:
            limits[name] = floor(100 * (1 - MARGIN * (1 - min(values)))) / 100
        else:
            bound = MARGIN * max(values)
            unit = 10.0 ** (floor(log10(bound)) - 1)
            limits[name] = float(f"{ceil(bound / unit) * unit:.1e}")
    return limits


def catches(arms: Sequence[dict[str, Any]], is_caught: Callable[[dict[str, Any]], bool]) -> str:
    """Return in how many seeds an arm is caught: yes, no, or a count."""
    caught = sum(map(is_caught, arms))
    return {0: "-", len(arms): "yes"}.get(caught, f"{caught} of {len(arms)}")


def rows_of_catches(measured: Measured) -> list[list[str]]:
    """Return the table of what catches what; its second row has the thresholds."""
    head, bars = ["fault", "seeds"], ["*threshold*", ""]
    tests: list[Callable[[dict[str, Any]], bool]] = []
    for field, label in NUMBERS.items():
        head.append(label)
        bars.append(f"{'<' if field in LOWER else '>'} {GATE[field]:g}")
        tests.append(partial(is_beyond, field=field))
    tests.append(lambda one: one["cause"] not in NO_FAULT)
    tests += [lambda one, key=key, bar=bar: one[key] > bar for key, bar in MERGE_BARS.values()]
    rows = [
        [*head, "shift test", *MERGE_BARS],
        [*bars, "misaligned", *(f"> {bar:g}" for _, bar in MERGE_BARS.values())],
    ]
    for name, arms in by_arm(measured).items():
        if any("refused" in one for one in arms):
            rows.append([name, str(len(arms)), f"refused: {arms[0]['refused']}", *[""] * (len(rows[0]) - 3)])
        else:
            rows.append([name, str(len(arms)), *(catches(arms, test) for test in tests)])
    return rows


def by_arm(measured: Measured) -> dict[str, list[dict[str, Any]]]:
    """Return the signatures of each arm, of the seeds that have it, in the order of the first seed."""
    names = dict.fromkeys(name for arms in measured.values() for name in arms)
    return {name: [arms[name] for arms in measured.values() if name in arms] for name in names}


def rows_of_numbers(measured: Measured) -> list[list[str]]:
    """Return the table of signatures: median over seeds and range."""
    keys = ("k3", "k3_native", "f2", "mean_ratio", "worst_layer", "probability")
    rows = [
        ["fault", "k3, R3", "k3, native", "F(2), R3", "mean ratio, R3", "worst layer", "probabilities, R3", "cause"]
    ]
    for name, arms in by_arm(measured).items():
        if "refused" not in arms[0]:
            causes = Counter(one["cause"] for one in arms)
            named = ", ".join(cause if count == len(arms) else f"{cause} ({count})" for cause, count in causes.items())
            rows.append([name, *(spread([one[key] for one in arms]) for key in keys), named])
    return rows


def rows_of_gate(measured: Measured) -> list[list[str]]:
    """Return the table of what `verify --gate` says: in how many seeds it fails, and the faults that it names."""
    rows = [["fault", "seeds", "the gate fails", "likely fault"]]
    for name, arms in by_arm(measured).items():
        if any("refused" in one for one in arms):
            rows.append([name, str(len(arms)), f"refused: {arms[0]['refused']}", ""])
            continue
        verdicts = [judge(Signature(**{field.name: one[field.name] for field in fields(Signature)})) for one in arms]
        named = Counter(lines[-1].removeprefix("likely fault: ") for lines in verdicts if lines)
        rows.append([name, str(len(arms)), str(named.total()), " / ".join(named)])
    return rows


def read_result(path: Path = RESULT) -> Measured:
    """Return a result that is kept."""
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="from the results that are kept")
    parser.add_argument("--held-out", action="store_true", help="models that the limits of the gate were not set with")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these; others keep their result")
    parser.add_argument("--work", type=Path, default=default_cache() / "experiments" / "faults")
    options = parser.parse_args()
    path, seeds = (HELD_OUT, HELD_OUT_SEEDS) if options.held_out else (RESULT, SEEDS)
    measured = read_result(path) if path.exists() else {}
    if not options.draw:
        run(options.seeds or [*seeds], options.work, measured, path)
    if options.held_out:
        print(table_text(rows_of_gate(measured)))
        return
    print(limits_of(measured), table_text(rows_of_catches(measured)), table_text(rows_of_numbers(measured)), sep="\n\n")


def run(seeds: Sequence[int], work: Path, measured: Measured, path: Path) -> None:
    """Measure some seeds, and write what is measured after each."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process less
    folders = {seed: prepare(work, seed) for seed in seeds}
    samples = sample_all(folders)
    for seed, folder in folders.items():
        measured[str(seed)] = measure(folder, samples[seed], seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dumped(measured), encoding="utf-8")


def dumped(measured: Measured) -> str:
    """Return the result as JSON with an arm a line."""
    seeds = []
    for seed in sorted(measured, key=int):
        arms = (f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in measured[seed].items())
        seeds.append(f" {json.dumps(seed)}: {{\n" + ",\n".join(arms) + "\n }")
    return "{\n" + ",\n".join(seeds) + "\n}\n"


if __name__ == "__main__":
    main()
