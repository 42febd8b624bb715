"""Attention of packed sequences without a mask over all pairs of tokens, registered with Transformers by name.

    varlen   torch's `varlen_attn`: flash attention over sequences of different lengths in one row (CUDA)
    flex     torch's `flex_attention` with blocks that hold only pairs of one sequence: sinks (CUDA)
    blocks   one sequence after the other, on any device and in any precision

Transformers makes no mask for these names. Where sequences begin reaches every layer as the argument
`packed_sequences` of the model's forward, so that a recomputed or compiled layer has it as well; so do the ranks that
share the micro-batch, which exchange heads around each of these functions (`ulysses.py`).

A sequence that shares a prefix with an earlier one (`TokenLayout.shared`) has the keys and values of that prefix before
its own: they are gathered in each layer, while all else is computed once. Its queries are the last tokens of its keys,
so windows, sinks and soft caps are those of the whole sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import pad, scaled_dot_product_attention

from moe_replay.routes.layout import TokenLayout
from moe_replay.train.backends.ulysses import ContextParallel
from moe_replay.utils.device import to_device, varlen_kernel, varlen_shares_heads
from moe_replay.weights.model_folder import ModelError

logger = logging.getLogger(__name__)

AUTO = "auto"
MAX_FLASH_HEAD = 256
LARGEST_ROUNDING = 0.05
"""Difference of two kernels in bfloat16, as a fraction of the largest value; pairs that are not seen make it 0.5."""
_BY_HEADS = {"full_attention", "sliding_attention"}
_KNOWN_LAYER_TYPES = _BY_HEADS | {"linear_attention"}


class GatheredKeys(NamedTuple):
    """The keys of sequences that share prefixes: of each sequence, those of its prefix, then its own.

    rows      (K,) int64: the flattened row that each key is computed in
    starts    (S + 1,) int32: the first key of each sequence, and K
    longest   keys of the longest sequence
    """

    rows: Tensor
    starts: Tensor
    longest: int


class PackedSequences(NamedTuple):
    """Bounds of the sequences of a micro-batch in its flattened rows.

    starts    (S + 1,) int32: the first token of each sequence, and the number of all tokens
    longest   tokens of the longest sequence
    masks     of `flex`, by window: made in the first layer that needs them
    context   ranks that have the other columns of the rows; None: this rank has all
    keys      of sequences that share prefixes; None: keys are the tokens themselves
    """

    starts: Tensor
    longest: int
    masks: dict[int | None, Any]
    context: ContextParallel | None = None
    keys: GatheredKeys | None = None

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, context: ContextParallel | None = None
    ) -> PackedSequences:
        return cls(_starts(lengths, device), max(lengths), {}, context)

    @classmethod
    def sharing(cls, layout: TokenLayout, device: torch.device) -> PackedSequences:
        """Return the sequences of a layout in which they share prefixes."""
        starts = np.cumsum([0, *layout.segments])
        parts = [
            np.concatenate([layout.prefix_rows(sequence), np.arange(first, last)])
            for sequence, (first, last) in enumerate(pairwise(starts.tolist()))
        ]
        counts = [len(part) for part in parts]
        keys = GatheredKeys(to_device(np.concatenate(parts), device), _starts(counts, device), max(counts))
        return cls.of(layout.segments, device)._replace(keys=keys)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.cumsum([0, *lengths], dtype=np.int32), device)


def forward_arguments(
    model: Any, layout: TokenLayout, device: torch.device, context: ContextParallel | None = None
) -> dict[str, Any]:
    """Return what a forward of the model on this layout needs besides ids and positions.

    Padding on the right is a part of its sequence: no token attends to what comes after it.
    """
    if model.config._attn_implementation not in IMPLEMENTATIONS:
        assert context is None, f"{model.config._attn_implementation} sees the columns of this rank only"
        return {}
    if layout.prefixes:
        assert context is None, "ranks that share a row cannot share prompts as well"
        return {"packed_sequences": PackedSequences.sharing(layout, device)}
    return {"packed_sequences": PackedSequences.of(_whole_segments(layout), device, context)}


def _whole_segments(layout: TokenLayout) -> tuple[int, ...]:
    """Return the columns of each sequence over all context-parallel ranks, row by row; the last one has the padding."""
    if layout.context_shard is None:
        return layout.segments * len(layout.fed)
    rows, columns = layout.fed.shape
    width = columns * layout.context_shard[1]
    if rows > 1:  # one sequence each
        return (width,) * rows
    *before, _ = layout.lengths
    return (*before, width - sum(before))


# ---- choice ----------------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """An attention by its name in Transformers, and why it was chosen."""

    name: str
    reason: str


def of_transformers(name: str) -> str | None:
    """Return the attention that Transformers builds a model with; None: its default, before `use_attention`."""
    return None if name == AUTO or name in IMPLEMENTATIONS else name


def use_attention(model: Any, name: str, device: torch.device, dtype: torch.dtype, *, log: bool) -> None:
    """Have a Transformers model use an attention of this module, if it is named; `auto` picks one for the model.

    log   say what was picked, and why
    """
    if of_transformers(name) is not None:
        return
    if name == AUTO:
        name, reason = choose(model, device, dtype)
        if log:
            logger.info("attention: %s (%s)", name, reason)
    elif problem := _mask_problem(model):
        raise ModelError(
            f"model.attn_implementation: {name} would compute another attention than this model's",
            expected="attention by windows, sinks and soft caps alone",
            found=problem,
            remedy='Set model.attn_implementation = "auto"',
        )
    if name not in IMPLEMENTATIONS:
        return  # what it was built with
    from transformers import AttentionInterface

    if name == "varlen":
        _varlen.kernel, _varlen.shares_heads = varlen_kernel(), varlen_shares_heads()
    AttentionInterface.register(name, IMPLEMENTATIONS[name])
    model.set_attn_implementation(name)
    model.register_forward_pre_hook(_add_sequences, with_kwargs=True)


def check_context_parallel(model: Any, size: int) -> None:
    """Raise unless heads can be exchanged around everything in a model that mixes the tokens of a sequence.

    model   on any device, after `use_attention`
    size    ranks that share a micro-batch
    """
    if size == 1:
        return
    problem, name = _state_problem(model) or _mask_problem(model), model.config._attn_implementation
    if problem is None and name not in IMPLEMENTATIONS:
        problem = f"{name} is an attention of Transformers, which sees the columns of one rank"
    if problem is not None:
        raise ModelError(
            "the model cannot be trained with context parallelism on FSDP2",
            expected=f"attention by {', '.join(IMPLEMENTATIONS)} in every layer (model.attn_implementation)",
            found=problem,
            remedy="Set backend.context_parallel = 1",
        )


def _state_problem(model: Any) -> str | None:
    """Return why tokens of a sequence meet elsewhere than in its attention; None: they do not."""
    types = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - _BY_HEADS
    kinds = sorted(types) or ["convolutions"] * any(isinstance(module, nn.Conv1d) for module in model.modules())
    return f"{type(model).__name__} carries a state from token to token ({', '.join(kinds)})" if kinds else None


def choose(model: Any, device: torch.device, dtype: torch.dtype) -> Choice:
    problem = _mask_problem(model)
    if problem is not None:
        usual = "sdpa" if model._supports_sdpa else "eager"
        return Choice(usual, f"{problem}, so Transformers makes a mask over all pairs of tokens")
    if device.type != "cuda":
        return Choice("blocks", f"no flash kernel on {device.type}: one sequence after the other")
    if getattr(model.config, "attn_logit_softcapping", None) is not None:  # compiling them in flex_attention fails
        return Choice("blocks", "soft-capped scores: one sequence after the other")
    if dtype == torch.float32:
        return Choice("blocks", "no flash kernel in float32: one sequence after the other")
    problem = _needs_flex(model) or _varlen_problem(device, dtype)
    if problem is not None:
        return Choice("flex", f"{problem}: flex_attention")
    return Choice("varlen", "torch's varlen_attn, flash attention sequence by sequence")


def _mask_problem(model: Any) -> str | None:
    """Return why a model needs masks that an attention by its arguments (window, sinks, soft cap) cannot replace.

    Flash attention takes no mask either: a family that supports it has none but those.
    """
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} takes no attention but those of Transformers"
    types = {kind for kind in getattr(model.config, "layer_types", None) or () if kind.endswith("attention")}
    if special := sorted(types - _KNOWN_LAYER_TYPES):
        return f"{type(model).__name__} has layers of {', '.join(special)}"
    if not model._supports_flash_attn:
        return f"{type(model).__name__} has masks that flash attention does not know"
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        return f"{type(model).__name__} attends to later tokens"
    return None


def _needs_flex(model: Any) -> str | None:
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "attention sinks"
    widths = [getattr(model.config, name, None) or 0 for name in ("head_dim", "global_head_dim", "qk_head_dim")]
    return f"heads of {max(widths)}, more than flash attention has" if max(widths) > MAX_FLASH_HEAD else None


@cache
def _varlen_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why `varlen_attn` cannot be used; one small call shows it."""
    kernel = varlen_kernel()
    if kernel is None:
        return f"torch {torch.__version__} has no varlen_attn with windows"
    heads = torch.zeros(16, 1, 64, dtype=dtype, device=device)
    starts = torch.tensor([0, 16], dtype=torch.int32, device=device)
    try:
        kernel(heads, heads, heads, starts, starts, 16, 16, window_size=(-1, 0))
    except RuntimeError as error:
        return f"varlen_attn does not run here ({str(error).splitlines()[0]})"
    return None


