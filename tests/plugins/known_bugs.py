"""Route bugs of released trainers, shown by the released packages alone: our plug-in is not loaded.

    python -m tests.plugins.known_bugs    # in an environment with verl or ms-swift, as `make test-plugins` makes it

One line for each bug of the trainer that is installed. The routes that are given are the model's own; each router is
looked at when the forward starts, and row s * B + b of a padded micro-batch is token s of sample b, as Megatron has it.
docs/comparison.md has the lines.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tests.plugins import ms_swift_cpu, verl_cpu, verl_megatron_cpu
from tests.plugins.verl_cpu import Rollout

Seen = dict[int, Tensor]  # decoder layer -> (R, K): what its router will replay


def routers(model: Any) -> dict[int, Any]:
    """Decoder layer -> Megatron's object for replay on its router."""
    layers = [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
    return {layer.layer_number - 1: layer.mlp.router.router_replay for layer in layers}


def seen_at_the_start(model: Any, run: Callable[[], Any]) -> Seen:
    """What is on the routers of a model when the first forward in `run` starts."""
    found: Seen = {}

    def look(*_: Any) -> None:
        found.update({layer: router.target_topk_idx.clone() for layer, router in routers(model).items()})
        handle.remove()

    handle = model.register_forward_pre_hook(look)
    run()
    return found


def misplaced(seen: Seen, samples: list[Tensor], layer: int) -> str:
    """Of a padded micro-batch: how many of the rows that have a route hold another token's."""
    rows = [(step * len(samples) + number, row) for number, rows in enumerate(samples) for step, row in enumerate(rows)]
    wrong = sum(not torch.equal(seen[layer][place].long(), row[layer].long()) for place, row in rows)
    return f"{wrong} of {len(rows)} rows get the routes of another token"


def ms_swift_padded() -> str:
    model = ms_swift_cpu.model_of_six_layers()
    rollout = verl_megatron_cpu.with_routes_of(model, Rollout())
    samples = ms_swift_cpu.samples_of(rollout, rollout.routed_experts)
    trainer = ms_swift_cpu.make_trainer(model, padded=True)
    data = ms_swift_cpu.collated(trainer, samples)[0]
    seen = seen_at_the_start(model, lambda: trainer._maybe_compute_logps(data))
    given = [sample.routed_experts for sample in samples[: ms_swift_cpu.MICRO_BATCH]]
    return "padding_free=false, R3: " + misplaced(seen, given, 1)


def ms_swift_ray() -> str:
    model = ms_swift_cpu.model_of_six_layers()
    rollout = verl_megatron_cpu.with_routes_of(model, Rollout())
    trainer = ms_swift_cpu.on_ray(ms_swift_cpu.make_trainer(model))
    batches = ms_swift_cpu.collated(trainer, ms_swift_cpu.samples_of(rollout, rollout.routed_experts))
    given = batches[0]["routed_experts"][0].clone()  # (R, all layers, K)
    seen = seen_at_the_start(model, lambda: trainer.train_step(iter(batches)))
    source = {
        layer: [other for other in range(given.shape[1]) if torch.equal(rows.long(), given[:, other].long())]
        for layer, rows in seen.items()
    }
    text = ", ".join(f"{layer} of {' or '.join(map(str, others))}" for layer, others in source.items())
    return f"Ray update, R3, layer 0 dense: routers get the rows of other layers: {text}"


def ms_swift_many_experts() -> str:
    """What R2 replays in the update, beside what the routers have chosen in the old-log-prob pass."""
    model = ms_swift_cpu.model_of_six_layers(experts=288)
    trainer = ms_swift_cpu.make_trainer(model, mode="R2")
    first, *others = ms_swift_cpu.collated(trainer, ms_swift_cpu.samples_of(Rollout(), None))
    chosen: list[Tensor] = []
    handle = model.register_forward_hook(lambda *_: chosen.append(routers(model)[1].recorded_topk_idx.clone()))
    batches = [trainer._maybe_compute_logps(first)]
    handle.remove()
    batches += [trainer._maybe_compute_logps(data) for data in others]
    seen = seen_at_the_start(model, lambda: trainer.train_step(iter(batches)))
    wrong = int((seen[1].long() != chosen[0].long()).any(1).sum())
    return f"R2, 288 experts: {wrong} of {len(seen[1])} rows get other experts than were recorded" if wrong else ""


def verl_padded() -> str:
    verl_cpu.open_process_group()
    verl_megatron_cpu.open_megatron()
    model, config = verl_megatron_cpu.model_and_config()
    rollout = verl_megatron_cpu.with_routes_of(model, Rollout(equal=True))
    engine = verl_megatron_cpu.make_engine(model, config, padded=True, plugin=False)
    data = verl_megatron_cpu.batch(rollout, rollout.routed_experts)
    seen = seen_at_the_start(model, lambda: verl_megatron_cpu.forward(engine, data))
    given = [rows[mask.bool()][:-1] for rows, mask in zip(rollout.routed_experts, rollout.mask, strict=True)][:3]
    return "Megatron, use_remove_padding=False, R3: " + misplaced(seen, given, 1)


def lines() -> list[str]:
    """One line for each bug of the trainer that is installed."""
    if find_spec("verl") is not None:
        version = metadata.version("verl")
        return [] if version.startswith("0.8") else [f"verl {version}, {verl_padded()}"]
    ms_swift_cpu.on_cpu(plugin=False)
    found = [ms_swift_padded(), ms_swift_ray(), ms_swift_many_experts()]
    return [f"ms-swift {metadata.version('ms-swift')}, {bug}" for bug in found if bug]


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):  # what the trainers log
        found = lines()
    print("\n".join(found))
