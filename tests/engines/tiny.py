"""Tiny models of several families, and what Transformers says of a sequence: the reference of every engine."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import moe_replay as mr
from moe_replay.records import Sample
from tests.models import tiny_qwen3_moe

VOCABULARY = 97


class Reference(NamedTuple):
    """One full forward of Transformers over a sequence."""

    trace: mr.RouteTrace
    logprobs: np.ndarray  # (T - 1,) at the temperature asked for


def tiny_model(family: str, seed: int = 0) -> nn.Module:
    """A random model in float32 whose sizes every engine's kernels accept."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    if family == "qwen3_moe":
        model = tiny_qwen3_moe(seed, **sizes | {"num_hidden_layers": 4, "moe_intermediate_size": 32, "head_dim": 32})
    elif family == "mixtral":
        from transformers import MixtralConfig, MixtralForCausalLM

        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8, tie_word_embeddings=True))
    elif family == "olmoe":
        from transformers import OlmoeConfig, OlmoeForCausalLM

        model = OlmoeForCausalLM(OlmoeConfig(**sizes | {"num_key_value_heads": 2}, num_experts=8))
    elif family == "gpt_oss":
        from transformers import GptOssConfig, GptOssForCausalLM

        sizes |= {"max_position_embeddings": 131072, "head_dim": 32}  # vLLM takes the released YaRN alone
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        model = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4, layer_types=layers, sliding_window=8))
    else:
        raise AssertionError(family)
    _spread(model)
    return model.eval()


def _spread(model: nn.Module) -> None:
    """Wider weights than at initialisation, so that routes and next tokens depend on the context."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)


class Pause:
    """Holds a model at the end of one of its forwards, in whichever thread: it is sampling, and not done.

    paused = Pause(model, forwards=5)       # then sample from it in another thread
    with paused:                            # entered in the fifth forward
        ...                                 # which ends when this does
    """

    def __init__(self, model: nn.Module, forwards: int) -> None:
        self._left = forwards
        self._reached, self._over = threading.Event(), threading.Event()
        self._hook = model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._reached.set()
            self._over.wait()

    def __enter__(self) -> None:
        self._reached.wait()

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self._over.set()


def reference(model: nn.Module, token_ids: np.ndarray, temperature: float = 1.0) -> Reference:
    replay = mr.attach(model)
    ids = torch.tensor(np.asarray(token_ids)[None], dtype=torch.long)
    with torch.no_grad(), replay.record() as recording:
        logits = model(input_ids=ids, use_cache=False).logits[0]
    replay.detach()
    trace = recording.traces(mr.TokenLayout.padded([ids.shape[1]]), [ids[0].numpy()])[0]
    logprobs = (logits[:-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return Reference(trace, logprobs.numpy())


def assert_sampled_from(model: nn.Module, sample: Sample, temperature: float = 1.0, atol: float = 2e-4) -> None:
    """Routes (as sets) and log-probs of a sample are those of the model; only the last token is uncovered."""
    expected = reference(model, sample.trace.token_ids, temperature)
    assert sample.trace.layers == expected.trace.layers
    assert sample.trace.valid[:-1].all()
    assert not sample.trace.valid[-1].any()
    found, wanted = (np.sort(trace.routed_experts[:-1], axis=-1) for trace in (sample.trace, expected.trace))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(sample.logprobs, expected.logprobs[len(sample.prompt_ids) - 1 :], atol=atol)
