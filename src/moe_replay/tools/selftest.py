"""`moe-replay selftest`: what needs two devices, tried on this machine, each item in its own processes.

An item trains two steps of a tiny random model with R3, by the commands that users run. That checks the routes of the
engine against its routers at the start, aligns them with the trainer's, updates, and compares log-probs after every
weight update; an item reads the metrics of the run on top. An item that does not end is a diagnosis: its processes say
where they stand, and are killed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from moe_replay.distributed.network import LOOPBACK, free_port
from moe_replay.engines.base import TOKEN_VARIABLE
from moe_replay.errors import MoeReplayError
from moe_replay.train.output.sinks import read_lines
from moe_replay.utils.processes import descendants
from moe_replay.verification.thresholds import Thresholds

Status = Literal["PASS", "FAIL", "SKIP"]
STEPS = 2
VOCABULARY = 128
OPTIONS = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**26, "gpu_memory_utilization": 0.3}
_TRANSPORT = re.compile(r"weights reach the engine by (\w+) \((.*)\)")
_DYING_S, _ENDING_S = 30.0, 10.0
"""Seconds in which the processes of an item that hangs write where they stand, and in which one ends when told."""


class Item(NamedTuple):
    """One thing that is tried."""

    name: str
    about: str
    ranks: int = 1  # of the trainer
    backend: Mapping[str, Any] = {}  # settings of its section
    options: Mapping[str, Any] = {}  # of vLLM
    transport: str | None = None  # that weights must have taken; None: any
    is_apart: bool = False  # the engine is a server, on the second device
    packages: tuple[str, ...] = ()  # without which it is skipped


EP2 = {"expert_parallel": 2}
ITEMS = (
    Item(
        "engine-tp2",
        "vLLM, tensor parallel 2",
        options={"tensor_parallel_size": 2},
        packages=("vllm",),
    ),
    Item(
        "engine-ep2",
        "vLLM, expert parallel 2",
        options={"tensor_parallel_size": 2, "enable_expert_parallel": True},
        packages=("vllm",),
    ),
    Item("nccl-sync", "weights by NCCL to a server", transport="nccl", is_apart=True, packages=("vllm", "uvicorn")),
    Item("fsdp-ep2", "FSDP2, expert parallel 2, weights by IPC", 2, {"kind": "fsdp", **EP2}, transport="ipc"),
    Item(
        "megatron-ep2",
        "Megatron-Core, expert parallel 2, weights by IPC",
        2,
        {"kind": "megatron", **EP2},
        transport="ipc",
        packages=("megatron.core",),
    ),
)


class Result(NamedTuple):
    """The outcome of an item: what was seen, or what is wrong; and the last lines that its processes wrote."""

    item: Item
    status: Status
    text: str
    seconds: float = 0.0
    output: str = ""


class ItemError(MoeReplayError):
    """An item of the self-test that failed."""


class Machine(NamedTuple):
    """Devices and settings that all items run with."""

    device: str  # cpu or cuda
    gpus: tuple[str, ...]  # two entries of CUDA_VISIBLE_DEVICES
    engine: str  # of the items that try a trainer: vllm, transformers or module:name
    timeout_s: float  # of an item
    folder: Path  # for the model and the runs
    program: str  # module of the `moe-replay` command

    @property
    def dtype(self) -> str:
        """Of engine and trainer."""
        return "float32" if self.device == "cpu" else "bfloat16"

    def environment(self, gpus: Sequence[str]) -> dict[str, str]:
        """Return the environment of a process that sees these GPUs."""
        always_set = {"PYTHONFAULTHANDLER": "1"}
        if self.device == "cuda":
            return {**os.environ, **always_set, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return {**threads, **os.environ, **always_set, "CUDA_VISIBLE_DEVICES": ""}


def run_items(items: Sequence[Item], machine: Machine, show: Callable[[Result], None]) -> list[Result]:
    """Run items one after the other; `show` gets each result when it is there."""
    results = []
    build_model(machine.folder)
    for item in items:
        results.append(run_item(item, machine))
        show(results[-1])
    return results


def run_item(item: Item, machine: Machine) -> Result:
    """Run the processes of one item, and read what they did."""
    needed = [*item.packages, *(["vllm"] if machine.engine == "vllm" else [])]
    missing = [name for name in dict.fromkeys(needed) if not _is_installed(name)]
    if missing:
        return Result(item, "SKIP", f"{', '.join(missing)} is not installed")
    began, log = time.monotonic(), machine.folder / f"{item.name}.log"
    try:
        _run_processes(item, machine, log, began + machine.timeout_s)
        text = _judged(item, machine, log.read_text(errors="replace"))
    except MoeReplayError as failure:
        output = log.read_text(errors="replace") if log.exists() else ""
        return Result(item, "FAIL", str(failure), time.monotonic() - began, output)
    return Result(item, "PASS", text, time.monotonic() - began)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even its parent is there
        return False


# ---- the model -------------------------------------------------------------------------------------------------------


def build_model(folder: Path) -> None:
    """Write a random Qwen3-MoE and prompts; every worker of two has rows of its vocabulary and heads."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    from moe_replay.demo.model import DemoSettings, build_tokenizer, model_config
    from moe_replay.demo.task import rows

    config = model_config(DemoSettings(hidden_size=128, layers=3, num_experts=8))
    config.vocab_size = VOCABULARY
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.data.normal_(0.0, 0.2)  # routers that decide: no ties that rounding resolves
    model.save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    lines = (json.dumps(row) for row in rows(32, 0, (2, 4), held_out=False))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def varied(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """Reward samples of a group differently, so that there is a gradient."""
    return [float(sum(map(ord, str(text))) % 7) for text in completions]


def recipe(item: Item, machine: Machine, url: str | None) -> dict[str, Any]:
    dtype = machine.dtype
    # An engine of another name runs in the trainer's process and takes tensors in requests.
    engine = "rollout_server" if url else "vllm" if item.options else machine.engine
    transport = item.transport if engine in ("vllm", "rollout_server") and item.transport else "auto"
    return {
        **{"name": item.name, "steps": STEPS, "output": str(machine.folder / item.name)},
        "model": {"path": str(machine.folder / "model"), "dtype": dtype},
        "data": {"path": str(machine.folder / "prompts.jsonl"), "chat_template": "none", "max_prompt_length": 64},
        "backend": {"device": machine.device, **item.backend},
        "rollout": {
            **{"engine": engine, "dtype": dtype, "prompts_per_step": 4, "num_generations": 4, "max_tokens": 8},
            **({"urls": [url]} if url else {}),
            **({"capture": "checked", "options": {**OPTIONS, **item.options}} if engine == "vllm" else {}),
        },
        "replay": {"mode": "r3"},
        "optim": {"lr": 1e-3},
        "reward": {"functions": [f"{__name__}:{varied.__name__}"], "workers": 0},
        "batch": {"tokens_per_micro_batch": 512},
        "weight_sync": {"transport": transport, "timeout_s": machine.timeout_s},
        "checkpoint": {"every": 0},
    }


# ---- processes -------------------------------------------------------------------------------------------------------


def _run_processes(item: Item, machine: Machine, log: Path, deadline: float) -> None:
    """Run the server of an item, if it has one, and its trainer; raise if one fails or does not end in time."""
    from moe_replay.train.config.file import to_toml
    from moe_replay.train.config.train_config import TrainConfig

    command = [sys.executable, "-m", machine.program]
    with ExitStack() as stack:
        output = stack.enter_context(log.open("ab"))
        environment, url = machine.environment(machine.gpus), None
        if item.is_apart:
            port = free_port(LOOPBACK)
            url, token = f"http://{LOOPBACK}:{port}", {TOKEN_VARIABLE: secrets.token_urlsafe(32)}
            options = [str(word) for pair in {**OPTIONS, **item.options}.items() for word in pair]
            serve = [*command, "rollout", "--model", str(machine.folder / "model"), "--port", str(port)]
            serve += ["--dtype", machine.dtype, "--capture", "checked", "--max-length", "128"]
            serve += ["--engine-options", *options]
            server = stack.enter_context(_started(serve, machine.environment(machine.gpus[1:]) | token, output))
            _wait_for_server(url, server, deadline)
            environment = machine.environment(machine.gpus[:1]) | token
        path = machine.folder / f"{item.name}.toml"
        path.write_text(to_toml(TrainConfig.model_validate(recipe(item, machine, url))), encoding="utf-8")
        if item.ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(item.ranks)]
            command = [sys.executable, *torchrun, "-m", machine.program]
        trainer = stack.enter_context(_started([*command, "train", str(path)], environment, output))
        try:
            status = trainer.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            _dump_stacks(trainer)
            raise ItemError(f"it has not ended after {machine.timeout_s:.0f} s, see the stacks below") from late
        if status:
            raise ItemError(_last_error(log.read_text(errors="replace")) or f"exit status {status}")


