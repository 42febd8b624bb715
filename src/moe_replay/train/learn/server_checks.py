"""Whether rollout servers are believed: what they say of their samples, against what the trainer computes.

Sums are kept by server on the device while the old log-probs of a step are computed. Before the first optimizer step
one all-reduce gives every rank the same verdict.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.errors import EngineError, ExitStatus
from moe_replay.records import MicroBatch, Trajectory
from moe_replay.train.backends.base import Backend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.device import to_device
from moe_replay.verification.metrics import NUM_SUMS, Mismatch, mismatch_terms

logger = logging.getLogger(__name__)
MIN_TOKENS = 64
"""Sampled tokens of a server in a step from which its means are judged; values that are not finite always are."""
STANDARD_ERRORS = 5.0
"""A mean ratio this many standard errors from 1 is not chance."""
ALL_SERVERS = "all servers together"


class ServerCheckError(EngineError):
    """Log-probs or routes that the rollout reports differ from those of the trainer, or routes are missing."""

    exit_status = ExitStatus.CHECK_FAILED


def server_metric(url: str, name: str) -> str:
    return f"servers/{url.partition('://')[2] or url}/{name}"


class ServerChecks:
    """Statistics of one step by server, and the servers that are not believed.

    needs_routes   routes of the rollout are replayed
    version        of the trainer's weights: log-probs of tokens that older weights sampled differ by right
    excluded       URL -> why it is not believed, for the rest of the run
    """

    def __init__(self, config: TrainConfig, backend: Backend, *, needs_routes: bool) -> None:
        self._config = config.server_checks
        self._backend = backend
        self._needs_routes = needs_routes
        # Probability that was cut off and is not masked here makes the ratios of an honest server smaller than 1.
        self._is_biased = config.rollout.is_truncated and not config.rollout.replays_sampling_mask
        self._warned: set[tuple[str, str]] = set()
        self.version = 0
        self.excluded: dict[str, str] = {}
        self.begin(("",))

    def begin(self, servers: Sequence[str]) -> None:
        """Begin a step, whose trajectories these have sampled."""
        self._servers = tuple(servers)
        # By server: sums of a `Mismatch`; (token, layer) pairs that led to sampled tokens, all and those with a route.
        self._sums = torch.zeros(len(servers), NUM_SUMS + 2, dtype=torch.float64, device=self._backend.device)
        self._scored: dict[MicroBatch, Tensor] = {}

    # ---- statistics ---------------------------------------------------------------------------------------------

    def add_logprobs(self, batch: MicroBatch, scored: Tensor) -> None:
        """Add the log-probs of a micro-batch, on a rank that has them; tokens of excluded servers lose their weight."""
        if self._backend.reports_metrics:  # of the ranks that share tokens, one
            difference = (scored.detach() - batch.rollout_logprobs).double()
            is_fresh = self._per_token(batch, self._is_fresh)
            servers, terms = self._servers_of(batch), mismatch_terms(difference).T
            self._sums[:, :NUM_SUMS].index_add_(0, servers, torch.where(is_fresh[:, None], terms, 0.0))
        self._scored[batch] = scored
        self._leave_out(batch)

    def add_routes(self, batch: MicroBatch) -> None:
        """Add the routes that led to the sampled tokens of a micro-batch, in the layers of this rank."""
        if not self._needs_routes:
            return
        counts = np.zeros((len(self._servers), 2))
        for trajectory in batch.trajectories:
            server = self._servers_of_tokens(trajectory)
            routed = trajectory.trace.valid[:-1][trajectory.sampled[1:]]
            counts[:, 0] += np.bincount(server, minlength=len(counts)) * routed.shape[1]
            counts[:, 1] += np.bincount(server, routed.sum(1), len(counts))
        self._sums[:, NUM_SUMS:] += to_device(counts, self._sums.device)

    def _servers_of_tokens(self, trajectory: Trajectory) -> np.ndarray:
        """(n,) int64: index of the server that has sampled each scored token of a trajectory."""
        parts = trajectory.servers or ((0, ""),)
        starts = [0, *(start for start, _ in parts[1:]), len(trajectory)]
        indices = np.repeat([self._servers.index(url) for _, url in parts], np.diff(starts))
        return indices[1:][trajectory.sampled[1:]]

    def _servers_of(self, batch: MicroBatch) -> Tensor:
        """(N,) int64: the same for the tokens of a micro-batch."""
        return self._per_token(batch, self._servers_of_tokens)

    def _is_fresh(self, trajectory: Trajectory) -> np.ndarray:
        """(n,) bool: whether the trainer's weights have sampled each scored token of a trajectory."""
        return trajectory.versions[1:][trajectory.sampled[1:]] == self.version

    def _per_token(self, batch: MicroBatch, of_trajectory: Callable[[Trajectory], np.ndarray]) -> Tensor:
        values = np.concatenate([of_trajectory(trajectory) for trajectory in batch.trajectories])
        return to_device(values, self._sums.device)

    # ---- the verdict --------------------------------------------------------------------------------------------

    def judge(self) -> dict[str, float]:
        """Return the metrics of the step so far; servers that are not believed are `excluded`. All ranks call it.

        Raises on every rank if the run must not go on.
        """
        sums = self._sums.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        sums = sums.cpu()
        metrics: dict[str, float] = {}
        problems: dict[str, dict[str, str]] = {}
        for url, row in zip(self._servers, sums, strict=True):
            statistics = _statistics(row)
            problems[url] = dict(self._problems(statistics))
            statistics.pop("routed_pairs", None)
            if url:
                metrics |= {server_metric(url, name): value for name, value in statistics.items()}
        if not any(problems.values()):
            problems[ALL_SERVERS] = dict(self._problems(_statistics(sums.sum(0))))
        self._act({url: causes for url, causes in problems.items() if causes})
        metrics |= {server_metric(url, "excluded"): 1.0 for url in self._servers if url in self.excluded}
        left_out = sum(float(row[0]) for url, row in zip(self._servers, sums, strict=True) if url in self.excluded)
        return {"servers/excluded_fraction": left_out / max(float(sums[:, 0].sum()), 1.0), **metrics}

    def _problems(self, statistics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield (limit, sentence) of what a server's statistics exceed."""
        limits, few = self._config, statistics.get("tokens", 0.0) < MIN_TOKENS
        k3 = statistics.get("k3_kl", 0.0)
        if not math.isfinite(k3) or (k3 > limits.max_k3 and not few):
            yield "max_k3", f"its log-probs are a k3 of {k3:.3g} from the trainer's (at most {limits.max_k3:g})"
        covered = statistics.get("covered", 1.0)
        if covered < limits.min_covered and statistics["routed_pairs"] >= MIN_TOKENS:
            yield "min_covered", f"{covered:.1%} of its sampled tokens have routes (at least {limits.min_covered:.1%})"
        if few:
            return
        ratio, ess = statistics["ratio_mean"], statistics["ess"]
        is_no_chance = abs(ratio - 1.0) > STANDARD_ERRORS * statistics["ratio_error"]
        lowest = 0.0 if self._is_biased else 1 / limits.max_mean_ratio
        if not lowest <= ratio <= limits.max_mean_ratio and is_no_chance:
            yield (
                "max_mean_ratio",
                f"the mean ratio of the trainer's probabilities to its own is {ratio:.3g} (1 for log-probs of the "
                f"distribution that was sampled from; {1 / limits.max_mean_ratio:.3g} to {limits.max_mean_ratio:g})",
            )
        if ess < limits.min_ess:
            yield "min_ess", f"the effective sample size is {ess:.3g} of its tokens (at least {limits.min_ess:g})"

    def _act(self, problems: Mapping[str, Mapping[str, str]]) -> None:
        """Warn, exclude servers or raise, as the settings say."""
        causes = {url: "; ".join(sentences.values()) for url, sentences in problems.items() if url not in self.excluded}
        if not causes:
            return
        if self._config.action == "warn":
            exceeded = {(url, limit): sentence for url in causes for limit, sentence in problems[url].items()}
            for url, limit in exceeded.keys() - self._warned:
                logger.warning("%s is believed although %s", url or "the rollout engine", exceeded[url, limit])
            self._warned |= exceeded.keys()
            return
        cannot_exclude = {"", ALL_SERVERS} & causes.keys()
        others = {*self._servers} - causes.keys() - self.excluded.keys()
        if self._config.action == "stop" or cannot_exclude or not others:
            listed = "; ".join(f"{url or 'the engine'}: {cause}" for url, cause in causes.items())
            raise ServerCheckError(
                f"the rollout is not believed: {listed}",
                expected="log-probs and routes as the trainer computes them from the same tokens and weights",
                remedy="Nothing was trained on the samples of this step; server_checks has the limits",
            )
        for url, cause in causes.items():
            logger.warning("rollout server %s is not believed, and not used again in this run: %s", url, cause)
            self.excluded[url] = cause
        for batch in self._scored:
            self._leave_out(batch)

    def _leave_out(self, batch: MicroBatch) -> None:
        """Give tokens of excluded servers no weight, and no factor of the loss that they reported."""
        indices = [index for index, url in enumerate(self._servers) if url in self.excluded]
        if not indices or batch.old_logprobs is None:
            return
        servers = self._servers_of(batch)
        is_out = torch.isin(servers, servers.new_tensor(indices))
        batch.loss_weights = batch.loss_weights.masked_fill(is_out, 0.0)
        batch.old_logprobs = torch.where(is_out, self._scored[batch], batch.old_logprobs)
        batch.rollout_logprobs = torch.where(is_out, self._scored[batch], batch.rollout_logprobs)


def _statistics(row: Tensor) -> dict[str, float]:
    """Return the statistics of a row of sums; those that nothing was measured for are missing."""
    statistics: dict[str, float] = {}
    summary = Mismatch(row[:NUM_SUMS], row.new_zeros(2)).summary()
    if summary:
        tokens, mean, ess = float(row[0]), summary["ratio/mean"], summary["ess"]
        statistics = {"tokens": tokens, "k3_kl": summary["k3_kl"], "ratio_mean": mean, "ess": ess}
        # ess = mean² / mean of squares
        statistics["ratio_error"] = mean * math.sqrt(max(1 / ess - 1, 0.0) / tokens) if ess > 0 else math.inf
    pairs, routed = row[NUM_SUMS:].tolist()
    if pairs:
        statistics |= {"covered": routed / pairs, "routed_pairs": pairs}
    return statistics