def sharing_problem(model: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why sequences of a model cannot share prefixes; None: they can. Tests the kernel that it would need."""
    name = model.config._attn_implementation
    if name not in IMPLEMENTATIONS:
        return f"the attention {name!r} cannot show a prefix to several sequences"
    if name == "varlen":
        return _state_problem(model) or _last_queries_problem(device, dtype)
    return _state_problem(model)


@cache
def _last_queries_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how `varlen` fails on sequences that have fewer queries than keys, against `blocks`."""
    layout = TokenLayout.shared([40, 30, 35], [(0, 0), (0, 17), (1, 20)])
    sequences = PackedSequences.sharing(layout, device)
    random = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, count, layout.num_rows, 64, generator=random) for count in (4, 2, 2)]
    weights = torch.randn(1, layout.num_rows, 4, 64, generator=random).to(device)
    for window in (None, 9):
        results: list[list[Tensor]] = []
        for function in (varlen, blocks):
            leaves = [part.to(device, dtype).requires_grad_() for part in heads]
            query, key, value = leaves
            try:
                output = function(query, key, value, sequences, sliding_window=window)
                gradients = torch.autograd.grad((output.float() * weights).sum(), leaves)
            except RuntimeError as error:
                return f"varlen_attn does not take fewer queries than keys ({str(error).splitlines()[0]})"
            results.append([output.detach().float(), *(gradient.float() for gradient in gradients)])
        apart = max(
            float((result - reference).abs().max() / reference.abs().max())
            for result, reference in zip(*results, strict=True)
        )
        if not apart < LARGEST_ROUNDING:
            return f"varlen_attn is {apart:.2g} from plain attention where sequences have fewer queries than keys"
    return None


