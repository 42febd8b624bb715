"""The token in each row of this rank's Megatron-Core routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_replay.routes.layout import TokenLayout


def column_multiple(config: Any) -> int:
    """Return what each packed sequence, and the width of a padded batch, must be a multiple of."""
    context = config.context_parallel_size
    return (2 * context if context > 1 else 1) * _sequence_shards(config)


def layout_for(config: Any, lengths: Sequence[int], *, packed: bool = False, width: int | None = None) -> TokenLayout:
    """Return this rank's layout for sequences of these lengths: sbhd, padded on the right, or packed (thd).

    Rows are sequence-major; context parallelism is zigzag, sequence parallelism contiguous. `width` is the width
    fed, over all context-parallel ranks; where None, the smallest that the parallelism allows.
    """
    from megatron.core import parallel_state

    multiple = column_multiple(config)
    if packed:
        layout = TokenLayout.packed(lengths, pad_each_to_multiple_of=multiple).pad_to(width, multiple_of=multiple)
    else:
        layout = TokenLayout.padded(lengths).pad_to(width, multiple_of=multiple)
    if config.context_parallel_size > 1:
        layout = layout.context_parallel(parallel_state.get_context_parallel_rank(), config.context_parallel_size)
    shards = _sequence_shards(config)
    if shards > 1:
        layout = layout.sequence_parallel(parallel_state.get_tensor_model_parallel_rank(), shards)
    return layout.sequence_major()


def _sequence_shards(config: Any) -> int:
    return config.tensor_model_parallel_size if config.sequence_parallel else 1
