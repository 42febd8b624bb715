"""One real step with an extra, run by a Python that has the wheel with this extra and nothing else of ours.

python extras.py EXTRA FOLDER

FOLDER is for files; beside it lies the tiny model of all steps of training, which the first of them makes.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import moe_replay as mr

FOLDER = Path(sys.argv[2])


def command(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "moe_replay.cli.main", *map(str, words)], capture_output=True, text=True, cwd=FOLDER
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def cli() -> None:
    """Trace files are inspected."""
    experts = np.array([[[0, 1]], [[1, 2]], [[0, 2]]], np.uint8)
    trace = mr.RouteTrace([1, 2, 3], experts, (0,), num_experts=4)
    with mr.TraceWriter(FOLDER / "traces.mrt") as writer:
        writer.append(trace)
    assert "1 traces, 3 tokens" in command("inspect", "traces.mrt")
    assert "torch" in command("doctor")


def tiny_model(vocabulary: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict.fromkeys(("hidden_size", "moe_intermediate_size", "head_dim"), 16)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, num_experts=4,
        num_experts_per_tok=2, eos_token_id=1, pad_token_id=0, bos_token_id=None, **sizes,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def transformers() -> None:
    """Routes of a model are recorded and replayed."""
    import torch

    model = tiny_model(99)
    ids, layout = [[5, 6, 7]], mr.TokenLayout.padded([3])
    replay = mr.attach(model)
    with torch.no_grad(), replay.record() as recording:
        model(torch.tensor(ids))
    with replay.replay(mr.RouteBatch.from_traces(recording.traces(layout, ids), layout)):
        model(torch.tensor(ids)).logits.sum().backward()


def train(*options: str) -> None:
    """A step of GRPO, with rollouts by Transformers."""
    from moe_replay import demo
    from moe_replay.cli.main import main

    with (FOLDER.parent / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = demo.prepare(FOLDER.parent / "demo", quick=True)
    words = (
        "train", "--output", FOLDER / "run", "--steps", 1, "--model.path", files.model, "--data.path", files.train,
        "--model.dtype", "float32", "--rollout.engine", "transformers", "--rollout.prompts-per-step", 2,
        "--rollout.num-generations", 2, "--rollout.max-tokens", 8, "--data.max-prompt-length", 32, "--replay.mode",
        "r3", "--checkpoint.every", 0, *options,
    )  # fmt: skip
    main([str(word) for word in words])  # here, since a new process would import everything again
    (line,) = (FOLDER / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["routing/agreement"] > 0.5


def lora() -> None:
    """The same on adapters."""
    train("--model.lora-rank", "2")


def serve() -> None:
    """The server's application is built and says that it needs a token."""
    import asyncio
    from unittest.mock import MagicMock

    from moe_replay.engines.requests import RequestLimits
    from moe_replay.engines.server.app import build_app

    app = build_app(MagicMock(), "token", 1, RequestLimits())
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/info", "headers": [], "query_string": b"", "root_path": ""}
    asyncio.run(app(scope | {"http_version": "1.1", "scheme": "http", "client": None, "server": None}, receive, send))
    assert sent[0]["status"] == 401, sent
    assert "--max-requests" in command("rollout", "--help")


def report() -> None:
    """A figure is drawn."""
    from moe_replay.report.plots import render

    assert render("line", "A line", "", lambda axes: axes.plot([1, 2])).png
    assert "--output" in command("report", "--help")


def megatron() -> None:
    """Routes of a Megatron-Core model are replayed in its own schedule."""
    example = Path(__file__).resolve().parents[2] / "examples" / "megatron_forward_step.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, cwd=FOLDER)
    assert done.returncode == 0, done.stderr


def trl() -> None:
    """A step of TRL's own trainer, with the routes of its generation."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from moe_replay.demo.model import build_tokenizer
    from moe_replay.integrations.trl import RouterReplayMixin

    tokenizer = build_tokenizer()
    settings = GRPOConfig(
        output_dir=str(FOLDER), use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=8, max_steps=1,
    )  # fmt: skip
    trainer = type("Trainer", (RouterReplayMixin, GRPOTrainer), {})(
        model=tiny_model(len(tokenizer)),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["1+2="] * 4}),
        processing_class=tokenizer,
        replay="r3",
    )
    trainer.train()
    assert trainer.state.log_history[0]["routing/replayed_fraction"] > 0.5


def tensorboard() -> None:
    """Metrics of a step reach TensorBoard."""
    train("--log.tensorboard")
    assert list((FOLDER / "run" / "tensorboard").iterdir())


def log_step(sink: str) -> None:
    """The metrics of a step, logged as a run logs them."""
    from moe_replay.train.config.train_config import TrainConfig
    from moe_replay.train.output.run_folder import Run

    with Run.open(TrainConfig(output=FOLDER / "run", log={sink: True})) as run:
        run.begin(after=0)
        run.log(1, {"reward/mean": 0.5})


def wandb() -> None:
    """Metrics of a step reach Weights & Biases, whose files stay here."""
    os.environ["WANDB_MODE"] = "offline"
    log_step("wandb")
    assert list((FOLDER / "run" / "wandb").glob("offline-run-*/*.wandb"))


def mlflow() -> None:
    """Metrics of a step reach MLflow."""
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{FOLDER / 'mlflow.db'}"
    log_step("mlflow")
    from mlflow.tracking import MlflowClient

    run = MlflowClient().get_run((FOLDER / "run" / "mlflow-id.txt").read_text())
    assert run.data.metrics == {"reward/mean": 0.5}
    assert run.info.status == "FINISHED"


def trackio() -> None:
    """Metrics of a step reach Trackio."""
    os.environ["TRACKIO_DIR"] = str(FOLDER / "trackio")
    log_step("trackio")
    with sqlite3.connect(FOLDER / "trackio" / "moe-replay.db") as database:
        ((step, metrics),) = database.execute("select step, metrics from metrics")
    assert (step, json.loads(metrics)) == (1, {"reward/mean": 0.5})


def ray() -> None:
    """A step of GRPO as Ray actors: one rank, one engine."""
    train("--cluster.launcher", "ray", "--cluster.engines", "1", "--backend.device", "cpu")


STEPS = (cli, transformers, train, lora, serve, report, megatron, trl, tensorboard, wandb, mlflow, trackio, ray)

if __name__ == "__main__":
    {one.__name__: one for one in STEPS}[sys.argv[1]]()
    print(f"[{sys.argv[1]}] works")
