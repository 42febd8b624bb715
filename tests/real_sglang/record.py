"""Ask a real SGLang on CPU and keep what it says: `python -m tests.real_sglang.record`, from the root of the project.

Writes tests/engines/recorded/sglang_*.json, which the tests of the client read. Needs requirements/sglang-cpu.txt.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from moe_replay.engines.sglang.client import generate_request
from moe_replay.records import SamplingParams
from tests.real_sglang.models import FAMILIES, sglang_model
from tests.real_sglang.server import sglang_server

FOLDER = Path(__file__).parents[1] / "rollout" / "recorded"
PROMPT = [5, 17, 2, 60, 33, 8]


def ask(client: httpx.Client, prompt: list[int], params: SamplingParams, first_token: int = 0) -> dict[str, Any]:
    """One request and what it was answered."""
    request = generate_request(prompt, params, first_token)
    return {"request": request, "answer": client.post("/generate", json=request).raise_for_status().json()}


def ask_until_aborted(client: httpx.Client, prompt: list[int]) -> dict[str, Any]:
    """A request that is aborted once it has sampled a little."""

    def abort() -> None:
        time.sleep(0.3)
        client.post("/abort_request", json={"abort_all": True}).raise_for_status()

    aborting = threading.Thread(target=abort)
    aborting.start()
    asked = ask(client, prompt, SamplingParams(max_tokens=200))
    aborting.join()
    return asked


def cases(client: httpx.Client) -> dict[str, Any]:
    """What there is to see of one model."""
    greedy = ask(client, PROMPT, SamplingParams(temperature=0, max_tokens=6))
    stop = greedy["answer"]["output_ids"][2]
    aborted = ask_until_aborted(client, PROMPT)
    so_far = PROMPT + aborted["answer"]["output_ids"]
    return {
        "length": ask(client, PROMPT, SamplingParams(max_tokens=5)),
        "greedy": greedy,
        "two": ask(client, PROMPT, SamplingParams(n=2, max_tokens=4)),
        "stop": ask(client, PROMPT, SamplingParams(temperature=0, max_tokens=6, stop_token_ids=(stop,))),
        "temperature": ask(client, PROMPT, SamplingParams(temperature=0.7, max_tokens=5)),
        "top_k": ask(client, PROMPT, SamplingParams(temperature=0.7, top_k=5, top_p=0.9, max_tokens=5)),
        "first_token": ask(client, PROMPT, SamplingParams(max_tokens=4), first_token=4),
        "aborted": aborted,
        "resumed": ask(client, so_far, SamplingParams(max_tokens=4)),
        "resumed_first_token": ask(client, so_far, SamplingParams(max_tokens=4), first_token=len(so_far) - 1),
    }


def greedy_only(client: httpx.Client) -> dict[str, Any]:
    """For a model that SGLang gets wrong: what it computes may be no numbers, of which sampling would die."""
    return {"greedy": ask(client, PROMPT, SamplingParams(temperature=0, max_tokens=1))}


def record(name: str, family: str, ask_all: Callable[[httpx.Client], dict[str, Any]], **changes: Any) -> None:
    """What there is to see of one model, in one file."""
    with tempfile.TemporaryDirectory() as folder:
        sglang_model(family, **changes).save_pretrained(folder)
        with sglang_server(Path(folder)) as url, httpx.Client(base_url=url, timeout=60) as client:
            version = client.get("/server_info").json()["version"]
            kept = {"engine": f"SGLang {version}", "family": family, "changes": changes, "cases": ask_all(client)}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"sglang_{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    for known in FAMILIES:
        record(known, known, cases)
    record("qwen3_moe_dense", "qwen3_moe", greedy_only, mlp_only_layers=[0])
