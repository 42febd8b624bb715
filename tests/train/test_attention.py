"""Attention sequence by sequence: what eager attention computes for each sequence alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from moe_replay.errors import MoeReplayError
from moe_replay.routes.layout import TokenLayout
from moe_replay.train.backends import attention
from moe_replay.train.backends.attention import PackedSequences, choose, forward_arguments, use_attention
from moe_replay.train.loop import train
from tests.replay.adapters.families import RELEASE, VOCABULARY, available_families, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = (5, 9, 9, 3)  # longer than the windows of the tiny configs, which are 4
STATEFUL = {"granitemoehybrid", "lfm2_moe", "minimax", "zaya"}  # layers that carry a state through a packed row
QUICK = {"qwen3_moe", "gpt_oss", "deepseek_v3", "cohere2_moe", "minimax", "afmoe"}
FURTHER = (pytest.mark.slow, pytest.mark.whole_runs)


def of_families(packed: bool) -> list[Any]:
    names = [name for name in available_families() if not (packed and name in STATEFUL)]
    return [name if name in QUICK else pytest.param(name, marks=FURTHER) for name in names]


def outputs(model: nn.Module, ids: Tensor, positions: Tensor | None = None, **arguments: Any) -> Tensor:
    found = model(input_ids=ids, position_ids=positions, use_cache=False, **arguments)
    return found.last_hidden_state if getattr(found, "logits", None) is None else found.logits


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Of a weighted sum of the output, whose values all count differently."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fed(layout: TokenLayout, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and positions as a micro-batch has them: 0 where there is padding."""
    index = torch.from_numpy(layout.fed.copy())
    positions = torch.cat([torch.arange(length) for length in layout.lengths])
    return torch.where(index < 0, 0, tokens[index]), torch.where(index < 0, 0, positions[index])


def sequence_by_sequence(name: str) -> nn.Module:
    model = tiny_model(name)
    if choose(model, CPU, torch.float32).name != "blocks":
        pytest.skip(f"{name} needs a mask of Transformers")
    use_attention(model, "auto", CPU, torch.float32, log=False)
    return model


def check_against_eager(name: str, layout: TokenLayout) -> None:
    model, reference = sequence_by_sequence(name), tiny_model(name)
    reference.set_attn_implementation("eager")
    tokens = torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    expected = torch.cat([outputs(reference, sequence[None])[0] for sequence in tokens.split(LENGTHS)])
    ids, positions = fed(layout, tokens)
    found = outputs(model, ids, positions, **forward_arguments(model, layout, CPU))
    found = found.flatten(0, 1)[torch.from_numpy(layout.fed.flatten() >= 0)]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4)
    wanted = gradients(reference, expected)
    for parameter, gradient in gradients(model, found).items():
        limit = 1e-4 * float(wanted[parameter].abs().max()) + 1e-6
        torch.testing.assert_close(gradient, wanted[parameter], rtol=0, atol=limit, msg=parameter)


@pytest.mark.parametrize("name", of_families(packed=True))
def test_packed_sequences_have_the_log_probs_and_gradients_of_each_alone(name: str) -> None:
    check_against_eager(name, TokenLayout.packed(LENGTHS))


@pytest.mark.parametrize("name", of_families(packed=False))
def test_padded_sequences_have_the_log_probs_and_gradients_of_each_alone(name: str) -> None:
    check_against_eager(name, TokenLayout.padded(LENGTHS))


def test_a_forward_that_was_not_told_reads_sequences_off_positions() -> None:
    model, layout = sequence_by_sequence("qwen3_moe"), TokenLayout.packed(LENGTHS)
    ids, positions = fed(layout, torch.arange(3, 3 + sum(LENGTHS)))
    with torch.no_grad():
        told = outputs(model, ids, positions, **forward_arguments(model, layout, CPU))
        assert torch.equal(outputs(model, ids, positions), told)
        first = outputs(model, ids[:, : LENGTHS[0]])
        torch.testing.assert_close(told[:, : LENGTHS[0]], first)


