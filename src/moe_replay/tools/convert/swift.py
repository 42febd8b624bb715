"""ms-swift's `megatron rlhf`, `swift rlhf` and `swift rollout` into a recipe and the command of a server."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from moe_replay.tools.convert.draft import ConversionError, Draft
from moe_replay.tools.convert.shell_script import Command
from moe_replay.tools.convert.shell_words import names_of
from moe_replay.train.config.foreign.swift import MEGATRON_DEFAULTS, OPTIONS, RENAMED, SWIFT_DEFAULTS
from moe_replay.train.rewards import REWARDS
from moe_replay.utils.plugins import is_path

TRAINER = "ms-swift"
DEFAULT_PORT = "8000"
FRACTIONS = ("lr_warmup_fraction", "warmup_ratio")
COUNTS = {
    "train_iters": "steps",
    "max_steps": "steps",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "lr_warmup_iters": "optim.warmup_steps",
    "warmup_steps": "optim.warmup_steps",
}
"""Options that count updates, where ours count steps."""


def from_swift(commands: Sequence[Command]) -> Draft:
    """Return the recipe of the first training command, with the command of a rollout server beside it."""
    trainings = [(command, found) for command in commands if (found := _training(command.words)) is not None]
    servers = [found for command in commands if (found := _after(command.words, "rollout")) is not None]
    if not trainings and not servers:
        raise ConversionError(
            "no command of ms-swift was found", expected="megatron rlhf, swift rlhf, swift rollout or their options"
        )
    draft = Draft(TRAINER)
    if trainings:
        command, (words, is_megatron) = trainings[0]
        _Swift(draft, words, command.variables, is_megatron=is_megatron).convert()
    for words in servers:
        draft.header += ["", "The rollout server:", f"  {_server(draft, words)}"]
    return draft


def _training(words: list[str]) -> tuple[list[str], bool] | None:
    """Return the options of a training command and whether it is that of Megatron; None for another command."""
    for name, is_megatron in (("_megatron/rlhf.py", True), ("_megatron.rlhf", True), ("cli/rlhf.py", False)):
        for number, word in enumerate(words):
            if word.endswith(name):
                return words[number + 1 :], is_megatron
    if (found := _after(words, "rlhf")) is not None:
        return found, PurePath(words[words.index("rlhf") - 1]).name == "megatron"
    if words[:1] and words[0].startswith("--"):
        names = {_plain(word) for word in words if word.startswith("--")}
        return words, any("parallel_size" in name and "vllm" not in name for name in names) or "lr" in names
    return None


def _after(words: list[str], action: str) -> list[str] | None:
    for number, word in enumerate(words[:-1]):
        if PurePath(word).name in ("swift", "megatron") and words[number + 1] == action:
            return words[number + 2 :]
    return None


def _plain(word: str) -> str:
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    return RENAMED.get(name, name)


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Return name -> values; of an option that is given twice, the last."""
    flags: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            _, equals, value = word.partition("=")
            current = flags[_plain(word)] = [value] if equals else []
        else:
            current.append(word)
    return flags


