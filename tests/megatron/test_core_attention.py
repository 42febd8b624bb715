"""The core attention in torch: packed sequences, windows, sinks, grouped queries, against a loop over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from moe_replay.errors import UnsupportedRouterError
from moe_replay.megatron import core_attention
from moe_replay.megatron.core_attention import PlainCoreAttention
from moe_replay.utils.device import varlen_kernel

LENGTHS = [5, 1, 9, 4]
HEADS, GROUPS, WIDTH = 4, 2, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (2, 0), "window_attn_skip_freq": [1, 0]},
    "sinks": {"softmax_type": "learnable"},
    "window-sinks": {"softmax_type": "learnable", "window_size": (2, 0), "window_attn_skip_freq": [1, 0]},
}


def attention(layer_number: int = 1, **settings: Any) -> PlainCoreAttention:
    """Core attention of one layer; sinks are not zero."""
    if settings:
        pytest.importorskip("megatron.core")
    plain = {
        "attention_dropout": 0.0,
        "kv_channels": WIDTH,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "num_attention_heads": HEADS,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
    }
    made = PlainCoreAttention(SimpleNamespace(**(plain | settings)), layer_number, None, "self")
    if made.softmax_offset is not None:
        made.softmax_offset.data.copy_(torch.linspace(-1, 2, HEADS))
    return made


def inputs(tokens: int, seed: int = 0) -> list[Tensor]:
    """Query, key and value of packed tokens, with gradient."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, WIDTH, generator=random).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]


def packed_params(lengths: list[int]) -> Any:
    """What Megatron-Core passes beside packed tokens."""
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_q_padded=None, max_seqlen_q=max(lengths))


def by_hand(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """One sequence, one head and one token at a time, (t, heads * dim)."""
    rows = []
    for token in range(len(query)):
        first = 0 if window is None else max(0, token - window)
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = key[first : token + 1, group] @ query[token, head] / WIDTH**0.5
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            weights = scores.softmax(0)[: token + 1 - first]
            rows.append(weights @ value[first : token + 1, group])
    return torch.stack(rows).view(len(query), -1)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("layer_number", [1, 2])
def test_packed_sequences_attend_each_to_itself(name: str, layer_number: int) -> None:
    core = attention(layer_number, **SETTINGS[name])
    window = 2 if "window" in name and layer_number == 1 else None
    parts = inputs(sum(LENGTHS))
    found = core(*parts, packed_seq_params=packed_params(LENGTHS))
    sinks = core.softmax_offset
    expected = torch.cat(
        [by_hand(*one, window, sinks) for one in zip(*(part.split(LENGTHS) for part in parts), strict=True)]
    )
    torch.testing.assert_close(found, expected)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    of = [*parts, *([] if sinks is None else [sinks])]
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), of), torch.autograd.grad((expected * weight).sum(), of), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", SETTINGS)
def test_padded_is_packed(name: str) -> None:
    core = attention(**SETTINGS[name])
    parts = inputs(12)
    packed = core(*parts, packed_seq_params=packed_params([6, 6]))
    padded = core(*(part.view(2, 6, -1, WIDTH).transpose(0, 1) for part in parts))
    torch.testing.assert_close(padded.transpose(0, 1).reshape(packed.shape), packed)


@pytest.mark.parametrize("shares_heads", [True, False])
@pytest.mark.parametrize("name", ["plain", "window"])
def test_the_kernel_of_packed_sequences_is_asked_for_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, shares_heads: bool
) -> None:
    """On a GPU torch's kernel is called; here a stand-in with its signature. That of 2.11 repeats no heads."""
    monkeypatch.setattr(core_attention, "varlen_shares_heads", lambda: shares_heads)
    parts = inputs(sum(LENGTHS))

    def kernel(query: Tensor, key: Tensor, value: Tensor, begins: Tensor, ends: Tensor, *longest: int, **how: Any):
        assert longest == (9, 9)
        assert how["scale"] == pytest.approx(WIDTH**-0.5)
        assert how.get("enable_gqa", False) == shares_heads
        assert shares_heads or query.shape == key.shape == value.shape
        groups = slice(None) if shares_heads else slice(None, None, HEADS // GROUPS)
        left, right = how["window_size"]
        assert right == 0
        lengths = (begins[1:] - begins[:-1]).tolist()
        assert torch.equal(begins, ends)
        each = zip(*(part.split(lengths) for part in (query, key[:, groups], value[:, groups])), strict=True)
        return torch.cat([by_hand(*one, None if left < 0 else left, None) for one in each]).view_as(query)

    class OnGpu(PlainCoreAttention):
        def _varlen_kernel(self, query: Tensor, value: Tensor) -> Any:
            return kernel

    core = attention(**SETTINGS[name])
    expected = core(*parts, packed_seq_params=packed_params(LENGTHS))
    core.__class__ = OnGpu
    torch.testing.assert_close(core(*parts, packed_seq_params=packed_params(LENGTHS)), expected)


def test_a_kernel_without_windows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 has none."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", lambda query, key, value, is_causal=False: query)
    varlen_kernel.cache_clear()
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(5, HEADS, WIDTH))
    try:
        assert attention()._varlen_kernel(on_gpu, on_gpu) is None
    finally:
        varlen_kernel.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["plain", "window"])
def test_the_kernel_of_packed_sequences(name: str) -> None:
    core = attention(**SETTINGS[name])
    parts = [part.detach().cuda().bfloat16() for part in inputs(sum(LENGTHS))]
    params = packed_params(LENGTHS)
    expected = core(*(part.float() for part in parts), packed_seq_params=params)
    params.cu_seqlens_q = params.cu_seqlens_q.cuda()
    assert core._varlen_kernel(parts[0], parts[2]) is not None
    torch.testing.assert_close(core(*parts, packed_seq_params=params).float(), expected, rtol=2e-2, atol=2e-2)


def test_other_kinds_of_softmax_are_refused() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"softmax_type 'learnable', found 'off-by-one'"):
        attention(softmax_type="off-by-one")
