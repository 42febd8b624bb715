"""Cost of carrying the routes of one response from an engine to a trainer over HTTP, against JSON.

    python benchmarks/wire.py [--tokens 8192] [--seconds 2.0]        (needs the extra `train`; Linux; two minutes)

A server in a separate process encodes the routes for every request and sends them over loopback; the client decodes
them. CPU is that of both processes, kernel included, the median over requests. There are two baselines, both base64 of
raw int32 over all layers, dense ones too, in a JSON body: with Python's json and base64, and with orjson and pybase64.
SGLang's server writes with the fast ones, vLLM's with pybase64 and json; slime reads with json and pybase64.

"The same bytes, no codec" is a prebuilt body that nobody parses: the cost of the transport alone, and so the most that
any codec could gain. The last two columns are encode and decode alone, in 10^9 expert ids of MoE layers per second on
one core. Each side starts from its in-memory form: int32 arrays for JSON, a `RouteTrace` for this format; the latter is
read with all its checks, JSON with none.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.client
import http.server
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
import orjson
import pybase64

from moe_replay.routes.trace import RouteTrace, decode_trace, encode_parts

Result = TypeVar("Result", "Cost", "Speed")


@dataclass(frozen=True)
class Model:
    """How a model routes; its dense layers come first."""

    num_experts: int
    top_k: int
    layers: int
    dense_layers: int = 0

    def __str__(self) -> str:
        dense = f", {self.dense_layers} dense" if self.dense_layers else ""
        return f"{self.num_experts} experts, top {self.top_k}, {self.layers} layers{dense}"


MODELS = (Model(128, 8, 48), Model(384, 8, 61, dense_layers=1), Model(512, 10, 48))


class Routes(NamedTuple):
    """The same routes, as each way holds them in memory."""

    trace: RouteTrace
    all_layers: np.ndarray  # (T, layers, K) int32, zeros for dense layers
    output_ids: list[int]
    blob: bytes


@functools.cache
def routes_of(model: Model, tokens: int) -> Routes:
    """Random routes: what is measured here does not depend on their values, but for the digits in JSON lists."""
    rng = np.random.default_rng(0)
    moe_layers = range(model.dense_layers, model.layers)
    choices = np.stack([rng.permutation(model.num_experts)[: model.top_k] for _ in moe_layers])
    experts = (rng.integers(0, model.num_experts, (tokens, len(moe_layers), 1)) + choices) % model.num_experts
    token_ids = rng.integers(0, 150_000, tokens)
    all_layers = np.zeros((tokens, model.layers, model.top_k), np.int32)
    all_layers[:, model.dense_layers :] = experts
    trace = RouteTrace(token_ids, experts, moe_layers, num_experts=model.num_experts)
    return Routes(trace, all_layers, token_ids.tolist(), trace.to_bytes())


# ---- the ways --------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """One way to carry routes."""

    encode: Callable[[Routes], list[bytes] | list[memoryview]]
    decode: Callable[[bytes], object]


def base64_body(routes: Routes, text: str) -> dict:
    """As SGLang's server answers."""
    return {"output_ids": routes.output_ids, "meta_info": {"routed_experts": text}}


def lists_body(routes: Routes, routed_experts: object) -> dict:
    """As the first servers with routes answered."""
    return {"output_ids": routes.output_ids, "routed_experts": routed_experts}


STANDARD = "base64 int32 (json, base64)"
FAST = "base64 int32 (orjson, pybase64)"
FLOOR = "the same bytes, no codec"


def fast_base64(routes: Routes) -> list[bytes]:
    """What SGLang's server does."""
    return [orjson.dumps(base64_body(routes, pybase64.b64encode(routes.all_layers.tobytes()).decode("utf-8")))]


WAYS = {
    "lists (json)": Way(
        lambda routes: [json.dumps(lists_body(routes, routes.all_layers.tolist())).encode()],
        lambda body: np.array(json.loads(body)["routed_experts"], np.int32),
    ),
    "lists (orjson)": Way(
        lambda routes: [orjson.dumps(lists_body(routes, routes.all_layers), option=orjson.OPT_SERIALIZE_NUMPY)],
        lambda body: np.array(orjson.loads(body)["routed_experts"], np.int32),
    ),
    STANDARD: Way(
        lambda routes: [
            json.dumps(base64_body(routes, base64.b64encode(routes.all_layers.tobytes()).decode("utf-8"))).encode()
        ],
        lambda body: np.frombuffer(base64.b64decode(json.loads(body)["meta_info"]["routed_experts"]), np.int32),
    ),
    FAST: Way(
        fast_base64,
        lambda body: np.frombuffer(
            pybase64.b64decode(orjson.loads(body)["meta_info"]["routed_experts"], validate=True), np.int32
        ),
    ),
    "base64 int32 (SGLang to slime)": Way(
        fast_base64,
        lambda body: np.frombuffer(
            pybase64.b64decode(json.loads(body)["meta_info"]["routed_experts"].encode("ascii")), np.int32
        ),
    ),
    FLOOR: Way(lambda routes: [routes.blob], lambda body: body),
    "moe-replay, joined": Way(lambda routes: [routes.trace.to_bytes()], decode_trace),
    "moe-replay, in parts": Way(lambda routes: encode_parts(routes.trace), decode_trace),
}


