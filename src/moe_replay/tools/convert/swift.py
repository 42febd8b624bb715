"""ms-swift: `megatron rlhf` and `swift rlhf` to a recipe, `swift rollout` to a `moe-replay rollout` command."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from moe_replay.tools.convert.draft import UNKNOWN, ConversionError, Draft, subject_of, torchrun
from moe_replay.train.config.foreign.swift import (
    AGGREGATIONS,
    LOSSES,
    MEGATRON_DEFAULTS,
    OPTIONS,
    RENAMED,
    SUBSETS,
    SWIFT_DEFAULTS,
)
from moe_replay.utils.plugins import is_path

DEFAULT_PORT = "8000"
FRACTIONS = ("lr_warmup_fraction", "warmup_ratio")
REWARDS = ("accuracy", "format")
"""Rewards of ms-swift that are built in here under the same names."""
SCHEDULERS_OF_WHOLE_EPISODES = ("math_tip_trick", "gym_scheduler", "openenv_scheduler")
"""Schedulers of ms-swift whose episodes are one sequence; thinking_tips_scheduler and the user's may return several."""
COUNTS = {
    "train_iters": "steps",
    "max_steps": "steps",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "lr_warmup_iters": "optim.warmup_steps",
    "warmup_steps": "optim.warmup_steps",
}
"""Options in updates; ours are in steps."""


def from_swift(words: list[str], environment: Mapping[str, str]) -> Draft:
    """Return the recipe of a training command, or our command for a rollout server in the header of an empty one."""
    draft = Draft()
    if (training := _training(words)) is not None:
        options, is_megatron = training
        _Swift(draft, options, environment, is_megatron=is_megatron).convert()
    elif (options := _after(words, "rollout")) is not None:
        draft.is_recipe = False
        draft.header += ["The rollout server:", f"  {_server(draft, options)}"]
    else:
        raise ConversionError(
            "not a command of ms-swift",
            expected="megatron rlhf, swift rlhf, swift rollout or their options",
            found=shlex.join(words[:3]),
        )
    return draft


def _training(words: list[str]) -> tuple[list[str], bool] | None:
    """Return the options of a training command and whether it is the Megatron one; None for any other command."""
    for name, is_megatron in (("_megatron/rlhf.py", True), ("_megatron.rlhf", True), ("cli/rlhf.py", False)):
        for index, word in enumerate(words):
            if word.endswith(name):
                return words[index + 1 :], is_megatron
    if (options := _after(words, "rlhf")) is not None:
        return options, PurePath(words[words.index("rlhf") - 1]).name == "megatron"
    if words[:1] and words[0].startswith("--"):
        names = {_plain(word) for word in words if word.startswith("--")}
        return words, any("parallel_size" in name and "vllm" not in name for name in names) or "lr" in names
    return None


def _after(words: list[str], action: str) -> list[str] | None:
    for index, word in enumerate(words[:-1]):
        if PurePath(word).name in ("swift", "megatron") and words[index + 1] == action:
            return words[index + 2 :]
    return None


