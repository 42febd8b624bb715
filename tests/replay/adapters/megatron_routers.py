"""Megatron-Core models on one rank, and routes that were recorded before their routers moved."""

from __future__ import annotations

import torch

import moe_replay as mr
from tests.distributed.megatron_models import VOCABULARY, make_chunk, make_config, move_routers, routers
from tests.models import gradients

LAYERS = (1, 2, 4, 5, 7)
MICRO_BATCHES = 3


def build(variant="hybrid", seed=7, **settings):
    torch.manual_seed(seed)
    return make_chunk(make_config(variant, **settings))


def random_ids(seed=0, batch=2, width=9):
    return torch.randint(1, VOCABULARY, (batch, width), generator=torch.Generator().manual_seed(seed))


def call(model, ids, **kwargs):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(ids, positions, None, labels=ids.roll(-1, 1), **kwargs)


def recorded(model, replay, ids):
    with torch.no_grad(), replay.record() as recording:
        call(model, ids)
    return recording.batch()


def routed(variant="hybrid", **settings):
    """A model whose routers have moved since the routes of three micro-batches were recorded."""
    model = build(variant, **settings)
    replay = mr.attach(model)
    inputs = [random_ids(seed) for seed in range(MICRO_BATCHES)]
    routes = [recorded(model, replay, ids) for ids in inputs]
    move_routers(model)
    return model, replay, inputs, routes


def expected_gradients(inputs, routes, variant="hybrid", **settings):
    """Of each micro-batch alone, without recomputation."""
    model = build(variant, **settings)
    move_routers(model)
    replay = mr.attach(model)
    found = []
    for ids, batch in zip(inputs, routes, strict=True):
        with replay.replay(batch):
            call(model, ids).mean().backward()
        found.append(gradients(model))
    return found


def layout_of(ids):
    return mr.TokenLayout.padded([ids.shape[1]] * ids.shape[0]).sequence_major()


def as_traces(batch, ids):
    return batch.to_traces(ids.tolist(), layout_of(ids))


def watched(model):
    """The routing map (rows, experts) of each layer's last forward."""
    maps = {}
    for router in routers(model):
        layer = router.layer_number - 1
        router.register_forward_hook(lambda m, args, out, layer=layer: maps.update({layer: out[1]}))
    return maps