@dataclass
class _Varlen:
    """The kernel in use, for compiled code, which cannot look it up."""

    kernel: Callable[..., Any] | None = None
    shares_heads: bool = False


_varlen = _Varlen()


def _add_sequences(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Add the sequences to a forward without them: a sequence begins where positions restart, else each row is one."""
    if "packed_sequences" in kwargs:
        return None
    ids, positions = kwargs.get("input_ids", args[0] if args else None), kwargs.get("position_ids")
    tokens: Tensor = kwargs["inputs_embeds"] if ids is None else ids
    rows, width = tokens.shape[:2]
    begins = torch.zeros(rows, width, dtype=torch.bool)
    begins[:, 0] = True
    if positions is not None and positions.dim() == 2:
        begins[:, 1:] |= (positions.diff(dim=-1) != 1).cpu().expand(rows, -1)
    starts = [*begins.flatten().nonzero()[:, 0].tolist(), rows * width]
    lengths = [end - start for start, end in pairwise(starts)]
    return args, kwargs | {"packed_sequences": PackedSequences.of(lengths, tokens.device)}


# ---- attention functions ---------------------------------------------------------------------------------------------


Attention = Callable[..., tuple[Tensor, None]]
"""Of Transformers: a layer, heads (B, heads, W, size), their mask and its arguments -> (B, W, heads, size)."""


def _of_layer(attend: Callable[..., Tensor]) -> Attention:
    """Return an attention of Transformers from one that knows the sequences.

    It exchanges heads with the ranks that have the other columns, where there are some.
    """

    @wraps(attend)
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_sequences: PackedSequences | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if packed_sequences is None:
            raise ModelError(
                "an attention layer was not told where sequences begin",
                expected="a model that passes the arguments of its forward on to its layers",
                found=type(module).__name__,
                remedy="Set model.attn_implementation = 'sdpa'",
            )
        context = packed_sequences.context
        if context is None:
            return attend(query, key, value, packed_sequences, **options), None
        if options.get("s_aux") is not None:
            options = options | {"s_aux": context.heads_of(options["s_aux"])}
        output = attend(*context.gather_columns(query, key, value), packed_sequences, **options)
        return context.scatter_columns(output, query.shape[1]), None

    return attention


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> Tensor:
    """Heads (B, heads, W, size) -> (B, W, heads, size), by flash attention over all sequences."""
    kernel = _varlen.kernel
    assert kernel is not None, "varlen was chosen without its kernel"
    assert options.get("s_aux") is None, "varlen has no sinks"
    assert options.get("softcap") is None, "varlen has no soft caps"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    (batch, _, width, size), value_size = query.shape, value.shape[-1]
    full = -(-max(size, value_size) // 8) * 8
    shared = {"enable_gqa": True} if _varlen.shares_heads else {}
    if not shared:
        key, value = (_repeated(heads, query.shape[1]) for heads in (key, value))
    flat = [pad(heads, (0, full - heads.shape[-1])).transpose(1, 2).flatten(0, 1) for heads in (query, key, value)]
    starts, longest, keys = sequences.starts, sequences.longest, sequences.keys
    if keys is not None:  # of fewer queries than keys, the kernel takes the last ones: `sharing_problem` tests it
        flat = [flat[0], _gathered(flat[1], keys), _gathered(flat[2], keys)]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output = kernel(
        *(heads.contiguous() for heads in flat),
        starts,
        starts if keys is None else keys.starts,
        longest,
        longest if keys is None else keys.longest,
        scale=scale,
        window_size=window,
        **shared,
    )
    return output[..., :value_size].unflatten(0, (batch, width))


@torch.compiler.disable
def blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Heads (B, heads, W, size) -> (B, W, heads, size), sequence by sequence; those of one length together."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lengths, keys = sequences.starts.diff().tolist(), sequences.keys
    rows = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
    if keys is not None:
        rows = [rows[0], _gathered(rows[1], keys), _gathered(rows[2], keys)]
    rows = [rows[0], *(_repeated(part, query.shape[1]) for part in rows[1:])]
    if len(set(lengths)) == 1 and keys is None:
        same = [part.unflatten(0, (-1, lengths[0])).transpose(1, 2) for part in rows]
        outputs = [_attend(same, scale, sliding_window, softcap, s_aux)]
    else:
        key_lengths = lengths if keys is None else keys.starts.diff().tolist()
        cut = zip(
            *(part.split(n) for part, n in zip(rows, (lengths, key_lengths, key_lengths), strict=True)), strict=True
        )
        separate = [[part.transpose(0, 1)[None] for part in sequence] for sequence in cut]
        outputs = [_attend(sequence, scale, sliding_window, softcap, s_aux) for sequence in separate]
    together = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in outputs])
    return together.unflatten(0, (query.shape[0], query.shape[2]))


def _attend(
    heads: Sequence[Tensor], scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention of sequences: keys and values (S, heads, L, size), and queries of all or the last tokens."""
    query, key, value = heads
    length, queries = key.shape[2], query.shape[2]
    is_windowed = window is not None and length > window
    if softcap is None and sinks is None:
        needs_mask = is_windowed or queries < length
        mask = _visible(length, window, query.device)[length - queries :] if needs_mask else None
        return scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(length, window if is_windowed else None, query.device)[length - queries :]
    scores = scores.float().masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :length].to(value.dtype) @ value


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """(L, L): whether a token (row) attends to another (column)."""
    all_pairs = torch.ones(length, length, dtype=torch.bool, device=device)
    return all_pairs.tril() if window is None else all_pairs.tril().triu(1 - window)


