"""The client of a plain `vllm serve` against the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_replay.rollout.plain_vllm import PlainVllmServer
from moe_replay.rollout.types import SamplingParams
from moe_replay.routes.topology import MoeTopology
from tests.ports import answers
from tests.real_vllm.conftest import NEEDS_VLLM
from tests.rollout.tiny import VOCABULARY, assert_sampled_from, tiny_model

pytest.importorskip("vllm", reason=NEEDS_VLLM)


def test_the_real_vllm_serve(tmp_path: Path, port: int) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs", "--enforce-eager"]
    command += ["--max-model-len", "256", "--kv-cache-memory-bytes", str(2**26)]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        while server.poll() is None and not answers(port):
            time.sleep(0.5)
        assert server.poll() is None, "vllm serve did not start"
        url, topology = f"http://127.0.0.1:{port}", MoeTopology.from_config(model.config)
        with PlainVllmServer(url, "tiny", topology, processed_logprobs=True) as client:
            assert client.name.name == "vLLM"
            for group in client.generate(
                [[1, 2, 3], list(range(1, 60))], SamplingParams(n=2, max_tokens=6, temperature=0.7)
            ):
                for sample in group:
                    assert_sampled_from(model, sample, 0.7)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)  # and the processes that it has started
        server.wait()


def save_tokenizer(folder: Path) -> None:
    """One word for each token: the server wants a tokenizer, although nothing here is text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
