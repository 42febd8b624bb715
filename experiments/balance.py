"""Loads of 8, 64 and 256 expert-parallel ranks, by tokens and balanced, from the routes of a small trained model.

    python -m experiments.balance            # trains, samples, measures, draws; a CPU is enough: half an hour
    python -m experiments.balance --draw     # table and figure from the result that is kept

A Qwen3-MoE with 256 experts, top 8, in 4 of its 5 layers is trained on the worked problems of `task.py`, with a loss
for the balance of its experts, and samples answers to held-out problems, 8 of each. Its traces are divided as
`moe-replay plan --traces` does. It has 6.5 million parameters, a token is a character, and its answers have the right
form but mostly wrong numbers: loads of a released model may be different.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from experiments.model import END_ID, IDS, batch_of, build_model, draw_batches, learn
from experiments.scales import TINY, Scale
from experiments.task import problems
from moe_replay.demo.files import default_cache
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import SamplingParams
from moe_replay.routes.trace_file import TraceWriter
from moe_replay.tools.plan.balance import EpLoads, counts_of, plan_balance

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

SCALE = replace(
    TINY,
    **{"name": "balance", "layers": 5, "experts": 256, "top_k": 8, "taught": (1, 8), "asked": (1, 8)},
    **{"batch_tokens": 2048, "steps": 800, "warmup": 50, "samples": 8, "prompts": 384, "max_tokens": 160},
)
SIZES = (8, 64, 256)
LAYOUTS = {"a rank for each sample": 1, "8 ranks share a sample": 8}
"""By name: ranks that train the same samples, such as tensor parallel 8."""
BUDGETS = (256, 1024)
"""Tokens of a micro-batch: about 2 samples, and about 10."""
RESULT = Path(__file__).parent / "results" / "loads" / "balance.json"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "experiments" / "balance.svg"
SEED = 5
BARS = {"by_tokens": ("by tokens", "#b3403a"), "balanced": ("balanced", "#22668c"), "limit": ("limit", "#9a9a9a")}


def trained_model(folder: Path, scale: Scale) -> Qwen3MoeForCausalLM:
    """Return the model, which a folder keeps once it is trained."""
    model = build_model(scale)
    saved = folder / "weights.pt"
    if saved.exists():
        model.load_state_dict(torch.load(saved, weights_only=True))
        return model
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    batches: list[list[list[int]]] = []
    began = time.monotonic()
    for step in range(scale.steps):
        if not batches:
            batches = draw_batches(scale, step)
        loss = learn(model, optimizer, scale, step, batch_of(batches.pop(), "cpu"))
        if step % 50 == 0:
            print(f"training: step {step}, loss {float(loss):.3f}, {time.monotonic() - began:.0f} s", flush=True)
    torch.save(model.state_dict(), saved)
    return model


def write_traces(model: Qwen3MoeForCausalLM, path: Path, scale: Scale) -> None:
    """Sample answers to held-out problems and write their routes, samples of a problem one after the other."""
    engine = TransformersEngine(model.eval(), batch_size=256)
    asked = list(islice(problems(Random(SEED), scale.asked, held_out=True), scale.prompts))
    prompts = [[IDS[letter] for letter in problem.prompt] for problem in asked]
    params = SamplingParams(n=scale.samples, max_tokens=scale.max_tokens, stop_token_ids=(END_ID,), seed=SEED)
    is_right, at = 0, 256 // scale.samples
    with TraceWriter(path) as writer:
        for first in range(0, len(prompts), at):
            groups = engine.generate(prompts[first : first + at], params)
            for problem, samples in zip(asked[first:], groups, strict=False):
                worked = [*(IDS[letter] for letter in problem.worked), END_ID]
                is_right += sum(sample.completion_ids.tolist() == worked for sample in samples)
                for sample in samples:
                    writer.append(sample.trace)
            print(f"sampled {len(writer)}, {is_right} worked out right", flush=True)
    engine.close()


def measure(path: Path) -> dict[str, Any]:
    """Return the loads of each layout, budget and size."""
    counts = counts_of(path)
    rows = []
    for layout, shared in LAYOUTS.items():
        for budget in BUDGETS:
            began = time.monotonic()
            plan = plan_balance(counts, SIZES, budget=budget, ranks_per_sample=shared)
            print(plan, f"{time.monotonic() - began:.1f} s", sep="\n", flush=True)
            rows += [{"layout": layout, "budget": budget, **asdict(loads)} for loads in plan.sizes]
    return {"samples": len(counts.tokens), "tokens": int(counts.tokens.sum()), "loads": rows}


def loads_of(row: dict[str, Any]) -> EpLoads:
    return EpLoads(**{key: value for key, value in row.items() if key not in ("layout", "budget")})


def table(result: dict[str, Any]) -> str:
    """Return the table of the documentation."""
    lines = [
        "| | tokens a micro-batch | ranks | micro-batches | by tokens | balanced | limit | experts save |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["loads"]:
        loads = loads_of(row)
        if not loads.problem:
            ratios = " | ".join(f"{ratio:.3f}" for ratio in (loads.by_tokens, loads.balanced, loads.limit))
            place = f"{row['layout']} | {row['budget']} | {loads.ep} | {loads.micro_batches}"
            lines.append(f"| {place} | {ratios} | {loads.experts_gain:.1%} |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the loads of each layout: bars by size, for each budget."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "balance", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LAYOUTS) * len(BUDGETS), figsize=(10, 2.8), sharey=True)
    for axis, (layout, budget) in zip(axes, [(a, b) for a in LAYOUTS for b in BUDGETS], strict=True):
        of_axis = [row for row in result["loads"] if (row["layout"], row["budget"]) == (layout, budget)]
        shown = [loads for loads in map(loads_of, of_axis) if not loads.problem]
        for number, (key, (label, colour)) in enumerate(BARS.items()):
            places = [position + 0.27 * (number - 1) for position in range(len(shown))]
            axis.bar(places, [getattr(loads, key) for loads in shown], 0.25, color=colour, label=label)
        axis.set_xticks(range(len(shown)), [str(loads.ep) for loads in shown])
        axis.set_title(f"{layout},\n{budget} tokens", fontsize=8)
        axis.set_xlabel("expert-parallel ranks", fontsize=8)
        axis.set_ylim(bottom=1)
    axes[0].set_ylabel("busiest rank / mean", fontsize=8)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="from the result that is kept")
    parser.add_argument("--work", type=Path, default=default_cache() / "experiments" / "balance")
    options = parser.parse_args()
    if not options.draw:
        options.work.mkdir(parents=True, exist_ok=True)
        traces = options.work / "traces.mrt"
        if not traces.exists():
            write_traces(trained_model(options.work, SCALE), traces, SCALE)
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(measure(traces), indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    draw(result, FIGURE)
    print(table(result))


if __name__ == "__main__":
    main()