@torch.compiler.disable
def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Heads (B, heads, W, size) -> (B, W, heads, size), by blocks of pairs that a sequence has."""
    assert options.get("softcap") is None, "flex has no soft caps"
    batch, _heads, width, _size = query.shape
    # (1, heads, B * W, size): sequences of all rows concatenated
    query, key, value = (heads.transpose(0, 1).flatten(1, 2)[None] for heads in (query, key, value))
    masks = sequences.masks
    if sequences.keys is not None:
        key, value = (
            _gathered(heads[0].transpose(0, 1), sequences.keys).transpose(0, 1)[None] for heads in (key, value)
        )
    if sliding_window not in masks:
        masks[sliding_window] = _block_mask(sequences, batch * width, sliding_window)

    run = _compiled_flex() if query.is_cuda else _flex_attention
    output, normalizer = run(query, key, value, masks[sliding_window], scaling)
    if s_aux is not None:  # a sink takes its part of the probability, and has no value
        output = output * torch.sigmoid(normalizer - s_aux.float()[None, :, None])[..., None].to(output.dtype)
    return output[0].unflatten(1, (batch, width)).permute(1, 2, 0, 3)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None) -> tuple[Tensor, Tensor]:
    from torch.nn.attention import flex_attention as torch_flex

    has_aux = hasattr(torch_flex, "AuxRequest")  # since torch 2.9
    options: dict[str, Any] = {"return_aux": torch_flex.AuxRequest(lse=True)} if has_aux else {"return_lse": True}
    output, normalizer = torch_flex.flex_attention(
        query, key, value, None, mask, scale, enable_gqa=query.shape[1] != key.shape[1], **options
    )
    return output, normalizer.lse if has_aux else normalizer


@cache
def _compiled_flex() -> Any:
    return torch.compile(_flex_attention, dynamic=True)


def _block_mask(sequences: PackedSequences, tokens: int, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    starts, keys = sequences.starts, sequences.keys
    rows = torch.arange(tokens, device=starts.device)
    sequence = sequence_of_key = torch.bucketize(rows, starts[1:], right=True)
    own_key, num_keys = rows, tokens  # the key of each token
    if keys is not None:
        num_keys = len(keys.rows)
        sequence_of_key = torch.bucketize(torch.arange(num_keys, device=starts.device), keys.starts[1:], right=True)
        own_key = rows + (keys.starts - starts)[1:][sequence]  # a sequence ends with its own keys

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (sequence[query] == sequence_of_key[key]) & (own_key[query] >= key)
        return visible if window is None else visible & (own_key[query] - key < window)

    return create_block_mask(is_visible, None, None, tokens, num_keys, starts.device, _compile=starts.is_cuda)


def _gathered(heads: Tensor, keys: GatheredKeys) -> Tensor:
    """Return the rows of keys or values (T, heads, size) that sequences see, (K, heads, size)."""
    return _GatherRows.apply(heads, keys.rows)


class _GatherRows(Function):
    """Rows (T, ...) -> (K, ...); the backward adds up the gradients of a row that several sequences share."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, rows: Tensor) -> Tensor:
        ctx.count = heads.shape[0]
        ctx.save_for_backward(rows)
        return heads.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _add_rows(gradients[0], rows, ctx.count), None


# One operator: the compiler would add up by atomic additions, in another order each time.
@torch.library.custom_op("moe_replay::add_rows", mutates_args=())
def _add_rows(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the sums (count, ...) of the values (K, ...) of each row, in float32 at least and in a fixed order."""
    total = values.new_zeros((count, *values.shape[1:]), dtype=torch.promote_types(values.dtype, torch.float32))
    return total.index_put_((rows,), values.to(total.dtype), accumulate=True).to(values.dtype)


@_add_rows.register_fake
def _(values: Tensor, rows: Tensor, count: int) -> Tensor:
    return values.new_empty((count, *values.shape[1:]))


def _repeated(heads: Tensor, count: int) -> Tensor:
    """Give every query head its own copy of keys or values: (B, groups, W, size) -> (B, count, W, size)."""
    return heads if heads.shape[1] == count else heads.repeat_interleave(count // heads.shape[1], 1)


IMPLEMENTATIONS = {attend.__name__: _of_layer(attend) for attend in (varlen, flex, blocks)}
