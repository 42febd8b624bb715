"""Routers of Transformers that cannot be replayed, and why: refused by name, before any forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One kind of router that is refused: by the config's `model_type` or by the class of a live module."""

    model_types: tuple[str, ...]
    class_names: tuple[str, ...]
    reason: str


REFUSALS = (
    Refusal(
        ("phimoe",),
        ("PhimoeTopKRouter", "PhimoeSparseMoeBlock"),
        "its router samples experts (sparsemixer) and zeroes the gates of those below a threshold, "
        "so a replayed expert could get no weight",
    ),
    Refusal(
        ("switch_transformers", "nllb-moe", "gptsan-japanese"),
        ("SwitchTransformersTop1Router", "NllbMoeTop2Router", "GPTSanJapaneseTop1Router"),
        "its router drops tokens above each expert's capacity, so a replayed token could reach no expert",
    ),
    Refusal(
        ("doge",),
        ("DogeCDMoE",),
        "its router chooses product keys: the top-k holds positions in an order made for each token, not expert ids",
    ),
    Refusal(
        ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        ("Ernie4_5_VLMoeMoeBlock",),
        "each of its layers has a text and a vision router, and each sees only the rows of its modality",
    ),
    Refusal(
        ("diffusion_gemma", "diffusion_gemma_text"),
        ("DiffusionGemmaTextRouter",),
        "it denoises blocks of tokens in many passes, and encoder and decoder both route: a token has no single route",
    ),
)


def refusal_by_type(model_type: str) -> Refusal | None:
    """Return the refusal of a model type, if any."""
    return next((refusal for refusal in REFUSALS if model_type in refusal.model_types), None)


def refusal_by_class(class_names: Iterable[str]) -> Refusal | None:
    """Return the refusal of a module, if any, by the names of its class and the class's bases."""
    names = set(class_names)
    return next((refusal for refusal in REFUSALS if names.intersection(refusal.class_names)), None)
