"""A plain `vllm serve` in developer mode, for as long as it is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import answers, reserved_port


@contextmanager
def vllm_serve(folder: Path, vocabulary: int, *options: str) -> Iterator[str]:
    """Serve the model in a folder, with routes; yields the address."""
    save_tokenizer(folder, vocabulary)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256"]
    command += ["--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}
    with reserved_port() as port:
        server = subprocess.Popen([*command, *options, "--port", str(port)], env=environment, start_new_session=True)
        try:
            while server.poll() is None and not answers(port):
                time.sleep(0.5)
            assert server.poll() is None, "vllm serve did not start"
            yield f"http://127.0.0.1:{port}"
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)  # and the processes that it has started
            server.wait()


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """One word for each token: the server wants a tokenizer, although nothing here is text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
