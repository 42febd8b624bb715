"""What a server answers, whichever it is: samples that cannot be true are refused, and nothing it sends raises bare."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from moe_replay.errors import EngineAnswerError, EngineError, MoeReplayError
from moe_replay.rollout.types import FinishReason, Sample, SamplingParams, is_unrouted
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.messages import one_line

ROUNDING = 1e-3
"""Log-probs may be above 0 by so much: engines subtract two large numbers."""
DIGEST_HEADER = "content-digest"


@contextmanager
def reading_answer(url: str) -> Iterator[None]:
    """Raise `EngineAnswerError` for whatever fails while the answer of a server is read; errors of engines stay."""
    try:
        yield
    except EngineError:
        raise
    except (MoeReplayError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as wrong:
        kind = "" if isinstance(wrong, MoeReplayError) else f"{type(wrong).__name__}: "
        raise EngineAnswerError(f"{url} returned an answer that cannot be read: {kind}{one_line(wrong)}") from wrong


def check_samples(
    samples: Sequence[Sample],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    url: str,
    topology: MoeTopology,
    vocab_size: int | None,
) -> None:
    """Raise unless these can be the samples of a prompt.

    vocab_size   of the model; None: token ids are only known to be at least 0
    """
    if len(samples) != params.n:
        raise EngineAnswerError(f"{url} returned another number of samples", expected=params.n, found=len(samples))
    ids = np.asarray(prompt, np.int64)
    for index, sample in enumerate(samples):
        problem = _problem(sample, ids, params, topology, vocab_size)
        if problem:
            what, expected, found = problem
            raise EngineAnswerError(f"{url} returned {what}", sample=index, expected=expected, found=found)


def _problem(
    sample: Sample, prompt: np.ndarray, params: SamplingParams, topology: MoeTopology, vocab_size: int | None
) -> tuple[str, object, object] | None:
    """Return what is wrong with a sample, what was expected and what was found."""
    completion, logprobs, trace = sample.completion_ids, sample.logprobs, sample.trace
    if not np.array_equal(sample.prompt_ids, prompt):
        return "a sample of another prompt", f"{len(prompt)} tokens as sent", f"{len(sample.prompt_ids)} tokens"
    if len(completion) > params.max_tokens:
        return "more tokens than were asked for", f"at most {params.max_tokens}", len(completion)
    if not len(completion) and sample.finish_reason is not FinishReason.ABORT:
        return "a sample without tokens that was not aborted", "at least one token", sample.finish_reason.value
    largest = vocab_size if vocab_size is not None else 2**31
    beyond = np.flatnonzero((completion < 0) | (completion >= largest))
    if beyond.size:
        return "a token that the model does not have", f"ids below {largest}", int(completion[beyond[0]])
    impossible = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= ROUNDING)))
    if impossible.size:
        return "an impossible log-prob", "finite and at most 0", float(logprobs[impossible[0]])
    mask = sample.sampling_mask
    if params.sampling_mask and mask is None and len(completion):
        return "a sample without its sampling mask", "the support of each token", "no mask"
    if mask is not None and vocab_size is not None and mask.vocab_size != vocab_size:
        return "a sampling mask of another vocabulary", f"{vocab_size} tokens", f"{mask.vocab_size} tokens"
    if not params.routes and is_unrouted(trace):
        return None
    if (trace.layers, trace.top_k) != (topology.layers, topology.top_k) or (
        trace.num_experts is not None and trace.num_experts > topology.num_experts
    ):
        return "routes of another model", f"layers {topology.layers}, top {topology.top_k}", trace
    return None


# ---- integrity of a body --------------------------------------------------------------------------------------------


def content_digest(body: bytes) -> str:
    """Return the value of the header `Content-Digest` (RFC 9530) for a body."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def check_digest(body: bytes, header: str | None, url: str) -> None:
    """Raise if a body is another than its sender's; a sender without a digest of our kind is not checked."""
    if header and header.startswith("sha-256=") and header != content_digest(body):
        raise EngineAnswerError(f"{url} returned a body that was corrupted on its way", expected=header)


# ---- the model behind a server --------------------------------------------------------------------------------------


def vocabulary_size(model: str) -> int | None:
    """Return the vocabulary of a model by the config.json in its folder; None if there is none that says so."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None
