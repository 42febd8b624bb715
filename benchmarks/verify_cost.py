"""Cost of the alignment watch as a fraction of a training step: a scoring pass and an update with replay.

python benchmarks/verify_cost.py                    # a small model with the proportions of Qwen3-30B-A3B, on the CPU
python benchmarks/verify_cost.py --device cuda      # larger

Watching a step needs the routers' own choice in addition to the replayed one in the scoring pass (one more top-k per
layer), the sums of one micro-batch, and the verdict with its transfer to the host. Each is timed alone, with the device
idle before and after; times are medians. Then whole steps with and without all of it alternate: launches that overlap
with device work cost nothing. A step is one micro-batch here; with more, only the top-k is repeated.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import moe_replay as mr
from moe_replay.verification.alignment_verdict import judge
from moe_replay.verification.sequential import EvidenceHistory
from moe_replay.verification.watch import AlignmentWatch

SHAPES = {
    "cpu": {"layers": 4, "experts": 64, "top_k": 8, "hidden": 512, "intermediate": 192, "batch": 4, "width": 512},
    "cuda": {"layers": 24, "experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768, "batch": 8, "width": 2048},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape = SHAPES[options.device]
    torch.set_num_threads(1)

    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=shape["hidden"],
        moe_intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["hidden"] // 64,
        num_key_value_heads=max(1, shape["hidden"] // 512),
        head_dim=128,
        num_experts=shape["experts"],
        num_experts_per_tok=shape["top_k"],
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if options.device == "cuda" else torch.float32)
    with torch.device(options.device):
        model = Qwen3MoeForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    replay = mr.attach(model)
    layout = mr.TokenLayout.padded([shape["width"]] * shape["batch"])
    ids = torch.randint(0, 4096, (shape["batch"], shape["width"]), device=options.device)
    with torch.no_grad(), replay.record() as recording:
        model(input_ids=ids)
    replayed = recording.batch()
    watch = AlignmentWatch()

    # On one core the time that this process has computed, which does not count what else the machine does.
    clock = time.perf_counter if options.device == "cuda" else time.process_time

    def timed(action: Callable[[], object]) -> float:
        if options.device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        action()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    def score(observe: bool) -> None:
        with torch.no_grad(), replay.replay(replayed, observe=observe) as replaying:
            model(input_ids=ids).logits.float().logsumexp(-1)
        if observe:
            seen.append(replaying.native())

    def update() -> None:
        with replay.replay(replayed):
            loss = model(input_ids=ids).logits.float().logsumexp(-1).mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    def step() -> None:
        score(observe=False)
        update()

    def native_choice() -> None:
        for _ in range(shape["layers"]):
            torch.topk(scores, shape["top_k"])

    seen: list[mr.RouteBatch] = []
    score(observe=True)
    native = seen.pop()
    sampled = np.tile(np.arange(shape["width"]) >= shape["width"] // 4, shape["batch"])
    table, history = watch.measure(native, replayed, layout, 0, sampled), EvidenceHistory()
    verdict = judge(table, history)
    assert verdict.aligned, verdict
    scores = torch.rand(layout.num_rows, shape["experts"], device=options.device)

    parts: dict[str, Callable[[], object]] = {
        "native top-k of all rows and layers": native_choice,
        "watch.measure": lambda: watch.measure(native, replayed, layout, 1, sampled),
        "judge": lambda: judge(table.with_vector(table.vector().cpu()), history),  # a new table: nothing is remembered
    }

    def watched_step() -> None:
        score(observe=True)
        found = watch.measure(seen.pop(), replayed, layout, 1, sampled)
        judge(found.with_vector(found.vector().cpu()), history)
        update()

    pairs = [(timed(step), timed(watched_step)) for _ in range(2 * options.repeats + 1)][1:]
    whole = statistics.median(plain for plain, _ in pairs)
    updating = statistics.median(timed(update) for _ in range(options.repeats))
    ratio = statistics.median(watched / plain for plain, watched in pairs)
    print(
        f"{shape['layers']} MoE layers, top {shape['top_k']} of {shape['experts']}, hidden {shape['hidden']}, "
        f"{shape['batch']} x {shape['width']} tokens, {options.device}; "
        f"a step with replay: {whole:.3f} s, its forward + backward: {updating:.3f} s"
    )
    spent = {
        name: statistics.median(timed(action) for _ in range(10 * options.repeats)) for name, action in parts.items()
    }
    spent["together"] = sum(spent.values())
    for name, seconds in spent.items():
        print(f"{name:40} {seconds / whole:8.2%} of a step ({seconds * 1e3:.2f} ms)")
    print(f"{'a step with all of this':40} {ratio:8.4f} times one without, median of {len(pairs)} pairs")


if __name__ == "__main__":
    main()