# ---- both ends -------------------------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET /model/way/tokens with the encoded routes."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Encode anew for every request."""
        model, way, tokens = (int(part) for part in self.path.split("/")[1:])
        parts = list(WAYS.values())[way].encode(routes_of(MODELS[model], tokens))
        self.send_response(200)
        self.send_header("Content-Length", str(sum(len(part) for part in parts)))
        self.end_headers()
        for part in parts:
            self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def serve(port: Connection) -> None:
    """Run the server until the process is ended."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_address[1])
    server.serve_forever()


class Cost(NamedTuple):
    """Of one request, in seconds; of one body, in bytes."""

    cpu: float
    wall: float
    size: int


class Speed(NamedTuple):
    """In 10^9 ids a second."""

    encode: float
    decode: float


def medians(measures: dict[str, Callable[[], Result]], seconds: float, rounds: int = 40) -> dict[str, Result]:
    """The median of each measure, field by field. The rare slow ones stand evenly among the quick ones.

    Each stops after so many seconds or rounds; its first result warms up and is left out, unless it is the only one.
    """
    results: dict[str, list[Result]] = {name: [] for name in measures}
    spent = dict.fromkeys(measures, 0.0)

    def progress(name: str) -> float:
        return max(spent[name] / seconds, len(results[name]) / rounds)

    while progress(name := min(measures, key=progress)) < 1:
        start = time.perf_counter()
        results[name].append(measures[name]())
        spent[name] += time.perf_counter() - start
    kept = {name: found[1:] or found for name, found in results.items()}
    return {name: type(found[0])(*map(median, zip(*found, strict=True))) for name, found in kept.items()}


def request_cost(client: http.client.HTTPConnection, server_cpu: int, path: str, way: Way) -> Cost:
    """What one request takes, from asking for the routes to having them."""

    def cpu_clock() -> float:
        time.sleep(0.001)  # the server may still be returning from its last send
        return time.process_time() + time.clock_gettime(server_cpu)

    cpu, wall = cpu_clock(), time.perf_counter()
    client.request("GET", path)
    body = client.getresponse().read()
    way.decode(body)
    wall = time.perf_counter() - wall
    return Cost(cpu_clock() - cpu, wall, len(body))


def codec_speed(routes: Routes, way: Way, body: bytes) -> Speed:
    """Encode and decode in this process."""
    begin = time.process_time()
    way.encode(routes)
    middle = time.process_time()
    way.decode(body)
    ids = routes.trace.routed_experts.size / 1e9
    return Speed(ids / (middle - begin), ids / (time.process_time() - middle))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way and model")
    options = parser.parse_args()

    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    client = http.client.HTTPConnection("127.0.0.1", ours.recv())
    server_cpu = (~(server.pid or 0) << 3) | 2  # Linux: clock_getcpuclockid(3) of another process

    print(f"{options.tokens} tokens; bytes relative to base64 int32, CPU and wall to it with the libraries named\n")
    print("| routes | way | bytes | CPU: json, base64 | orjson, pybase64 | wall: the same | CPU ms | encode | decode |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for number, model in enumerate(MODELS):
        routes = routes_of(model, options.tokens)
        requests: dict[str, Callable[[], Cost]] = {}
        codecs: dict[str, Callable[[], Speed]] = {}
        for index, (name, way) in enumerate(WAYS.items()):
            path = f"/{number}/{index}/{options.tokens}"
            requests[name] = functools.partial(request_cost, client, server_cpu, path, way)
            codecs[name] = functools.partial(codec_speed, routes, way, b"".join(way.encode(routes)))
        codecs.pop(FLOOR)
        costs, speeds = medians(requests, options.seconds), medians(codecs, options.seconds / 3)
        standard, fast = costs[STANDARD], costs[FAST]
        for name, cost in costs.items():
            less = (standard.cpu / cost.cpu, fast.cpu / cost.cpu, fast.wall / cost.wall)
            ratios = " | ".join([f"{cost.size / fast.size:.1%}", *(f"{ratio:.3g} x less" for ratio in less)])
            rates = " | ".join(f"{rate:.2g}" for rate in speeds[name]) if name in speeds else "|"
            print(f"| {model} | {name} | {ratios} | {1000 * cost.cpu:.2f} | {rates} |", flush=True)
    server.terminate()
    print(
        f"\nAbove 256 experts an id has 9 bits: {9 * 3 / (32 * 4):.1%} of its base64 int32; sections add about 0.1 %."
    )
    print("A smaller code would lose the order or compress (30 times the CPU for 12 % of the bytes).")
    print(f"No codec over this transport gains more than the row '{FLOOR}'.")


if __name__ == "__main__":
    main()