def test_a_layer_that_is_not_told_where_sequences_begin_is_refused() -> None:
    heads = torch.zeros(1, 2, 4, 8)
    with pytest.raises(MoeReplayError, match=r"not told where sequences begin.*found Identity.*'sdpa'"):
        attention.IMPLEMENTATIONS["blocks"](nn.Identity(), heads, heads, heads, None)


# ---- functions -------------------------------------------------------------------------------------------------------


def kernel_by_blocks(shares_heads: bool) -> Callable[..., Tensor]:
    """What `varlen_attn` documents, computed in a plain way."""

    def varlen_attn(q, k, v, starts, ends, longest, again, *, scale, window_size, enable_gqa=False):
        assert enable_gqa == shares_heads
        assert enable_gqa or q.shape[1] == k.shape[1]
        assert starts is ends
        assert longest == again == int(starts.diff().max())
        assert all(heads.shape[-1] % 8 == 0 and heads.is_contiguous() for heads in (q, k, v))
        repeats, parts, (left, right) = q.shape[1] // k.shape[1], [], window_size
        assert right == 0
        for first, last in pairwise(starts.tolist()):
            a, b, c = (heads[first:last].transpose(0, 1) for heads in (q, k, v))
            b, c = b.repeat_interleave(repeats, 0), c.repeat_interleave(repeats, 0)
            scores, age = (
                a @ b.transpose(1, 2) * scale,
                torch.arange(last - first)[:, None] - torch.arange(last - first),
            )
            hidden = (age < 0) | ((age > left) if left >= 0 else False)
            parts.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ c).transpose(0, 1))
        return torch.cat(parts)

    return varlen_attn


@pytest.mark.parametrize("shares_heads", [True, False])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sizes", [(16, 16), (12, 8)])
def test_the_flash_kernel_gets_what_it_documents(
    monkeypatch: pytest.MonkeyPatch, shares_heads: bool, window: int | None, sizes: tuple[int, int]
) -> None:
    monkeypatch.setattr(attention._varlen, "kernel", kernel_by_blocks(shares_heads))
    monkeypatch.setattr(attention._varlen, "shares_heads", shares_heads)
    check_function(attention.IMPLEMENTATIONS["varlen"], sizes, sliding_window=window)


@pytest.mark.parametrize("settings", [{}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_the_same_pairs_and_sinks(settings: dict[str, Any], window: int | None) -> None:
    check_function(attention.IMPLEMENTATIONS["flex"], (16, 16), sliding_window=window, **settings)


def check_function(function: Callable[..., Any], sizes: tuple[int, int], **settings: Any) -> None:
    """A function against the one that computes sequence by sequence, packed and padded."""
    for rows, lengths in ((1, LENGTHS), (3, (9, 9, 9))):
        width = sum(lengths) // rows
        query, key, value = (
            torch.randn(rows, heads, width, size) for heads, size in ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
        )
        arguments = {"packed_sequences": PackedSequences.of(lengths, CPU), "scaling": 0.3, **settings}
        found, _ = function(nn.Identity(), query, key, value, None, **arguments)
        expected, _ = attention.IMPLEMENTATIONS["blocks"](nn.Identity(), query, key, value, None, **arguments)
        assert found.shape == (rows, width, 4, sizes[1])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- choice ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def has_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_varlen_problem", lambda device, dtype: None)


@pytest.mark.usefixtures("has_kernel")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "chosen", "reason"),
    [
        ("qwen3_moe", CUDA, torch.bfloat16, "varlen", "varlen_attn"),
        ("qwen3_moe", CUDA, torch.float32, "blocks", "float32"),
        ("qwen3_moe", CPU, torch.bfloat16, "blocks", "no flash kernel on cpu"),
        ("cohere2_moe", CUDA, torch.bfloat16, "varlen", "varlen_attn"),
        ("gpt_oss", CUDA, torch.bfloat16, "flex", "sinks"),
        ("llama4_text", CUDA, torch.bfloat16, "sdpa", "chunked_attention"),
    ],
)
def test_the_choice_and_its_reason(
    name: str, device: torch.device, dtype: torch.dtype, chosen: str, reason: str
) -> None:
    found = choose(tiny_model(name), device, dtype)
    assert found.name == chosen
    assert reason in found.reason