class _Swift:
    """One command of ms-swift on its way into a draft."""

    def __init__(self, draft: Draft, words: list[str], variables: dict[str, str], *, is_megatron: bool) -> None:
        self.draft = draft
        self.given = _flags(words)
        defaults = MEGATRON_DEFAULTS if is_megatron else SWIFT_DEFAULTS
        self.defaults = {name: value.split() for name, value in defaults.items() if name not in self.given}
        self.variables = variables
        self.is_megatron = is_megatron

    def convert(self) -> None:
        """Fill the draft."""
        kind = " ".join(self.values("rlhf_type"))
        if kind not in ("grpo", ""):
            raise ConversionError("only GRPO can be converted", found=f"--rlhf_type {kind}")
        launcher = "megatron rlhf" if self.is_megatron else "swift rlhf"
        self.draft.header += [f"Converted from ms-swift's `{launcher}`. Look at it with --dry-run first."]
        self.draft.header += ["", f"  {self._launch()}"]
        self.draft.put("backend.kind", "megatron" if self.is_megatron else "fsdp", launcher)
        for name, words in [*self.given.items(), *self.defaults.items()]:
            option = OPTIONS.get(name)
            if option is None:
                self.draft.remark(self.shown(name), "no counterpart is known")
            elif not option.derived:
                is_default = name in self.defaults
                self.draft.apply(self.shown(name), f"--{name}", words, option, is_default=is_default)
        updates = self._batches()
        self._counts(updates)
        self._adam()
        self._data()
        self._lora()
        self._engine()
        self._rewards()
        self._log()

    def values(self, name: str) -> list[str]:
        """Return the values of an option, or its default; empty if there is neither."""
        return self.given.get(name, self.defaults.get(name, []))

    def number(self, name: str, default: int) -> int:
        """Return the value of an option that is a whole number."""
        word = " ".join(self.values(name))
        if not word:
            return default
        try:
            return int(float(word))
        except (ValueError, OverflowError):
            missing = f"; the script does not assign {', '.join(names_of(word))}" if names_of(word) else ""
            self.draft.remark(self.shown(name), f"not a number{missing}; {default} was used in its place")
            return default

    def shown(self, name: str) -> str:
        """Return an option as it was written."""
        return " ".join([f"--{name}", *self.values(name)])

    def _batches(self) -> int:
        """Set prompts and updates of a step and the size of micro-batches; return the number of updates."""
        samples = self.number("num_generations", 8)
        if self.is_megatron:
            of_update, sizes = self.number("global_batch_size", 16), "global_batch_size"
            of_rollout = self.number("generation_batch_size", 0)
            updates = self.number("steps_per_generation", of_rollout // of_update or 1)
            at_once = self.number("micro_batch_size", 1)
        else:
            ranks = int(self.variables.get("NPROC_PER_NODE") or 1) * int(self.variables.get("NNODES") or 1)
            at_once = self.number("per_device_train_batch_size", 1)
            forwards = self.number("gradient_accumulation_steps", 1)
            of_rollout = self.number("generation_batch_size", 0)
            passes = self.number("steps_per_generation", of_rollout // (at_once * ranks) or forwards)
            updates = max(passes // forwards, 1)
            of_update, sizes = at_once * ranks * forwards, f"per_device_train_batch_size on {ranks} ranks"
        sequences = of_update * updates
        if sequences % samples:
            self.draft.remark(f"--{sizes}", f"{sequences} sequences are not whole groups of {samples}; rounded down")
        source = f"--{sizes}, --steps_per_generation, --num_generations"
        self.draft.put("rollout.prompts_per_step", max(sequences // samples, 1), source)
        self.draft.put("algorithm.updates_per_rollout", updates, "--steps_per_generation")
        updates *= self.number("num_iterations", 1)
        prompt, completion = self.number("max_length", 512), self.number("max_completion_length", 512)
        length = min(prompt + completion, self.number("vllm_max_model_len", prompt + completion))
        what = "--micro_batch_size" if self.is_megatron else "--per_device_train_batch_size"
        self.draft.put("batch.tokens_per_micro_batch", at_once * length, f"{what} x {length} tokens")
        return updates

    def _counts(self, updates: int) -> None:
        for name, key in COUNTS.items():
            if values := self.values(name):
                steps = math.ceil(self.number(name, 0) / updates)
                source = f"{self.shown(name)} / {updates} updates of a step" if updates > 1 else f"--{name}"
                self.draft.put(key, steps or None, source, is_default=name in self.defaults and bool(values))
        if "steps" in self.draft.settings:
            self.draft.drop("data.epochs", "the number of steps is given")
        for name in FRACTIONS:
            if name in self.given:
                steps = self.draft.settings.get("steps")
                if steps is None:
                    self.draft.remark(self.shown(name), "set optim.warmup_steps: a fraction of steps")
                else:
                    part = math.ceil(float(self.values(name)[0]) * steps.value)
                    self.draft.put("optim.warmup_steps", part or None, self.shown(name))
        if "eval.every" in self.draft.settings and "val_dataset" not in self.given:
            self.draft.remark(self.shown("eval_steps"), "set data.eval_path too: no rows are split off the others")
            del self.draft.settings["eval.every"]

    def _adam(self) -> None:
        betas = [" ".join(self.values("adam_beta1")) or "0.9", " ".join(self.values("adam_beta2"))]
        is_default = not {"adam_beta1", "adam_beta2"} & self.given.keys()
        self.draft.put("optim.betas", betas, "--adam_beta1, --adam_beta2", is_default=is_default)
        lora = self.values("tuner_type") == ["lora"]
        rate = "--lr" if self.is_megatron else "--learning_rate"
        self.draft.put("optim.lr", "1e-4" if lora else "1e-5", rate, is_default=True)

    def _data(self) -> None:
        for name, key in (("dataset", "data.path"), ("val_dataset", "data.eval_path")):
            for number, written in enumerate(self.values(name)):
                path, hash_, count = written.partition("#")
                if hash_:
                    self.draft.remark(f"--{name} {written}", f"all rows are used, not {count}")
                if number:
                    self.draft.remark(f"--{name} {written}", f"{key} is one data set; put the rows into one file")
                else:
                    self.draft.put(key, path, f"--{name}")

    def _lora(self) -> None:
        if self.values("tuner_type") == ["lora"]:
            self.draft.put("model.lora_rank", 8, "--lora_rank", is_default=True)
            self.draft.put("model.lora_alpha", 32, "--lora_alpha", is_default=True)
            self.draft.put("model.lora_targets", ["all-linear"], "--target_modules", is_default=True)
            if "tuner_type" not in self.given:
                self.draft.remark("--tuner_type lora", "the default of swift rlhf; lora_rank = 0 trains all weights")
            return
        if kind := " ".join(self.values("tuner_type")).replace("full", ""):
            self.draft.remark(f"--tuner_type {kind}", "weights are trained in full or by LoRA")
        for key in ("model.lora_rank", "model.lora_alpha", "model.lora_targets", "model.lora_merge"):
            self.draft.drop(key, "of no use without --tuner_type lora")

    def _engine(self) -> None:
        mode = " ".join(self.values("vllm_mode"))
        is_server = mode == "server" or any(name in self.given for name in ("vllm_server_host", "vllm_server_base_url"))
        if "rollout.engine" not in self.draft.settings:
            self.draft.put("rollout.engine", "vllm_server" if is_server else "vllm", f"--vllm_mode {mode}".strip())
        self._engine_options()
        self._engines(is_server)
        level = self.number("sleep_level", 0)
        self.draft.put("rollout.sleep", level > 0 if "sleep_level" in self.given else None, "--sleep_level")
        self.draft.put("rollout.sleep_level", level or None, "--sleep_level")
        if is_server:
            hosts, ports = self.values("vllm_server_host") or ["127.0.0.1"], self.values("vllm_server_port")
            ports = [*ports, *[DEFAULT_PORT] * (len(hosts) - len(ports))]
            addresses = [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
            urls = self.values("vllm_server_base_url") or addresses
            self.draft.put("rollout.urls", urls, "--vllm_server_base_url, --vllm_server_host, --vllm_server_port")
            self.draft.remark("--vllm_mode server", "the servers are `moe-replay rollout`, with the engine's options")
            for key in [key for key in self.draft.settings if key.startswith("rollout.options.")]:
                setting = self.draft.settings.pop(key)
                name = key.rpartition(".")[2]
                self.draft.remark(setting.source, f"moe-replay rollout --engine-options {name} {setting.value}")

    def _engines(self, is_server: bool) -> None:
        """Set how many engines share the GPUs of a machine, where one does not take them all."""
        gpus, of_one = self.variables.get("NPROC_PER_NODE", "1"), self.number("vllm_tensor_parallel_size", 1)
        if not is_server and gpus.isdecimal() and int(gpus) > of_one and "vllm_tensor_parallel_size" in self.given:
            engines = int(gpus) // of_one
            self.draft.put("rollout.engines_per_node", engines, f"{gpus} GPUs / --vllm_tensor_parallel_size {of_one}")

    def _engine_options(self) -> None:
        for name, value in _engine_items(self.draft, " ".join(self.given.get("vllm_engine_kwargs", []))):
            self.draft.put(f"rollout.options.{name}", value, "--vllm_engine_kwargs")

    def _rewards(self) -> None:
        names, weights = self.values("reward_funcs"), self.values("reward_weights")
        kept = [number for number, name in enumerate(names) if name in REWARDS or is_path(name)]
        for number, name in enumerate(names):
            if number not in kept:
                self.draft.remark(f"--reward_funcs {name}", "a function of yours: module:name in reward.functions")
        if kept:
            self.draft.put("reward.functions", [names[number] for number in kept], "--reward_funcs")
        if len(weights) == len(names) and kept:
            self.draft.put("reward.weights", [weights[number] for number in kept], "--reward_weights")

    def _log(self) -> None:
        for name in self.values("report_to"):
            if name in ("wandb", "tensorboard", "mlflow"):
                self.draft.put(f"log.{name}", True, "--report_to", is_default="report_to" in self.defaults)
            elif name != "none":
                self.draft.remark(f"--report_to {name}", "a metric sink of your own: log.sinks, docs/extending.md")

    def _launch(self) -> str:
        ranks, nodes = self.variables.get("NPROC_PER_NODE", "1"), self.variables.get("NNODES", "1")
        several = "" if nodes in ("", "1") else f"--nnodes {nodes} "
        if ranks in ("", "1") and not several:
            return "moe-replay train RECIPE.toml"
        return f"torchrun {several}--nproc-per-node {ranks} -m moe_replay.cli.main train RECIPE.toml"


def _engine_items(draft: Draft, text: str) -> list[tuple[str, object]]:
    """Return the items of `--vllm_engine_kwargs` that are to be set here."""
    if not text:
        return []
    try:
        items = json.loads(text)
    except ValueError:
        draft.remark(f"--vllm_engine_kwargs {text}", "not a JSON object; set rollout.options")
        return []
    own = {"enable_return_routed_experts": "routes are recorded whenever replay.mode needs them"}
    for name in own.keys() & items.keys():
        draft.remark(f"--vllm_engine_kwargs {name}", own[name])
    return [(name, value) for name, value in items.items() if name not in own]


def _server(draft: Draft, words: list[str]) -> str:
    """Return our command of a rollout server for `swift rollout`."""
    flags = _flags(words)
    command, options = ["moe-replay", "rollout"], list[str]()
    names = {
        "model": "--model",
        "host": "--host",
        "port": "--port",
        "vllm_max_model_len": "--max-length",
        "torch_dtype": "--dtype",
    }
    for name, values in flags.items():
        option = OPTIONS.get(name)
        if name in names:
            command += [names[name], *values]
        elif name == "vllm_engine_kwargs":
            options += [str(word) for item in _engine_items(draft, " ".join(values)) for word in item]
        elif option is not None and option.key.startswith("rollout.options."):
            options += [option.key.rpartition(".")[2], *values]
        else:
            shown = " ".join([f"--{name}", *values])
            draft.remark(f"swift rollout {shown}", option.note if option and option.note else "no counterpart is known")
    return shlex.join(command + (["--engine-options", *options] if options else []))
