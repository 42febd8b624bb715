"""bfloat16 on a CPU that has no instructions for it: PyTorch then multiplies 60 to 200 times slower than in float32.

Matrices are multiplied in float32 there and the product is rounded: what bfloat16 hardware does, which adds in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", ATTENTION, f"{ATTENTION}_backward")


def is_native() -> bool:
    """Whether oneDNN multiplies in bfloat16 here."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def fast_bfloat16() -> Iterator[None]:
    """Multiply in float32 what is in bfloat16, in every thread of this process."""
    if is_native():
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in PRODUCTS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _in_float32(name, kernel), "CPU", with_keyset=True, allow_override=True)
        yield


def _in_float32(name: str, kernel: Any) -> Callable[..., Any]:
    def multiply(keys: Any, *arguments: Any, **options: Any) -> Any:
        if arguments[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *arguments, **options)
        wide = {option: _wide(value) for option, value in options.items()}
        result = kernel.call_boxed(keys, *map(_wide, arguments), **wide)
        if isinstance(result, Tensor):
            return result.bfloat16()
        if name == ATTENTION:  # the second result is the log of a sum, in float32 whatever the first is in
            return result[0].bfloat16(), result[1]
        return tuple(map(Tensor.bfloat16, result))

    return multiply


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value