@pytest.mark.skipif(RELEASE < 5, reason="release 4 has no such families")
def test_a_family_with_masks_of_its_own_keeps_the_attention_of_transformers() -> None:
    model = tiny_model("deepseek_v32")
    use_attention(model, "auto", CPU, torch.float32, log=False)
    assert model.config._attn_implementation == "sdpa"
    assert forward_arguments(model, TokenLayout.packed(LENGTHS), CPU) == {}


def test_an_attention_that_is_not_the_models_is_refused() -> None:
    """It knows nothing of chunks: the outputs of tokens behind the first one would be others."""
    with pytest.raises(MoeReplayError, match=r"blocks would compute another attention.*chunked_attention.*\"auto\""):
        use_attention(tiny_model("llama4_text"), "blocks", CPU, torch.float32, log=False)


def test_a_torch_without_the_kernel_takes_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_kernel", lambda: None)
    attention._varlen_problem.cache_clear()
    found = choose(tiny_model("qwen3_moe"), CUDA, torch.bfloat16)
    attention._varlen_problem.cache_clear()
    assert found.name == "flex"
    assert "has no varlen_attn with windows" in found.reason


def test_a_run_says_its_attention(config: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        folder: Path = train(config(steps=1))
    assert "attention: blocks (no flash kernel on cpu: one sequence after the other)" in caplog.text
    assert folder.exists()


# ---- shared prefixes -------------------------------------------------------------------------------------------------

SHARED = TokenLayout.shared([9, 12, 7, 10, 6], [(0, 0), (0, 5), (0, 3), (1, 8), (0, 0)])


def last_queries(aligned: str) -> Callable[..., Tensor]:
    """`varlen_attn` for fewer queries than keys: queries are the last tokens, or wrongly the first; or it refuses."""

    def varlen_attn(q, k, v, starts, key_starts, longest, most_keys, *, scale, window_size, enable_gqa):
        assert (longest, most_keys) == (int(starts.diff().max()), int(key_starts.diff().max()))
        if aligned == "refused":
            raise RuntimeError("keys and queries must be as many")
        left, parts = window_size[0], []
        for (first, last), (begin, end) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
            a, b, c = (heads.transpose(0, 1) for heads in (q[first:last], k[begin:end], v[begin:end]))
            b, c = (heads.repeat_interleave(len(a) // len(b), 0) for heads in (b, c))
            skipped = end - begin - (last - first) if aligned == "last" else 0
            age = torch.arange(last - first)[:, None] + skipped - torch.arange(end - begin)
            hidden = (age < 0) | ((age > left) if left >= 0 else False)
            scores = (a @ b.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
            parts.append((scores.softmax(-1) @ c).transpose(0, 1))
        return torch.cat(parts)

    return varlen_attn


def use_kernel(monkeypatch: pytest.MonkeyPatch, aligned: str) -> None:
    monkeypatch.setattr(attention._varlen, "kernel", last_queries(aligned))
    monkeypatch.setattr(attention._varlen, "shares_heads", True)
    attention._last_queries_problem.cache_clear()


def whole_and_shared(function: Callable[..., Any], **settings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of what is fed: of each sequence with a copy of its prefix, and with a shared one."""
    random = torch.Generator().manual_seed(3)
    fed = [torch.randn(1, heads, SHARED.num_rows, 16, generator=random, dtype=torch.float64) for heads in (4, 2, 2)]
    place = torch.from_numpy(SHARED.place)
    own = torch.from_numpy(SHARED.fed[0].copy())  # of all tokens, those that are fed
    weights = torch.randn(1, SHARED.num_rows, 4, 16, generator=random, dtype=torch.float64)
    results = []
    for is_shared in (False, True):
        leaves = [part.clone().requires_grad_() for part in fed]
        heads = leaves if is_shared else [part[:, :, place] for part in leaves]
        chosen = attention.IMPLEMENTATIONS["blocks"] if not is_shared else function
        sequences = PackedSequences.sharing(SHARED, CPU) if is_shared else PackedSequences.of(SHARED.lengths, CPU)
        output, _ = chosen(nn.Identity(), *heads, None, packed_sequences=sequences, scaling=0.3, **settings)
        output = output if is_shared else output[:, own]
        results.append([output, *torch.autograd.grad((output * weights).sum(), leaves)])
    return results[0], results[1]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 4},
    {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64), "sliding_window": 4},
    {"softcap": 2.0},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_shared_prefixes_are_seen_as_copies_are(settings: dict[str, Any]) -> None:
    for expected, found in zip(*whole_and_shared(attention.IMPLEMENTATIONS["blocks"], **settings), strict=True):
        is_rounded = bool(settings.keys() & {"s_aux", "softcap"})  # their softmax is in float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if is_rounded else 1e-12)


@pytest.mark.parametrize("settings", SETTINGS[:4])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_shared_prefixes_as_copies(settings: dict[str, Any]) -> None:
    expected, found = whole_and_shared(_without_gradients(attention.IMPLEMENTATIONS["flex"]), **settings)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)


def _without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """`flex_attention` has no backward on a CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        found, _ = function(args[0], *(heads.detach() for heads in args[1:4]), *args[4:], **kwargs)
        return found + sum(0.0 * heads.sum() for heads in args[1:4]), None

    return call


@pytest.mark.parametrize("settings", SETTINGS[:2])
def test_the_flash_kernel_sees_shared_prefixes_as_copies(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    use_kernel(monkeypatch, "last")
    for expected, found in zip(*whole_and_shared(attention.IMPLEMENTATIONS["varlen"], **settings), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("aligned", ["last", "first", "refused"])
def test_a_flash_kernel_that_takes_the_wrong_queries_is_noticed(monkeypatch: pytest.MonkeyPatch, aligned: str) -> None:
    use_kernel(monkeypatch, aligned)
    model = sequence_by_sequence("qwen3_moe")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "varlen")
    problem = attention.sharing_problem(model, CPU, torch.bfloat16)
    attention._last_queries_problem.cache_clear()
    assert (problem is None) == (aligned == "last")
    assert problem is None or "fewer queries than keys" in problem


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("qwen3_moe", None),
        ("gpt_oss", None),
        ("cohere2_moe", None),
        ("deepseek_v3", None),
        ("llama4_text", "attention 'sdpa' cannot show a prefix"),
        ("minimax", "carries a state from token to token (linear_attention)"),
        ("lfm2_moe", "carries a state from token to token (conv)"),
    ],
)
def test_families_whose_sequences_cannot_share_a_prefix(name: str, problem: str | None) -> None:
    if name not in available_families():
        pytest.skip(f"no {name} in this release")
    model = tiny_model(name)
    use_attention(model, "auto", CPU, torch.float32, log=False)
    found = attention.sharing_problem(model, CPU, torch.float32)
    assert (found is None) == (problem is None)
    assert problem is None or (found is not None and problem in found)


@pytest.mark.parametrize("name", of_families(packed=True))
def test_shared_prefixes_give_the_log_probs_and_gradients_of_each_sequence_alone(name: str) -> None:
    model, reference = sequence_by_sequence(name), tiny_model(name)
    if attention.sharing_problem(model, CPU, torch.float32) is not None:
        pytest.skip(f"{name} does not share")
    reference.set_attn_implementation("eager")
    tokens = torch.randint(3, VOCABULARY, (SHARED.num_tokens,), generator=torch.Generator().manual_seed(1))
    tokens = tokens[torch.from_numpy(SHARED.fed_as.copy())]
    expected = torch.cat([outputs(reference, sequence[None])[0] for sequence in tokens.split(SHARED.lengths)])
    ids, positions = fed(SHARED, tokens)
    found = outputs(model, ids, positions, **forward_arguments(model, SHARED, CPU))[0]
    found = found[torch.from_numpy(SHARED.place)]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4)
    wanted = gradients(reference, expected)
    for parameter, gradient in gradients(model, found).items():
        limit = 1e-4 * float(wanted[parameter].abs().max()) + 1e-6
        torch.testing.assert_close(gradient, wanted[parameter], rtol=0, atol=limit, msg=parameter)
