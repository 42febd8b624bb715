"""Shared prompts: which sequences of a rank begin with the same tokens and routes, and are trained together.

Sequences of one group form trees. A sequence takes the beginning of an earlier one up to its own first sampled token:
the prompt of its group, or the turns before its own. Under replay of the rollout's routes it takes no more than has the
same routes, and keeps a copy of the rest, so that every sequence is trained on the routes that it was sampled with.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

from moe_replay.records import MicroBatch, Trajectory, TrajectoryHeader
from moe_replay.routes.batch import common_routes
from moe_replay.routes.layout import Prefix

TOKENS_PER_COPIED = 8
"""Tokens that fill up a micro-batch, for each token computed once more because its group is split for that."""


class Sharing(NamedTuple):
    """Conditions for sharing a prefix, besides equal tokens.

    same_routes   its routes must be equal: those of the rollout are replayed
    """

    same_routes: bool


@dataclass(slots=True)
class Tree:
    """Sequences that share prefixes: a part of one group, or the trees of a micro-batch.

    indices    of the sequences
    prefixes   of each, with an earlier one of the tree; empty where nothing is shared
    cost       tokens that are fed
    """

    indices: list[int] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    cost: int = 0

    @classmethod
    def single(cls, index: int, tokens: int) -> Tree:
        return cls([index], [Prefix()], tokens)

    def add(self, other: Tree) -> None:
        """Add the sequences of another tree behind those of this one."""
        first = len(self.indices)
        self.indices += other.indices
        self.prefixes += [Prefix(first + p.sequence, p.length) if p.length else Prefix() for p in other.prefixes]
        self.cost += other.cost


def joined(trees: Sequence[Tree]) -> Tree:
    """Return the trees of a micro-batch as one."""
    whole = Tree()
    for tree in trees:
        whole.add(tree)
    if not any(prefix.length for prefix in whole.prefixes):
        whole.prefixes = []
    return whole


def shared_bins(
    indices: Sequence[int], bodies: Mapping[int, Trajectory], budget: int, sharing: Sharing
) -> list[list[Tree]]:
    """Divide sequences into micro-batches of `budget` tokens, those of a group together as far as they fit.

    Shared tokens count once. A sequence longer than the budget gets its own micro-batch. Where that makes fewer
    micro-batches, a group is split to fill one up, unless copies of its prompt cost too much.
    """
    ordered = sorted(indices, key=lambda i: (bodies[i].group, _first_sampled(bodies[i]), len(bodies[i]), i))
    trees: list[Tree] = []
    for _, members in groupby(ordered, key=lambda i: bodies[i].group):
        trees += _trees(list(members), bodies, budget, sharing)
    whole = _first_fit(trees, budget)
    if sum(tree.cost for tree in trees) > budget * (len(whole) - 1):
        return whole  # there cannot be fewer
    filled = _first_fit(trees, budget, lambda tree, tokens: _split(tree, tokens, bodies, budget, sharing))
    return filled if len(filled) < len(whole) else whole


def _first_fit(
    trees: Sequence[Tree], budget: int, split: Callable[[Tree, int], list[Tree]] | None = None
) -> list[list[Tree]]:
    """Divide trees into bins, the costliest first, each into the first bin that it fits into.

    split   divides a tree that fits nowhere, given the tokens left in the emptiest bin, where the first part goes
    """
    bins: list[list[Tree]] = []
    left: list[int] = []  # tokens, in each bin
    waiting = sorted(trees, key=lambda tree: (tree.cost, -tree.indices[0]))
    while waiting:
        tree = waiting.pop()
        number = next((number for number, tokens in enumerate(left) if tree.cost <= tokens), None)
        if number is None and split is not None and left:
            emptiest = max(range(len(left)), key=left.__getitem__)
            if parts := split(tree, left[emptiest]):
                tree, *rest = parts
                waiting += reversed(rest)
                number = emptiest
        if number is None:
            number = len(bins)
            bins.append([])
            left.append(budget)
        bins[number].append(tree)
        left[number] -= tree.cost
    return bins


def _split(tree: Tree, limit: int, bodies: Mapping[int, Trajectory], budget: int, sharing: Sharing) -> list[Tree]:
    """Return a part of at most `limit` tokens and the rest of a tree, or nothing if too much would be copied."""
    costs = [len(bodies[i]) - prefix.length for i, prefix in zip(tree.indices, tree.prefixes, strict=True)]
    count = bisect_right(list(accumulate(costs)), limit)
    if not count:
        return []
    part = Tree(tree.indices[:count], tree.prefixes[:count], sum(costs[:count]))  # its prefixes are of earlier ones
    rest = _trees(tree.indices[count:], bodies, budget, sharing)
    num_copied = sum(tree.cost for tree in rest) - sum(costs[count:])
    return [part, *rest] if num_copied * TOKENS_PER_COPIED <= part.cost else []


def tree_again(tree: Tree, bodies: Mapping[int, Trajectory], budget: int, sharing: Sharing) -> Tree:
    """Return a tree that another rank has made, with the prefixes that its sequences share."""
    (whole,) = _trees(tree.indices, bodies, budget, sharing)
    return whole


def _trees(members: Sequence[int], bodies: Mapping[int, Trajectory], budget: int, sharing: Sharing) -> list[Tree]:
    """Divide the sequences of a group into trees of `budget` tokens: each goes where it shares most."""
    trees: list[Tree] = []
    for index in members:
        prefixes = [_best_prefix(bodies[index], tree, bodies, sharing) for tree in trees]
        fitting = [
            (len(bodies[index]) - prefix.length, number)
            for number, prefix in enumerate(prefixes)
            if trees[number].cost + len(bodies[index]) - prefix.length <= budget
        ]
        if not fitting:
            trees.append(Tree.single(index, len(bodies[index])))
            continue
        cost, number = min(fitting)
        trees[number].indices.append(index)
        trees[number].prefixes.append(prefixes[number])
        trees[number].cost += cost
    return trees


def _best_prefix(sequence: Trajectory, tree: Tree, bodies: Mapping[int, Trajectory], sharing: Sharing) -> Prefix:
    """Return the longest prefix that a sequence can share with one of a tree."""
    common = [_common_tokens(sequence, bodies[index]) for index in tree.indices]
    best = Prefix()
    for number in sorted(range(len(common)), key=lambda number: -common[number]):
        if common[number] <= best.length:
            break
        if tree.prefixes[number].length >= common[number]:
            continue  # all of it is another sequence's
        length = common[number]
        if sharing.same_routes:
            length = common_routes(sequence.trace, bodies[tree.indices[number]].trace, length)
        if length > best.length:
            best = Prefix(number, length)
    return best


def num_differing(batch: MicroBatch) -> int:
    """Return how many sequences of a micro-batch share less than their tokens allow, because routes differ."""
    sequences, count = batch.trajectories, 0
    shared = [prefix.length for prefix in batch.layout.prefixes] or [0] * len(sequences)
    for number, (sequence, length) in enumerate(zip(sequences, shared, strict=True)):
        earlier = (other for other in sequences[:number] if other.group == sequence.group)
        count += any(_common_tokens(sequence, other) > length for other in earlier)
    return count


def _first_sampled(sequence: Trajectory) -> int:
    sampled = sequence.sampled
    return int(sampled.argmax()) if sampled.any() else len(sequence) - 1


def _common_tokens(sequence: Trajectory, other: Trajectory) -> int:
    """Return how many tokens before its first sampled one a sequence has in common with the beginning of another."""
    length = min(_first_sampled(sequence), len(other))
    differs = sequence.token_ids[:length] != other.token_ids[:length]
    return int(differs.argmax()) if differs.any() else length


# ---- ranks -----------------------------------------------------------------------------------------------------------


def balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide items over ranks, the costliest first, each to the rank with the lowest cost so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]  # a heap
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost, rank = load[0]
        shares[rank].append(index)
        heapq.heapreplace(load, (cost + costs[index], rank))
    return shares


def divide_groups(headers: Sequence[TrajectoryHeader], ranks: int, budget: int) -> list[list[int]]:
    """Divide sequences over ranks: groups in parts of a micro-batch, or in smaller ones if that is better balanced.

    Headers do not tell how much of a prompt is shared: all tokens that were not sampled are taken for it.
    """
    best: tuple[int, list[list[int]]] | None = None
    limit, shortest = budget, min((header.length for header in headers), default=1)
    while True:
        parts = _parts(headers, limit)
        costs = [cost for cost, _ in parts]
        shares = balanced(costs, ranks)
        busiest = max(sum(costs[i] for i in share) for share in shares)
        if best is None or busiest < best[0]:
            best = busiest, [sorted(index for i in share for index in parts[i][1]) for share in shares]
        # Smaller parts have more copies of prompts: they cannot be better than this mean.
        if limit <= shortest or sum(costs) >= best[0] * ranks:
            return best[1]
        limit = min(limit, max(costs)) * 7 // 8


def _parts(headers: Sequence[TrajectoryHeader], limit: int) -> list[tuple[int, list[int]]]:
    """Return (tokens, indices) of parts of groups that have at most `limit` tokens, or one sequence."""
    parts: list[tuple[int, list[int]]] = []
    by_group: dict[int, list[int]] = {}
    for index, header in enumerate(headers):
        by_group.setdefault(header.group, []).append(index)
    for members in by_group.values():
        prompt = min(headers[i].length - headers[i].num_scored for i in members)
        cost, part = 0, list[int]()
        for index in sorted(members, key=lambda i: (-headers[i].length, i)):
            suffix = headers[index].length - prompt
            if part and cost + suffix > limit:
                parts.append((cost, part))
                cost, part = 0, []
            cost += suffix if part else suffix + prompt
            part.append(index)
        parts.append((cost, part))
    return parts
