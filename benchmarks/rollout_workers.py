"""Sequences per second received by 1, 2 and 4 rollout workers, compared with rank 0's own process.

    python benchmarks/rollout_workers.py [--groups 32] [--tokens 1024] [--workers 1 2]     (needs the extra `train`)

Servers in a separate process answer every request with a prebuilt body of 8 samples (48 MoE layers, top 8 of 128
experts). A worker reads HTTP, decodes and checks samples, scores them and encodes trajectories; rank 0 copies their
records into the file that ranks map. With one worker (`rollout.workers = 1`) rank 0 does all of it. CPU is that of each
process per sequence: on a machine with a core for each process, the slowest one is the limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from parts.finished_bodies import EXPERTS, LAYERS, PROMPT, TOP_K, sample, serve

from moe_replay.engines.server.sample_wire import encode_samples
from moe_replay.records import Trajectory
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.rollout.prompts import Prompt, PromptStream
from moe_replay.train.rollout.rollouts import Rollouts
from moe_replay.train.setup.engines import StartedEngines, open_engine
from moe_replay.train.setup.inputs import load_rewards
from moe_replay.train.setup.sources import load_tokenizer
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.trajectories.store import InProcessStore
from moe_replay.train.trajectories.wire import stored_parts
from moe_replay.train.workers.pool import WorkerPool, open_workers
from moe_replay.utils.files import anonymous_file, write_at

N = 8
STEPS = 3
ALL_LAYERS = tuple(range(LAYERS))


def model_folder(folder: Path, length: int) -> str:
    """Make the folder of a model without weights: a tokenizer and a config."""
    from transformers import Qwen3MoeConfig

    from moe_replay.demo.model import character_tokenizer

    characters = [chr(0x4E00 + number) for number in range(1024)]
    character_tokenizer(
        ["<pad>", "<end>", "<unknown>", *characters], pad="<pad>", end="<end>", unknown="<unknown>"
    ).save_pretrained(folder)
    Qwen3MoeConfig(
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=length,
        vocab_size=len(characters) + 3,
    ).save_pretrained(folder)
    return str(folder)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far, without those of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def next_trajectories(rollouts: Rollouts, store: InProcessStore) -> Sequence[Trajectory]:
    batch = rollouts.next_batch(0)
    assert batch is not None
    return store.whole(batch, range(len(batch.headers)))


def put(trajectories: Sequence[Trajectory]) -> None:
    """Write records as the store of several ranks does."""
    file, end = anonymous_file(), 0
    for one in trajectories:
        end += write_at(file, end, stored_parts(one, ALL_LAYERS))
    os.close(file)


def measure(workers: int, groups: int, tokens: int, folder: str, urls: Sequence[str], server: int) -> str:
    """Return a row of the table."""
    length = len(PROMPT) + tokens
    settings = {
        "model": {"path": folder},
        "data": {"path": "none.jsonl", "max_prompt_length": len(PROMPT)},
        "rollout": {
            **{"engine": "rollout_server", "urls": list(urls), "workers": workers, "max_length": length},
            **{"prompts_per_step": groups, "num_generations": N, "max_tokens": tokens},
        },
        "reward": {"functions": ["format"], "workers": 2},
        "log": {"completions": False},
    }
    config = TrainConfig.model_validate(settings)
    prompts = [Prompt(row, "p", PROMPT, {}) for row in range(groups)]
    engine = SyncedEngine(open_engine(config, folder))
    pool: WorkerPool | None = None
    if workers > 1:
        pool = open_workers(config, folder, length, [ALL_LAYERS], StartedEngines())
    stream, rewards = PromptStream(prompts), load_rewards(config)
    store = InProcessStore()
    rollouts = Rollouts(config, engine, stream, load_tokenizer(folder), rewards, length, None, pool, store)
    put(next_trajectories(rollouts, store))  # processes start, modules are imported
    pids = [server, os.getpid(), *(pool.pids if pool is not None else ())]
    begun, before, count = time.perf_counter(), [cpu_s(pid) for pid in pids], 0
    for _ in range(STEPS):
        trajectories = next_trajectories(rollouts, store)
        put(trajectories)
        count += len(trajectories)
    seconds = time.perf_counter() - begun
    used = [cpu_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    rollouts.close()
    engine.close()
    of_server, of_rank_0, *of_workers = (1000 * one / count for one in used)
    slowest = max(of_rank_0, *of_workers, 0.0)
    worker = f"{max(of_workers):.2f} ms" if of_workers else "-"
    return (
        f"| {workers} | {count / seconds:.0f} | {of_rank_0:.2f} ms | {worker} | {of_server:.2f} ms "
        f"| {1000 / slowest:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    body = encode_samples([sample(given.tokens, rng) for _ in range(N)])
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(sending, body, 4), daemon=True)
    server.start()
    urls = [f"http://127.0.0.1:{port}" for port in receiving.recv()]
    title = (
        f"{given.groups} groups of {N} x {given.tokens} tokens, {len(body) / 1e6:.1f} MB each; {os.cpu_count()} cores"
    )
    print(f"{title}\n\n| workers | sequences/s | CPU of rank 0 | of the busiest worker | of the servers | limit/s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder), len(PROMPT) + given.tokens)
        for workers in given.workers:
            assert server.pid is not None
            print(measure(workers, given.groups, given.tokens, folder, urls, server.pid), flush=True)
    server.terminate()
    server.join()


if __name__ == "__main__":
    main()
