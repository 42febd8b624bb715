"""verl's `python -m verl.trainer.main_ppo key=value ...` into a recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePath

from moe_replay.tools.convert.draft import ConversionError, Draft
from moe_replay.tools.convert.shell_script import Command
from moe_replay.tools.convert.shell_words import names_of
from moe_replay.train.config.checks import KEYS_OF_MEGATRON_SETTINGS
from moe_replay.train.config.foreign.options import Option
from moe_replay.train.config.foreign.verl import ACTOR, DEFAULTS, GROUPS, MODEL, OPTIONS, ROLLOUT, TRANSFORMER_CONFIG

TRAINER = "verl"
ENTRY_POINTS = ("main_ppo", "main_ppo.py", "main_ppo_sync", "fully_async_main", "fully_async_main.py", "main_dapo")
REWARD = "verl:verl.utils.reward_score:default_compute_score"
NEVER = ("-1", "null", "none", "")
ENGINE_OPTIONS = f"{ROLLOUT}.engine_kwargs."


def from_verl(commands: Sequence[Command]) -> Draft:
    """Return the recipe of the first training command."""
    for command in commands:
        if (words := _arguments(command.words)) is not None:
            draft = Draft(TRAINER)
            _Verl(draft, words).convert()
            return draft
    raise ConversionError("no command of verl was found", expected="python -m verl.trainer.main_ppo, or key=value ...")


def _arguments(words: list[str]) -> list[str] | None:
    for number, word in enumerate(words):
        if PurePath(word).name in ENTRY_POINTS or word.rpartition(".")[2] in ENTRY_POINTS:
            return words[number + 1 :]
    is_override = re.compile(r"\+{0,2}[a-z]\w*(\.\w+)*=")
    return words if words and is_override.match(words[0]) and "." in words[0].partition("=")[0] else None


def _values(text: str) -> list[str]:
    """Return the items of a list as Hydra writes it, or the text itself: `["a","b"]`, `[a, b]`, `'a'`."""
    text = text.strip()
    if text.startswith(("[", "(")) and text.endswith(("]", ")")):
        return [_unquoted(item) for item in text[1:-1].split(",") if item.strip()]
    return [_unquoted(text)]


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


class _Verl:
    """One command of verl on its way into a draft."""

    def __init__(self, draft: Draft, words: list[str]) -> None:
        self.draft = draft
        self.given: dict[str, str] = {}
        self.config_name = ""
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            if name in ("--config-name", "--config-path", "--config-dir"):
                value = value if equals else next(rest, "")
                self.config_name += value if name == "--config-name" else ""
                if name != "--config-name":
                    draft.remark(word, "a configuration file of yours is not read")
            elif word.startswith("~"):
                draft.remark(word, "removes a key of verl's configuration")
            elif equals:
                self.given[name.lstrip("+").removeprefix("--")] = value
            else:
                draft.remark(word, "not a key=value")
        self.defaults = {name: value for name, value in DEFAULTS.items() if name not in self.given}

    def convert(self) -> None:
        """Fill the draft."""
        self.draft.header += [
            "Converted from verl's `main_ppo`. Look at it with --dry-run first.",
            "",
            f"  {self._launch()}",
        ]
        self._backend()
        for name, text in [*self.given.items(), *self.defaults.items()]:
            self._apply(name, text, is_default=name in self.defaults)
        self._batches()
        self._clip_and_reference()
        self._data()
        self._engine()
        self._reward()
        self._log()

    def shown(self, name: str) -> str:
        """Return an option as it was written."""
        return f"{name}={self.given.get(name, self.defaults.get(name, ''))}"

    def text(self, name: str, default: str = "") -> str:
        """Return the value of an option, or verl's default for it."""
        return _unquoted(self.given.get(name, self.defaults.get(name, default)))

    def number(self, name: str, default: float) -> float:
        """Return the value of an option that is a number."""
        text = self.text(name)
        try:
            return default if text.lower() in NEVER else float(text)
        except ValueError:
            missing = f"; the script does not assign {', '.join(names_of(text))}" if names_of(text) else ""
            self.draft.remark(self.shown(name), f"not a number{missing}; {default} was used in its place")
            return default

    def _apply(self, name: str, text: str, *, is_default: bool) -> None:
        option = self._option(name)
        if option is None:
            self.draft.remark(self.shown(name), "no counterpart is known")
        elif option.derived:
            return
        elif _unquoted(text).lower() in NEVER:
            if option.key in ("checkpoint.every", "eval.every"):
                self.draft.put(option.key, 0, name, is_default=is_default)
        else:
            self.draft.apply(self.shown(name), name, _values(text), option, is_default=is_default)

    def _option(self, name: str) -> Option | None:
        if name in OPTIONS:
            return OPTIONS[name]
        if name.startswith(TRANSFORMER_CONFIG):
            field = name.removeprefix(TRANSFORMER_CONFIG)
            return Option(KEYS_OF_MEGATRON_SETTINGS.get(field, f"backend.megatron.{field}"))
        if name.startswith(ENGINE_OPTIONS):
            engine, _, key = name.removeprefix(ENGINE_OPTIONS).partition(".")
            return Option(f"rollout.options.{key}") if engine == "vllm" else None
        return next((Option(note=note) for group, note in GROUPS.items() if name.startswith(group)), None)

    def _backend(self) -> None:
        names = (f"{ACTOR}.strategy", "model_engine", f"{ACTOR}.model_engine")
        written = next((name for name in names if name in self.given), "")
        kind = self.text(written) if written else ""
        if not kind and "megatron" in self.config_name:
            kind, written = "megatron", "--config-name"
        if not kind and any(name.startswith(f"{ACTOR}.megatron.") for name in self.given):
            kind, written = "megatron", f"{ACTOR}.megatron"
        if kind not in ("megatron", "fsdp", "fsdp2", "dp", ""):
            self.draft.remark(self.shown(written), "the trainer is FSDP2 or Megatron-Core")
        self.draft.put("backend.kind", "megatron" if kind == "megatron" else "fsdp", written)
        other = f"{MODEL}.enable_gradient_checkpointing" if kind == "megatron" else f"{ACTOR}.megatron"
        self.defaults = {name: text for name, text in self.defaults.items() if not name.startswith(other)}

    def _batches(self) -> None:
        prompts = int(self.number("data.train_batch_size", 1024))
        mini = int(self.number(f"{ACTOR}.ppo_mini_batch_size", 256)) or 1
        self.draft.put("rollout.prompts_per_step", prompts, "data.train_batch_size")
        if prompts % mini:
            self.draft.remark(self.shown(f"{ACTOR}.ppo_mini_batch_size"), f"does not divide {prompts} prompts")
        source = f"data.train_batch_size / {ACTOR}.ppo_mini_batch_size"
        self.draft.put("algorithm.updates_per_rollout", max(prompts // mini, 1), source)
        micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        if self.text(f"{ACTOR}.use_dynamic_bsz").lower() != "true" and micro in self.given:
            length = self.number("data.max_prompt_length", 512) + self.number("data.max_response_length", 512)
            tokens = int(self.number(micro, 1) * length)
            self.draft.put("batch.tokens_per_micro_batch", tokens, f"{micro} x {length:.0f} tokens")
        if "steps" in self.draft.settings:
            self.draft.drop("data.epochs", "the number of steps is given")
        ratio = f"{ACTOR}.optim.lr_warmup_steps_ratio"
        if self.number(ratio, 0.0):
            steps = self.draft.settings.get("steps")
            if steps is None:
                self.draft.remark(self.shown(ratio), "set optim.warmup_steps: a fraction of steps")
            else:
                self.draft.put("optim.warmup_steps", math.ceil(self.number(ratio, 0.0) * float(steps.value)), ratio)

    def _clip_and_reference(self) -> None:
        clip = f"{ACTOR}.clip_ratio"
        for key in ("algorithm.clip_low", "algorithm.clip_high"):
            if clip in self.given and key not in self.draft.settings:
                self.draft.put(key, self.text(clip), clip)
        coefficient = f"{ACTOR}.kl_loss_coef"
        if self.text(f"{ACTOR}.use_kl_loss").lower() == "true":
            self.draft.put("algorithm.beta", self.text(coefficient, "0.001"), coefficient)
        elif coefficient in self.given:
            self.draft.remark(self.shown(coefficient), "of no use without use_kl_loss")
        if "algorithm.adv_estimator" not in self.given:
            self.draft.remark("algorithm.adv_estimator=gae", "advantages are those of a group: there is no critic")
        if not {f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"} & self.given.keys():
            for key in ("model.lora_alpha", "model.lora_targets", "model.lora_merge"):
                self.draft.drop(key, "of no use without a rank")

    def _data(self) -> None:
        for name, key in (("data.train_files", "data.path"), ("data.val_files", "data.eval_path")):
            for number, path in enumerate(_values(self.given[name]) if name in self.given else []):
                if names_of(path):
                    missing = ", ".join(names_of(path))
                    self.draft.remark(f"{name}={path}", f"the script does not assign {missing}; replace it in {key}")
                if number:
                    self.draft.remark(f"{name}={path}", f"{key} is one file; put the rows into one")
                else:
                    self.draft.put(key, path, name)
        every = self.draft.settings.get("eval.every")
        if every is not None and every.value and "data.eval_path" not in self.draft.settings:
            self.draft.remark(self.shown("trainer.test_freq"), "set data.eval_path too")
            del self.draft.settings["eval.every"]

    def _engine(self) -> None:
        stale = "async_training.staleness_threshold"
        if stale in self.given:
            self.draft.put("rollout.max_staleness", max(math.ceil(self.number(stale, 1.0)), 1), stale)
            for key in ("rollout.sleep", "backend.offload"):
                self.draft.drop(key, "engine and trainer work at the same time")
        engine = self.draft.settings.get("rollout.engine")
        if engine is None or engine.value == "vllm":
            self.draft.put("rollout.engine", "vllm", f"{ROLLOUT}.name")
            return
        for key in [key for key in self.draft.settings if key.startswith("rollout.options.")]:
            setting = self.draft.settings.pop(key)
            if not setting.is_default:
                self.draft.remark(self.shown(setting.source), "an option of the engine, which is started on its own")
        sleep = self.draft.settings.pop("rollout.sleep", None)
        if engine.value == "sglang_server":
            self.draft.put("rollout.urls", ["http://127.0.0.1:30000"], "the address of your SGLang server")
            why = "SGLang is a separate server here, on other GPUs than the trainer: docs/engines.md"
            self.draft.remark(self.shown(f"{ROLLOUT}.name"), why)
        if sleep is not None and not sleep.is_default:
            self.draft.remark(self.shown(sleep.source), f"{engine.value} does not sleep")

    def _reward(self) -> None:
        for prefix in ("reward.custom_reward_function", "custom_reward_function"):
            path = self.text(f"{prefix}.path")
            if path.lower() not in NEVER:
                name = self.text(f"{prefix}.name", "compute_score")
                function = f"verl:{PurePath(path).stem}:{name}"
                self.draft.put("reward.functions", [function], f"{prefix}.path; its folder must be on PYTHONPATH")
                return
        self.draft.put("reward.functions", [REWARD], "verl's own, by data_source; verl must be installed")

    def _log(self) -> None:
        for name in _values(self.text("trainer.logger")):
            if name in ("wandb", "tensorboard", "mlflow"):
                self.draft.put(f"log.{name}", True, "trainer.logger", is_default="trainer.logger" in self.defaults)
            elif name != "console":
                self.draft.remark(f"trainer.logger={name}", "a metric sink of your own: log.sinks, docs/extending.md")

    def _launch(self) -> str:
        ranks, nodes = self.text("trainer.n_gpus_per_node", "8"), self.text("trainer.nnodes", "1")
        several = "" if nodes == "1" else f"--nnodes {nodes} "
        return f"torchrun {several}--nproc-per-node {ranks} -m moe_replay.cli.main train RECIPE.toml"
