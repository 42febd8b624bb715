"""Throughput of building the routers' input from the traces of a micro-batch.

    python benchmarks/route_batch.py [--tokens 65536] [--repeats 9] [--threads 1]

Prints one table per model: GB/s of narrow route ids, the speed-up over two common ways
 - `transpose`  concatenate the traces, gather the rows, one plain transposition of the axes;
 - `int64 pad`  an int64 array [B, T, L, K] padded to the longest sequence, then per layer [L, B * T, K],
and the fraction of the speed of a plain copy of the same bytes (`memcpy`, into allocated memory).
The other ways produce the same ids; that is asserted before anything is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.trace import RouteTrace

MODELS = {  # layers, experts, top-k
    "48 layers, 8 of 128 (uint8)": (48, 128, 8),
    "61 layers, 8 of 384 (uint16)": (61, 384, 8),
    "48 layers, 10 of 512 (uint16)": (48, 512, 10),
}
SEQUENCES = 16


def some_traces(lengths: Sequence[int], layers: int, experts: int, top_k: int) -> list[RouteTrace]:
    """Random routes without a repeated expert: top-k successive experts from a random one on."""
    random = np.random.default_rng(0)
    traces = []
    for length in lengths:
        first = random.integers(0, experts, (length, layers, 1))
        ids = random.integers(0, 100_000, length)
        traces.append(RouteTrace(ids, (first + np.arange(top_k)) % experts, range(layers), num_experts=experts))
    return traces


def layouts(lengths: Sequence[int]) -> dict[str, TokenLayout]:
    """The layouts of common trainers."""
    return {
        "packed": TokenLayout.packed(lengths),
        "right-padded": TokenLayout.padded(lengths),
        "left-padded": TokenLayout.padded(lengths, side="left"),
        "packed, zigzag CP 2": TokenLayout.packed(lengths, pad_each_to_multiple_of=4).context_parallel(0, 2),
        "padded, sequence-major": TokenLayout.padded(lengths).sequence_major(),
    }


def by_transpose(traces: Sequence[RouteTrace], layout: TokenLayout, layers: slice) -> np.ndarray:
    """(L, R, K) by whole-array operations."""
    zero = np.zeros((1, *traces[0].routed_experts.shape[1:]), traces[0].routed_experts.dtype)
    rows = np.concatenate([*(trace.routed_experts for trace in traces), zero])[layout.rows]
    return np.ascontiguousarray(rows[:, layers].transpose(1, 0, 2))


def by_int64_padding(traces: Sequence[RouteTrace], layout: TokenLayout, layers: slice) -> np.ndarray:
    """(L, B * T, K): every sequence padded to the longest, in int64. Batch-major and whole, whatever the layout."""
    longest = max(layout.lengths)
    padded = np.zeros((len(traces), longest, *traces[0].routed_experts.shape[1:]), np.int64)
    for row, trace in zip(padded, traces, strict=True):
        row[: len(trace)] = trace.routed_experts
    flat = padded.reshape(-1, *padded.shape[2:])[:, layers]
    return np.ascontiguousarray(flat.transpose(1, 0, 2))


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after one to warm up."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


def check_same(batch: RouteBatch, other: np.ndarray) -> None:
    """Raise unless another way gives the same ids."""
    if not np.array_equal(batch.routed_experts.numpy().astype(np.int64), other):
        raise AssertionError("two ways to make a batch disagree")


def measure(traces: Sequence[RouteTrace], layout: TokenLayout, layers: slice, repeats: int) -> str:
    """One line of a table."""
    wanted = traces[0].layers[layers]
    batch = RouteBatch.from_traces(traces, layout, wanted)
    check_same(batch, by_transpose(traces, layout, layers))
    source = batch.routed_experts.numpy()
    target = np.zeros_like(source)
    ours = seconds(lambda: RouteBatch.from_traces(traces, layout, wanted), repeats)
    plain = seconds(lambda: by_transpose(traces, layout, layers), repeats)
    padded = seconds(lambda: by_int64_padding(traces, layout, layers), max(repeats // 3, 1))
    copy = seconds(lambda: np.copyto(target, source), repeats)
    return (
        f"{len(wanted):6} {source.nbytes / 1e6:6.1f} {source.nbytes / ours / 1e9:6.2f} {plain / ours:12.1f} "
        f"{padded / ours:12.1f} {copy / ours:9.0%}"
    )


def print_table(name: str, tokens: int, repeats: int) -> None:
    """All layouts for one model."""
    num_layers, experts, top_k = MODELS[name]
    spread = np.random.default_rng(1).uniform(0.5, 1.5, SEQUENCES)
    lengths = (spread / spread.sum() * tokens).astype(int).tolist()
    traces = some_traces(lengths, num_layers, experts, top_k)
    every, stage = slice(0, num_layers), slice(num_layers // 4, num_layers // 2)
    right = TokenLayout.padded(lengths)
    check_same(RouteBatch.from_traces(traces, right), by_int64_padding(traces, right, every))
    print(f"\n{name}: {SEQUENCES} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")
    print(f"{'layout':24} {'layers':>6} {'MB':>6} {'GB/s':>6} {'x transpose':>12} {'x int64 pad':>12} {'/ memcpy':>9}")
    for label, layout in layouts(lengths).items():
        print(f"{label:24} {measure(traces, layout, every, repeats)}", flush=True)
    print(f"{'packed, stage of 4':24} {measure(traces, TokenLayout.packed(lengths), stage, repeats)}", flush=True)


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of the micro-batch")
    parser.add_argument("--repeats", type=int, default=9, help="runs of which the median is taken")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in MODELS:
        print_table(name, options.tokens, options.repeats)


if __name__ == "__main__":
    main()
