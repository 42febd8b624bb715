"""Throughput of rank 0: answers per second scored by the reward `math_verify`, and sequences per second received.

    python benchmarks/rewards.py [--answers 400] [--groups 32] [--tokens 1024]     (needs the extra `train`; a minute)

Answers: short mathematical ones in groups of 8, in threads of one process (`reward.workers = 0`) and in 1, 2 and 4
processes. CPU is that of the trainer process, which is blocked for that time.

Sequences: `Rollouts` against a server in a separate process that answers every request with a prebuilt body of 8
samples (48 MoE layers, top 8 of 128 experts), so that only reading HTTP, decoding and checking samples and building
trajectories cost anything: the maximum for one event loop in one process, reward included.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from parts.finished_bodies import PROMPT, sample, serve

from moe_replay.engines.event_loop import LoopThread
from moe_replay.engines.pool import EnginePool
from moe_replay.engines.server.client import RolloutClient
from moe_replay.engines.server.sample_wire import encode_samples
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.rollout.prompts import Prompt, PromptStream
from moe_replay.train.rollout.reward_pool import InProcess, RewardPool, Samples, Scorer
from moe_replay.train.rollout.rewards import load_reward
from moe_replay.train.rollout.rollouts import Rollouts
from moe_replay.train.sync.synced_engine import SyncedEngine

N = 8
SERVERS = 4
ANSWERS = (
    "We add both sides, so the answer is $\\boxed{\\frac{3}{4}}$.",
    "Hence $x = \\sqrt{2} + 1$, that is $\\boxed{1+\\sqrt{2}}$",
    "The result is 42.",
    "so it is $\\boxed{(x-1)(x+2)}$",
)
SOLUTIONS = ("0.75", "$\\sqrt{2}+1$", "42", "$x^2+x-2$")


# ---- answers ---------------------------------------------------------------------------------------------------------


def group(number: int) -> Samples:
    """One of the groups of a step."""
    texts = [ANSWERS[(number + sample) % len(ANSWERS)] for sample in range(N)]
    solution = [SOLUTIONS[number % len(SOLUTIONS)]] * N
    return Samples(number, range(N), ["p"] * N, texts, {"solution": solution})


async def score_all(scorer: Scorer, groups: Sequence[Samples]) -> None:
    """Score groups as rollouts do: all that are sampled at once."""
    await asyncio.gather(*(scorer.score(one) for one in groups))


def cpu_s() -> float:
    """Return the CPU seconds of this process so far."""
    used = os.times()
    return used.user + used.system


def measure_answers(answers: int) -> None:
    """Print a line for each way."""
    groups = [group(number) for number in range(answers // N)]
    print(f"| math_verify, {len(groups)} groups of {N} | answers/s | CPU of rank 0 |\n|---|---|---|")
    for name, workers in (("threads", 0), ("1 process", 1), ("2 processes", 2), ("4 processes", 4)):
        reward = load_reward("math_verify", 1.0, 600.0)
        scorer = RewardPool([reward], workers) if workers else InProcess([reward])
        loop = LoopThread("scoring")
        loop.run(score_all(scorer, groups[: 4 * max(1, workers)]))  # processes start, modules are imported
        begun, cpu = time.perf_counter(), cpu_s()
        loop.run(score_all(scorer, groups))
        seconds, used = time.perf_counter() - begun, cpu_s() - cpu
        loop.close()
        scorer.close()
        count = len(groups) * N
        print(f"| {name} | {count / seconds:.0f} | {1000 * used / count:.2f} ms an answer |", flush=True)


# ---- sequences -------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer that decodes a token to a word."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return text of the length that such tokens have."""
        return "word " * len(ids)


def measure_sequences(groups: int, tokens: int) -> None:
    """Print a line for one server and one for several."""
    rng = np.random.default_rng(0)
    body = encode_samples([sample(tokens, rng) for _ in range(N)])
    title = f"{groups} groups of {N} x {tokens} tokens, {len(body) / 1e6:.1f} MB each"
    print(f"\n| {title} | sequences/s | tokens/s | CPU of rank 0 |")
    print("|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(sending, body, SERVERS), daemon=True)
    server.start()
    urls = [f"http://127.0.0.1:{port}" for port in receiving.recv()]
    settings = {
        "rollout": {"prompts_per_step": groups, "num_generations": N, "max_tokens": tokens, "max_staleness": 0},
        "reward": {"functions": ["think_format"], "workers": 1},
        "log": {"completions": False},
    }
    config = TrainConfig.model_validate(settings)
    for count in (1, SERVERS):
        engine = EnginePool([RolloutClient(url) for url in urls[:count]], any_version=True)
        prompts = [Prompt(row, "p", PROMPT, {}) for row in range(groups)]
        stream, rewards = PromptStream(prompts), [load_reward("think_format")]
        rollouts = Rollouts(config, SyncedEngine(engine), stream, Words(), rewards, len(PROMPT) + tokens)
        rollouts.next_batch(0)
        begun, cpu = time.perf_counter(), cpu_s()
        batch = rollouts.next_batch(0)
        seconds, used = time.perf_counter() - begun, cpu_s() - cpu
        rollouts.close()
        engine.close()
        sampled = len(batch.headers) if batch is not None else 0
        each = f"{1000 * used / sampled:.2f} ms a sequence"
        name = f"{count} server{'s' * (count > 1)}"
        print(f"| {name} | {sampled / seconds:.0f} | {sampled * tokens / seconds:.0f} | {each} |", flush=True)
    server.terminate()
    server.join()


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    measure_answers(options.answers)
    measure_sequences(options.groups, options.tokens)


if __name__ == "__main__":
    main()
