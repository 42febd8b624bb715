"""Servers that answer every request with prebuilt samples, so that only receiving them costs anything."""

from __future__ import annotations

import http.server
import json
import threading
from multiprocessing.connection import Connection

import numpy as np

from moe_replay.records import FinishReason, Sample
from moe_replay.routes.trace import RouteTrace

LAYERS, EXPERTS, TOP_K = 48, 128, 8
PROMPT = tuple(range(100, 164))


def sample(tokens: int, rng: np.random.Generator) -> Sample:
    """A sample with random routes."""
    choices = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)])
    ids = np.concatenate([np.array(PROMPT), rng.integers(0, 1000, tokens)]).astype(np.int32)
    experts = (rng.integers(0, EXPERTS, (len(ids), LAYERS, 1)) + choices) % EXPERTS
    trace = RouteTrace(ids, experts, range(LAYERS), num_experts=EXPERTS)
    logprobs = -rng.random(tokens, np.float32)
    return Sample(
        prompt_ids=ids[: len(PROMPT)],
        completion_ids=ids[len(PROMPT) :],
        logprobs=logprobs,
        finish_reason=FinishReason.LENGTH,
        trace=trace,
        weight_version=0,
    )


INFO = {
    "engine": ["finished bodies", "1"],
    "weight_version": 0,
    "num_layers": LAYERS,
    "model_type": "qwen3_moe",
    "moe_layers": [[layer, EXPERTS, TOP_K] for layer in range(LAYERS)],
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with bodies that are finished."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    body = b""

    def do_GET(self) -> None:
        """Describe the engine."""
        self._answer(json.dumps(INFO).encode())

    def do_POST(self) -> None:
        """Return the samples."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.body)

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def serve(port: Connection, body: bytes, count: int) -> None:
    """Run servers until the process is ended; their ports go through the pipe."""
    handler = type("Finished", (Handler,), {"body": body})
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(count)]
    port.send([server.server_address[1] for server in servers])
    for server in servers:
        threading.Thread(target=server.serve_forever).start()