def _plain(word: str) -> str:
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    return RENAMED.get(name, name)


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Return name -> values; the last occurrence of an option wins."""
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
    """The conversion of one training command."""

    def __init__(self, draft: Draft, words: list[str], environment: Mapping[str, str], *, is_megatron: bool) -> None:
        self.draft = draft
        self.options = _flags(words)
        defaults = MEGATRON_DEFAULTS if is_megatron else SWIFT_DEFAULTS
        self.defaults = {name: value.split() for name, value in defaults.items() if name not in self.options}
        self.environment = environment
        self.is_megatron = is_megatron

    def convert(self) -> None:
        kind = " ".join(self.values("rlhf_type"))
        if kind not in ("grpo", ""):
            raise ConversionError("only GRPO can be converted", found=f"--rlhf_type {kind}")
        launcher = "megatron rlhf" if self.is_megatron else "swift rlhf"
        self.draft.header += [f"Converted from ms-swift's `{launcher}`. Check it with --dry-run first."]
        self.draft.header += ["", f"  {self._launch()}"]
        self.draft.put("backend.kind", "megatron" if self.is_megatron else "fsdp", launcher)
        for name, words in [*self.options.items(), *self.defaults.items()]:
            option = OPTIONS.get(name)
            if option is None:
                self.draft.remark(self.shown(name), "whether it changes the run is not known", UNKNOWN)
            elif not option.derived:
                is_default = name in self.defaults
                self.draft.apply(self.shown(name), f"--{name}", words, option, is_default=is_default)
        self._loss()
        updates = self._batches()
        self._counts(updates)
        self._adam()
        self._data()
        self._lora()
        self._engine()
        self._environment()
        self._rewards()
        is_default = "report_to" in self.defaults
        self.draft.log(self.values("report_to"), "--report_to", "--report_to ", is_default=is_default)

    def values(self, name: str) -> list[str]:
        """Return the values of an option, or its default; empty without either."""
        return self.options.get(name, self.defaults.get(name, []))

    def integer(self, name: str, default: int, least: float = -math.inf) -> int:
        word = " ".join(self.values(name))
        if not word:
            return default
        return int(self.draft.number(word, default, self.shown(name), OPTIONS[name].key, least))

    def ranks(self, variable: str) -> int:
        """Return ranks or nodes as the environment has them; 1 for a word of torchrun, such as "gpu"."""
        word = self.environment.get(variable) or "1"
        if word.isdecimal():
            return int(word)
        self.draft.remark(f"{variable}={word}", "how many ranks there are is not said; 1 was assumed", "sampling")
        return 1

    def shown(self, name: str) -> str:
        return " ".join([f"--{name}", *self.values(name)])

    def _loss(self) -> None:
        kind = " ".join(self.values("loss_type"))
        aggregation = (AGGREGATIONS | LOSSES).get(kind)
        if aggregation is None:
            reason = f"not implemented; {', '.join(AGGREGATIONS | LOSSES)} are, or write one: docs/extending.md"
            self.draft.remark(self.shown("loss_type"), reason, "loss")
            return
        is_default = "loss_type" in self.defaults
        self.draft.put("algorithm.loss", kind if kind in LOSSES else None, "--loss_type")
        self.draft.put("algorithm.loss_aggregation", aggregation, "--loss_type", is_default=is_default)
        if kind == "cispo":
            self._cispo_bounds()
        elif self.values("epsilon"):
            self.draft.put("algorithm.clip_high", self.values("epsilon")[0], "--epsilon", is_default=True)
        if "algorithm.rollout_correction" in self.draft.settings:
            source = "--rollout_importance_sampling_mode"
            self.draft.put("algorithm.rollout_correction_low", 0.0, source)  # ratios have an upper bound only
        if "rollout.top_k" not in self.draft.settings:
            self.draft.put("rollout.top_k", max(self.integer("top_k", 0), 0) or None, "--top_k")
        if self.values("dynamic_sample") != ["true"]:
            self.draft.settings.pop("algorithm.max_refills", None)

    def _cispo_bounds(self) -> None:
        """Set the bounds of the ratio: theirs is the largest ratio itself, and there is no smallest one."""
        source = "--epsilon_high" if "epsilon_high" in self.options else "--epsilon"
        try:
            largest = float((self.values(source[2:]) or ["0.2"])[0])
        except ValueError:
            return  # reported with the setting that it does not fit
        if largest < 1:
            reason = f"cispo clips all ratios above {largest}, also those near 1; set --epsilon_high, e.g. 5"
            self.draft.remark(self.shown(source[2:]), reason, "loss")
            return
        self.draft.put("algorithm.clip_low", 1.0, "--loss_type cispo")
        self.draft.put("algorithm.clip_high", largest - 1, source, change="here the distance from 1")

    def _batches(self) -> int:
        """Set prompts and updates per step and the micro-batch size; return the number of updates."""
        samples = self.integer("num_generations", 8, 1)
        per_rollout = self.integer("generation_batch_size", 0)
        if self.is_megatron:
            per_update, size_option = self.integer("global_batch_size", 16, 1), "global_batch_size"
            updates = self.integer("steps_per_generation", per_rollout // per_update or 1, 1)
            per_pass = self.integer("micro_batch_size", 1)
        else:
            ranks = self.ranks("NPROC_PER_NODE") * self.ranks("NNODES")
            per_pass = self.integer("per_device_train_batch_size", 1, 1)
            forwards = self.integer("gradient_accumulation_steps", 1, 1)
            passes = self.integer("steps_per_generation", per_rollout // (per_pass * ranks) or forwards, 1)
            updates = max(passes // forwards, 1)
            per_update, size_option = per_pass * ranks * forwards, f"per_device_train_batch_size on {ranks} ranks"
        sequences = per_update * updates
        if sequences % samples:
            self.draft.remark(
                f"--{size_option}", f"{sequences} sequences are not whole groups of {samples}; rounded down", "sampling"
            )
        source, change = f"--{size_option}, --steps_per_generation, --num_generations", "prompts, not sequences"
        self.draft.put("rollout.prompts_per_step", max(sequences // samples, 1), source, change=change)
        self.draft.put("algorithm.updates_per_rollout", updates, "--steps_per_generation")
        updates *= self.integer("num_iterations", 1, 1)
        prompt, completion = self.integer("max_length", 512), self.integer("max_completion_length", 512)
        length = min(prompt + completion, self.integer("vllm_max_model_len", prompt + completion))
        micro_batch = "--micro_batch_size" if self.is_megatron else "--per_device_train_batch_size"
        self.draft.micro_batch(per_pass, length, micro_batch)
        return updates

    def _counts(self, updates: int) -> None:
        for name, key in COUNTS.items():
            if values := self.values(name):
                steps = math.ceil(self.integer(name, 0) / updates)
                source = f"{self.shown(name)} / {updates} updates per step" if updates > 1 else f"--{name}"
                self.draft.put(key, steps or None, source, is_default=name in self.defaults and bool(values))
        if "steps" in self.draft.settings:
            self.draft.drop("data.epochs", "the number of steps is set")
        for name in FRACTIONS:
            if word := " ".join(self.options.get(name, [])):
                fraction = self.draft.number(word, 0.0, self.shown(name), "optim.warmup_steps")
                self.draft.warm_up(fraction, self.shown(name), self.shown(name))

    def _adam(self) -> None:
        betas = [" ".join(self.values("adam_beta1")) or "0.9", " ".join(self.values("adam_beta2"))]
        is_default = not {"adam_beta1", "adam_beta2"} & self.options.keys()
        self.draft.put("optim.betas", betas, "--adam_beta1, --adam_beta2", is_default=is_default)
        lora = self.values("tuner_type") == ["lora"]
        rate = "--lr" if self.is_megatron else "--learning_rate"
        self.draft.put("optim.lr", "1e-4" if lora else "1e-5", rate, is_default=True)

    def _data(self) -> None:
        for name, key in (("dataset", "data.path"), ("val_dataset", "data.eval_path")):
            for index, dataset in enumerate(self.values(name)):
                if index:
                    self.draft.remark(f"--{name} {dataset}", f"{key} takes one dataset; merge the files", "data")
                else:
                    self._dataset(f"--{name}", dataset, key)
        self.draft.drop_evaluation(self.shown("eval_steps"))
        if self.values("truncation_strategy") != ["delete"]:
            self.draft.change("--truncation_strategy left", "prompts longer than --max_length are dropped, not cut")
        if text := " ".join(self.values("columns")):
            columns = _json_items(self.draft, "columns", text, "data.columns")
            renamed = {theirs: "prompt" if ours == "query" else ours for theirs, ours in columns.items()}
            self.draft.put("data.columns", renamed or None, "--columns")
        if " ".join(self.values("system")).endswith(".txt"):
            self.draft.remark(self.shown("system"), "a file: put its text into data.system", "data")
            self.draft.settings.pop("data.system", None)

    def _dataset(self, option: str, dataset: str, key: str) -> None:
        """Set path and subset of `hub::name:subset/subset#rows`, of which all but the name may be missing."""
        path, hash_, count = dataset.rpartition("::")[2].partition("#")
        path, _, subsets = path.partition(":")
        subset, slash, _ = subsets.partition("/")
        if hash_:
            self.draft.remark(f"{option} {dataset}", f"all rows are used, not {count}", "data")
        if slash:
            self.draft.remark(f"{option} {dataset}", "data.subset is one; merge the subsets", "data")
        self.draft.put(key, path, option)
        previous = self.draft.settings.get("data.subset")
        subset = subset or SUBSETS.get(path, "")
        if previous is not None and previous.value != subset:
            self.draft.remark(f"{option} {dataset}", f"data.subset is {previous.value} for both data sets", "data")
        elif subset:
            self.draft.put("data.subset", subset, option)

    def _lora(self) -> None:
        if self.values("tuner_type") == ["lora"]:
            self.draft.put("model.lora_rank", 8, "--lora_rank", is_default=True)
            self.draft.put("model.lora_alpha", 32, "--lora_alpha", is_default=True)
            self.draft.put("model.lora_target_modules", ["all-linear"], "--target_modules", is_default=True)
            if "lora_dropout" not in self.options:
                self.draft.change("--lora_dropout 0.05", "the default of ms-swift; adapters have no dropout here")
            return
        if kind := " ".join(self.values("tuner_type")).replace("full", ""):
            self.draft.remark(f"--tuner_type {kind}", "only full training and LoRA are supported", "model")
        for key in ("model.lora_rank", "model.lora_alpha", "model.lora_target_modules", "model.lora_merge"):
            self.draft.drop(key, "no effect without --tuner_type lora")

    def _engine(self) -> None:
        mode = " ".join(self.values("vllm_mode"))
        is_server = mode == "server" or any(
            name in self.options for name in ("vllm_server_host", "vllm_server_base_url")
        )
        if "rollout.engine" not in self.draft.settings:
            self.draft.put("rollout.engine", "rollout_server" if is_server else "vllm", f"--vllm_mode {mode}".strip())
        for name, value in _engine_items(self.draft, " ".join(self.options.get("vllm_engine_kwargs", []))):
            self.draft.put(f"rollout.options.{name}", value, "--vllm_engine_kwargs")
        self._engines(is_server)
        level = self.integer("sleep_level", 0)
        self.draft.put("rollout.sleep", level > 0 if "sleep_level" in self.options else None, "--sleep_level")
        self.draft.put("rollout.sleep_level", level or None, "--sleep_level")
        if is_server:
            hosts, ports = self.values("vllm_server_host") or ["127.0.0.1"], self.values("vllm_server_port")
            ports = [*ports, *[DEFAULT_PORT] * (len(hosts) - len(ports))]
            addresses = [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
            urls = self.values("vllm_server_base_url") or addresses
            self.draft.put("rollout.urls", urls, "--vllm_server_base_url, --vllm_server_host, --vllm_server_port")
            self.draft.change("--vllm_mode server", "start the servers with `moe-replay rollout`")
            for key in [key for key in self.draft.settings if key.startswith("rollout.options.")]:
                setting = self.draft.settings.pop(key)
                name = key.rpartition(".")[2]
                self.draft.change(setting.source, f"moe-replay rollout --engine-options {name} {setting.value}")

    def _engines(self, is_server: bool) -> None:
        """Set the number of engines per node if one engine does not use all of its GPUs."""
        gpus, per_engine = self.environment.get("NPROC_PER_NODE", "1"), self.integer("vllm_tensor_parallel_size", 1, 1)
        if is_server or not gpus.isdecimal() or "vllm_tensor_parallel_size" not in self.options:
            return
        if int(gpus) > per_engine:
            source = f"{gpus} GPUs / --vllm_tensor_parallel_size {per_engine}"
            self.draft.put("rollout.engines_per_node", int(gpus) // per_engine, source)

    def _environment(self) -> None:
        for name in self.options.get("multi_turn_scheduler", []):
            option = "--multi_turn_scheduler"
            self.draft.environment(name, f"{option} {name}", option, may_split=name not in SCHEDULERS_OF_WHOLE_EPISODES)

    def _rewards(self) -> None:
        names, weights = self.values("reward_funcs"), self.values("reward_weights")
        usable = [index for index, name in enumerate(names) if name in REWARDS or is_path(name)]
        for index, name in enumerate(names):
            if index not in usable:
                self.draft.remark(
                    f"--reward_funcs {name}", "not built in: add module:name to reward.functions", "reward"
                )
        if usable:
            self.draft.put("reward.functions", [names[index] for index in usable], "--reward_funcs")
        if len(weights) == len(names) and usable:
            self.draft.put("reward.weights", [weights[index] for index in usable], "--reward_weights")

    def _launch(self) -> str:
        ranks, nodes = self.environment.get("NPROC_PER_NODE", "1"), self.environment.get("NNODES", "1")
        is_alone = ranks in ("", "1") and nodes in ("", "1")
        return "moe-replay train RECIPE.toml" if is_alone else torchrun(ranks, nodes)


def _json_items(draft: Draft, name: str, text: str, key: str) -> dict[str, object]:
    """Return the JSON object in an option; empty, with a remark, if it is none."""
    try:
        items = json.loads(text)
    except ValueError:
        items = None
    if isinstance(items, dict):
        return items
    draft.remark(f"--{name} {text}", f"not a JSON object; set {key}", subject_of(key) or UNKNOWN)
    return {}


def _engine_items(draft: Draft, text: str) -> list[tuple[str, object]]:
    """Return the items of `--vllm_engine_kwargs` that become engine options."""
    items = _json_items(draft, "vllm_engine_kwargs", text or "{}", "rollout.options")
    automatic = {"enable_return_routed_experts": "routes are captured whenever replay.mode needs them"}
    for name in automatic.keys() & items.keys():
        draft.remark(f"--vllm_engine_kwargs {name}", automatic[name])
    return [(name, value) for name, value in items.items() if name not in automatic]


def _server(draft: Draft, words: list[str]) -> str:
    flags = _flags(words)
    command, options = ["moe-replay", "rollout"], list[str]()
    names = {"model": "--model", "host": "--host", "port": "--port"}
    names |= {"vllm_max_model_len": "--max-length", "torch_dtype": "--dtype"}
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
            reason = option.note if option and option.note else "no known counterpart"
            draft.remark(f"swift rollout {shown}", reason, "" if option else UNKNOWN)
    return shlex.join(command + (["--engine-options", *options] if options else []))