@contextmanager
def _started(command: list[str], environment: dict[str, str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Have a process, which is killed with all below it at the end."""
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        everyone = [process.pid, *descendants(process.pid)] if process.poll() is None else []
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
        for pid in everyone if process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _dump_stacks(process: subprocess.Popen[bytes]) -> None:
    """Have a process and all below it write their stacks; they end by it, and are waited for."""
    running: list[int] = []
    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            running.append(os.pidfd_open(pid))
    # All are held first: a parent that sees its child die would otherwise end before its own signal comes.
    for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):
        for descriptor in running:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
    deadline = time.monotonic() + _DYING_S
    for descriptor in running:
        select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)


def _wait_for_server(url: str, server: subprocess.Popen[bytes], deadline: float) -> None:
    while True:
        if server.poll() is not None:
            raise ItemError(f"the rollout server ended with status {server.returncode}")
        if time.monotonic() > deadline:
            _dump_stacks(server)
            raise ItemError("the rollout server has not started in time")
        with suppress(URLError, OSError), urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)


# ---- the verdict -----------------------------------------------------------------------------------------------------


def _judged(item: Item, machine: Machine, log: str) -> str:
    """Return what was measured; raise if it is not what a working run measures."""
    steps = list(read_lines(machine.folder / item.name / "metrics.jsonl"))
    if len(steps) != STEPS:
        raise ItemError("the run ended early", expected=f"{STEPS} steps", found=len(steps))
    agreement = min(step.get("routing/agreement", 0.0) for step in steps)
    least = Thresholds().min_agreement
    if not agreement >= least:
        raise ItemError("the trainer's routers choose other experts than the engine's", expected=least, found=agreement)
    if not all(step.get("loss/grad_norm", 0.0) > 0.0 for step in steps):
        raise ItemError("a step changed nothing: the norm of its gradient is 0")
    sent = _TRANSPORT.search(log)
    transport, reason = sent.groups() if sent else ("", "")
    configured = recipe(item, machine, "" if item.is_apart else None)["weight_sync"]["transport"]
    if configured not in ("auto", transport):
        raise ItemError("weights took another transport", expected=configured, found=f"{transport} ({reason})")
    return f"routes agree in {agreement:.3f}, {STEPS} updates, weights by {transport}"


def _last_error(log: str) -> str:
    """Return the last line of a log that names an error."""
    errors = [line.strip() for line in log.splitlines() if re.match(r"(error\b|[\w.]+Error: )", line.strip())]
    return errors[-1] if errors else ""
