"""The client of a plain `vllm serve` against the real one: for sampling only, and for training."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moe_replay.engines.vllm_serve.client import VllmServeClient
from moe_replay.engines.vllm_serve.wire import WORKER_EXTENSION
from moe_replay.errors import EngineError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe
from tests.engines.tiny import VOCABULARY, assert_sampled_from, reference, tiny_model
from tests.real_vllm.conftest import NEEDS_VLLM
from tests.real_vllm.serve import vllm_serve

pytest.importorskip("vllm", reason=NEEDS_VLLM)
pytestmark = pytest.mark.whole_runs


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the model `tiny_model("qwen3_moe")`."""
    folder = tmp_path_factory.mktemp("served")
    tiny_model("qwen3_moe").save_pretrained(folder)
    # On CPU vLLM's own reload leaves experts as they were packed, so the workers have our extension.
    options = ["--worker-extension-cls", WORKER_EXTENSION, "--kv-cache-memory-bytes", str(2**26), "--enforce-eager"]
    with vllm_serve(folder, VOCABULARY, "--no-enable-chunked-prefill", *options) as address:
        yield address


def test_the_real_vllm_serve(url: str) -> None:
    model = tiny_model("qwen3_moe")
    topology, only_samples = MoeTopology.from_config(model.config), {"model": "tiny", "takes_weights": False}
    with VllmServeClient(url, topology, vocabulary=VOCABULARY, processed_logprobs=True, **only_samples) as client:
        assert client.name.name == "vLLM"
        for group in client.generate(
            [[1, 2, 3], list(range(1, 60))], SamplingParams(n=2, max_tokens=6, temperature=0.7)
        ):
            for sample in group:
                assert_sampled_from(model, sample, 0.7)


def test_training_with_the_real_vllm_serve(url: str) -> None:
    model = tiny_model("qwen3_moe")
    with VllmServeClient(url, MoeTopology.from_config(model.config), vocabulary=VOCABULARY) as engine:
        engine.update_weights(checkpoint_tensors(model), 1, probe(model), "run-1")
        running: list[list[list[Sample]]] = []
        long = SamplingParams(n=2, max_tokens=250, ignore_eos=True)
        thread = threading.Thread(target=lambda: running.append(engine.generate([[1, 2, 3]], long)))
        thread.start()
        while not engine._barrier.active:
            time.sleep(0.01)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        engine.update_weights(checkpoint_tensors(model), 2, probe(model), "run-2")
        thread.join()
        for sample in running[0][0]:  # aborted by the update, or done before it
            assert sample.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
            assert (sample.weight_version, sample.weights_id) == (1, "run-1")
        params = SamplingParams(max_tokens=6, temperature=0.7, seed=3)
        for (sample,) in engine.generate([[1, 2, 3], list(range(1, 60))], params):
            assert (sample.weight_version, sample.weights_id) == (2, "run-2")
            assert_sampled_from(model, sample, 0.7)
        incomplete = [(name, tensor) for name, tensor in checkpoint_tensors(model) if "experts.3" not in name]
        with pytest.raises(EngineError, match="missing"):
            engine.update_weights(incomplete, 3, probe(model), "run-3")
        with pytest.raises(EngineError, match="an update that did not succeed"):
            engine.generate([[1, 2, 3]], SamplingParams())


def probe(model: nn.Module) -> Probe:
    tokens = torch.arange(5, 25).numpy()
    return Probe(token_ids=tokens.tolist(), logprobs=reference(model, tokens).logprobs, tolerance=1e-3)
