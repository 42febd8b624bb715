"""A name that the routers of Megatron-Core 0.16 read and that only Transformer Engine sets."""

from __future__ import annotations


def bind_missing_gemm() -> None:
    """Set `te_general_gemm` to None where Transformer Engine is missing; Megatron-Core then multiplies by torch.

    moe_utils.py imports the name together with Transformer Engine, and compares it with None in every forward of a
    router: without Transformer Engine that is a NameError, on a GPU as on a CPU.
    """
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "RouterGatingLinearFunction") and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
