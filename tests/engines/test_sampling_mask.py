"""Sampling masks: what they hold, how they travel, and that none is believed that cannot be true."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moe_replay as mr
from moe_replay.engines.http import check_samples
from moe_replay.engines.server.sample_wire import decode_samples, encode_samples
from moe_replay.engines.session import Session
from moe_replay.engines.sglang.wire import generate_request
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.engines.vllm.masks import MASK_OPTION, MaskReturn
from moe_replay.errors import EngineError, EngineName, TraceFormatError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeLayer
from moe_replay.sampling_mask import HEADER_BYTES, MaskLimits, SamplingMask, mask_from_bytes, mask_to_bytes
from tests.engines.tiny import VOCABULARY, tiny_model

Supports = list[set[int]]


@st.composite
def masks(draw) -> tuple[int, Supports]:
    """A vocabulary and the support of each token in it; some are all of it."""
    size = draw(st.sampled_from([1, 2, 7, 8, 9, 97, 256, 300, 70000]))
    ids = st.sets(st.integers(0, size - 1), min_size=1, max_size=min(size, 40))
    return size, draw(st.lists(st.one_of(ids, st.just(set(range(min(size, 300))))), max_size=12))


def mask_of(size: int, supports: Supports) -> SamplingMask:
    return SamplingMask.of_lists([list(ids) for ids in supports], size)


def supports_of(mask: SamplingMask) -> Supports:
    whole = set(range(mask.vocab_size))
    parts = np.split(mask.token_ids, mask.offsets[1:-1]) if len(mask) else []
    return [set(ids.tolist()) if len(ids) else whole for ids in parts]


# ---- the record -----------------------------------------------------------------------------------------------------


@given(masks(), st.randoms())
def test_supports_are_kept_whatever_is_done_with_their_mask(made, random) -> None:
    size, supports = made
    mask = mask_of(size, supports)
    assert supports_of(mask) == supports
    assert mask.sizes.tolist() == [len(ids) for ids in supports]
    order = [random.randrange(len(supports)) for _ in range(5)] if supports else []
    assert supports_of(mask.take(np.array(order, np.int64))) == [supports[i] for i in order]
    assert supports_of(SamplingMask.concatenate([mask, mask])) == supports * 2


def test_a_mask_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(EngineError, match=r"outside of the vocabulary \[sample 3, token 1\].*0 <= id < 9, found 9"):
        SamplingMask.of_lists([[1], [2, 9]], 9, sample=3)
    with pytest.raises(EngineError, match=r"outside of the vocabulary \[sample 3, token 0\].*found -1"):
        SamplingMask.of_lists([[-1], [2]], 9, sample=3)
    with pytest.raises(EngineError, match=r"empty support \[sample 0, token 2\]"):
        SamplingMask.of_lists([[1], [2], []], 9, sample=0)
    with pytest.raises(EngineError, match=r"each once \[sample 1, token 1\].*4 before 4"):
        SamplingMask.of_lists([[1], [4, 4]], 9, sample=1)
    with pytest.raises(EngineError, match="do not add up"):
        SamplingMask(9, np.array([2, 1]), np.array([1, 2]))
    with pytest.raises(EngineError, match="several vocabularies"):
        SamplingMask.concatenate([SamplingMask.whole(1, 9), SamplingMask.whole(1, 8)])


def test_a_sampled_token_must_be_in_its_own_support() -> None:
    mask = SamplingMask.of_lists([[1, 2], [0, 3], list(range(9))], 9)
    mask.check_sampled(np.array([2, 0, 8]))
    with pytest.raises(EngineError, match=r"not in its own support \[sample 5, token 1\].*token id 2"):
        mask.check_sampled(np.array([2, 2, 8]), sample=5)
    with pytest.raises(EngineError, match=r"one support per sampled token \[sample 5\].*2 tokens.*3 tokens"):
        mask.check_sampled(np.array([2, 0]), sample=5)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@given(masks())
def test_masks_come_back_as_they_went(made) -> None:
    mask = mask_of(*made)
    data = mask_to_bytes(mask)
    assert mask_from_bytes(data) == mask
    assert mask_to_bytes(mask_from_bytes(data)) == data


def test_bytes_of_a_support_are_those_of_its_ids_or_of_a_bit_set() -> None:
    listed = mask_to_bytes(SamplingMask.of_lists([list(range(0, 6400, 64))], 151936))
    assert len(listed) == HEADER_BYTES + 4 + 2 * 100 + 2 * 13  # 18 bits an id: two byte planes, two bit planes
    wide = mask_to_bytes(SamplingMask.of_lists([list(range(100000))], 151936))
    assert len(wide) == HEADER_BYTES + 4 + 151936 // 8


@given(masks(), st.data())
def test_harmed_bytes_are_refused(made, data) -> None:
    blob = mask_to_bytes(mask_of(*made))
    with pytest.raises(TraceFormatError):
        mask_from_bytes(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(TraceFormatError):
        mask_from_bytes(blob + b"\0")
    harmed = bytearray(blob)
    harmed[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TraceFormatError):
        mask_from_bytes(bytes(harmed))


@pytest.mark.parametrize("offset", [10, 36])
def test_flags_and_the_reserved_field_must_be_zero(offset: int) -> None:
    head = bytearray(mask_to_bytes(SamplingMask.of_lists([[1, 2]], 97)))
    body = head[HEADER_BYTES:]
    head[offset] = 1
    header = bytes(head[: HEADER_BYTES - 4])
    with pytest.raises(TraceFormatError, match=r"must be 0 \[sample 2\].*found 1"):
        mask_from_bytes(header + zlib.crc32(header).to_bytes(4, "little") + body, sample=2)


def test_readers_have_limits() -> None:
    blob = mask_to_bytes(SamplingMask.of_lists([[1, 2]] * 5, 97))
    for limits in (MaskLimits(tokens=4), MaskLimits(vocab_size=96), MaskLimits(blob_bytes=len(blob) - 1)):
        with pytest.raises(TraceFormatError, match=r"above the limit \[sample 2\]"):
            mask_from_bytes(blob, sample=2, limits=limits)


def test_the_example_of_the_docs() -> None:
    mask = SamplingMask.of_lists([[5, 300], list(range(400)), list(range(100))], 400)
    text = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text(encoding="utf-8")
    example = text.split("## Sampling mask")[1].split("```")[1]
    assert bytes.fromhex("".join(example.split())) == mask_to_bytes(mask)


# ---- samples and sessions -------------------------------------------------------------------------------------------


def sample(prompt: list[int], completion: list[int], supports: list[list[int]] | None, **more) -> Sample:
    tokens = np.array(prompt + completion)
    valid = np.arange(len(tokens)) < len(tokens) - 1
    trace = mr.RouteTrace(tokens, np.tile([0, 1], (len(tokens), 1, 1)), (1,), valid, 0, num_experts=4)
    return Sample(
        prompt_ids=trace.token_ids[: len(prompt)],
        completion_ids=trace.token_ids[len(prompt) :],
        logprobs=np.zeros(len(completion), np.float32),
        finish_reason=more.pop("finish_reason", FinishReason.STOP),
        trace=trace,
        weight_version=0,
        sampling_mask=None if supports is None else SamplingMask.of_lists(supports, 20),
        **more,
    )


def test_masks_travel_with_their_samples() -> None:
    sent = [sample([1], [2, 3], [[2], [1, 3]]), sample([1], [4], None), sample([1], [5], [[5, 6]])]
    arrived = decode_samples(encode_samples(sent))
    assert [one.sampling_mask for one in arrived] == [one.sampling_mask for one in sent]
    assert b"mask_bytes" not in encode_samples(sent[1:2])  # as older readers expect


def test_a_server_that_leaves_out_the_mask_is_refused() -> None:
    topology = mr.MoeTopology(2, (MoeLayer(1, 4, 2),))
    found = [sample([1], [2], [[2]])]
    params = SamplingParams(sampling_mask=True, top_k=3)
    check_samples(found, [1], params, url="http://a", topology=topology, vocab_size=20)
    with pytest.raises(EngineError, match=r"sampling mask of another vocabulary \[sample 0\].*21 tokens.*20 tokens"):
        check_samples(found, [1], params, url="http://a", topology=topology, vocab_size=21)
    with pytest.raises(EngineError, match=r"without its sampling mask \[sample 0\]"):
        check_samples([sample([1], [2], None)], [1], params, url="http://a", topology=topology, vocab_size=20)


def test_a_session_joins_the_masks_of_its_turns() -> None:
    session = Session([1, 2])
    session.absorb(sample([1, 2], [], None, finish_reason=FinishReason.ABORT))
    session.absorb(sample([1, 2], [3], [[3, 4]], finish_reason=FinishReason.ABORT))
    session.absorb(sample([1, 2, 3], [5], [[5]]))
    session.observe([6, 7])
    session.absorb(sample([1, 2, 3, 5, 6, 7], [8], [[8, 9]]))
    mask = session.finish().sampling_mask
    assert mask is not None
    assert mask.counts.tolist() == [0, 0, 2, 1, 0, 0, 2]
    assert mask.token_ids.tolist() == [3, 4, 5, 8, 9]


def test_turns_with_and_without_a_mask_do_not_mix() -> None:
    session = Session([1, 2])
    session.absorb(sample([1, 2], [3], None))
    with pytest.raises(EngineError, match="some turns"):
        session.absorb(sample([1, 2, 3], [4], [[4]]))
    session = Session([1, 2])
    session.absorb(sample([1, 2], [3], [[3]]))
    with pytest.raises(EngineError, match="some turns"):
        session.absorb(sample([1, 2, 3], [4], None))


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncation", [{"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 8}])
def test_transformers_returns_the_support_it_sampled_from(truncation) -> None:
    import torch

    model = tiny_model("qwen3_moe")
    engine = TransformersEngine(model, max_length=64)
    params = SamplingParams(n=3, max_tokens=6, temperature=0.8, seed=1, sampling_mask=True, **truncation)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    for prompt, group in zip(prompts, engine.generate(prompts, params), strict=True):
        for one in group:
            ids = torch.tensor(one.trace.token_ids[None].astype(np.int64))
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.8
            mask = one.sampling_mask
            assert mask is not None
            assert len(mask) == len(one.completion_ids)
            kept = torch.zeros_like(logits, dtype=torch.bool)
            for row, support in enumerate(supports_of(mask)):
                kept[row, list(support)] = True
            scored = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
            found = scored.gather(-1, torch.tensor(one.completion_ids.astype(np.int64))[:, None])[:, 0]
            np.testing.assert_allclose(found.numpy(), one.logprobs, atol=1e-4)
            assert mask.counts.min() >= 1
            # The support is the smallest that top_p allows: without its least likely token it holds less.
            held = logits.softmax(-1).where(kept, 0.0)
            least = held.where(kept, 1.0).min(-1).values
            if "top_k" not in truncation:
                assert ((held.sum(-1) - least) < 0.7 + 1e-5).all()
                assert (held.sum(-1) > 0.7 - 1e-5).all()
    engine.close()


def test_nothing_is_cut_off_where_sampling_is_not_truncated() -> None:
    engine = TransformersEngine(tiny_model("qwen3_moe"), max_length=64)
    for more in ({}, {"temperature": 0.0, "top_k": 3}):
        (one,) = engine.generate([[1, 2]], SamplingParams(max_tokens=3, sampling_mask=True, **more))[0]
        assert one.sampling_mask == SamplingMask.whole(3, VOCABULARY)
    (one,) = engine.generate([[1, 2]], SamplingParams(max_tokens=3, top_k=4))[0]
    assert one.sampling_mask is None
    engine.close()


def test_sglang_refuses_masks() -> None:
    with pytest.raises(EngineError, match=r"sampling masks of SGLang.*rollout\.sampling_mask"):
        generate_request([1], SamplingParams(top_k=3, sampling_mask=True))


def test_a_vllm_without_the_option_refuses_masks() -> None:
    with pytest.raises(EngineError, match="was not started to return sampling masks"):
        MaskReturn(EngineName("vLLM", "0.32.0"), {}, 20).truncation(SamplingParams(top_k=3, sampling_mask=True))


def test_requests_to_a_vllm_that_returns_masks_have_a_top_k() -> None:
    name, params = EngineName("vLLM", "0.32.0"), SamplingParams(temperature=0.5, top_p=0.9)
    plain, masked = MaskReturn(name, {}, 20), MaskReturn(name, {MASK_OPTION: True}, 20)
    assert plain.truncation(params) == {"temperature": 0.5, "top_p": 0.9, "top_k": 0}
    assert masked.truncation(params) == {"temperature": 0.5, "top_p": 0.9, "top_k": 20}
    assert masked.truncation(SamplingParams(temperature=0)) == {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
    assert (plain.scoring, masked.scoring) == ({}, {"top_k": 1})


def test_masks_of_vllm_are_checked() -> None:
    masked = MaskReturn(EngineName("vLLM", "0.32.0"), {MASK_OPTION: True}, 20)
    params, completion = SamplingParams(top_k=3, sampling_mask=True), np.array([2, 3])
    assert masked.mask([[2], [1, 3]], completion, params, 0) == SamplingMask.of_lists([[2], [1, 3]], 20)
    with pytest.raises(EngineError, match=r"returned no sampling mask \[sample 4\]"):
        masked.mask(None, completion, params, 4)
    nothing = masked.mask(None, completion[:0], params, 0)
    assert len(nothing) == 0
