"""verl: `python -m verl.trainer.main_ppo key=value ...`, or its Hydra configuration, to a recipe."""

from __future__ import annotations

import math
import re
from pathlib import PurePath

from moe_replay.tools.convert.draft import Draft, torchrun
from moe_replay.tools.convert.hydra import NEVER, HydraCommand, overrides_of
from moe_replay.train.config.checks import KEYS_OF_MEGATRON_SETTINGS
from moe_replay.train.config.foreign.options import Option
from moe_replay.train.config.foreign.verl import (
    ACTOR,
    DEFAULTS,
    GROUPS,
    LOSSES,
    MODEL,
    OPTIONS,
    REPLAY_MODES,
    ROLLOUT,
    TRANSFORMER_CONFIG,
)

ENTRY_POINTS = ("main_ppo", "main_ppo.py", "main_ppo_sync", "fully_async_main", "fully_async_main.py", "main_dapo")
REWARD = "verl:verl.utils.reward_score:default_compute_score"
ENGINE_OPTIONS = f"{ROLLOUT}.engine_kwargs."
_REPLAY = re.compile(r"(?:.*\.)?router_replay\.(mode|enabled)")
"""The setting moved between sections from version to version; #4101 had it at the top."""


def from_verl(words: list[str]) -> Draft:
    overrides = overrides_of(words, ENTRY_POINTS, "verl", "python -m verl.trainer.main_ppo")
    draft = Draft()
    _Verl(draft, overrides).convert()
    return draft


class _Verl(HydraCommand):
    """The conversion of one training command."""

    table, groups, all_defaults = OPTIONS, GROUPS, DEFAULTS

    def convert(self) -> None:
        self.draft.header += [
            "Converted from verl's `main_ppo`. Check it with --dry-run first.",
            "",
            f"  {torchrun(self.text('trainer.n_gpus_per_node', '8'), self.text('trainer.nnodes', '1'))}",
        ]
        self._backend()
        self.apply_options()
        offload = f"{MODEL}.enable_activation_offload"
        if self.is_true(offload) and self.draft.settings["backend.kind"].value == "fsdp":
            self.draft.put("model.gradient_checkpointing", "offload", offload)
        self._replay()
        self._batches()
        self._loss()
        self._data()
        self._engine()
        self._environment()
        self._reward()
        self.log("trainer.logger")

    def option(self, name: str) -> Option | None:
        if _REPLAY.fullmatch(name):
            return Option("replay.mode", derived=True)
        if name.startswith(TRANSFORMER_CONFIG):
            field = name.removeprefix(TRANSFORMER_CONFIG)
            return Option(KEYS_OF_MEGATRON_SETTINGS.get(field, f"backend.megatron.{field}"))
        if name.startswith(ENGINE_OPTIONS):
            engine, _, key = name.removeprefix(ENGINE_OPTIONS).partition(".")
            return Option(f"rollout.options.{key}") if engine == "vllm" else None
        return super().option(name)

    def _backend(self) -> None:
        names = (f"{ACTOR}.strategy", "model_engine", f"{ACTOR}.model_engine")
        source = next((name for name in names if name in self.options), "")
        kind = self.text(source) if source else ""
        if not kind and "megatron" in self.config_name:
            kind, source = "megatron", "--config-name"
        if not kind and any(name.startswith(f"{ACTOR}.megatron.") for name in self.options):
            kind, source = "megatron", f"{ACTOR}.megatron"
        if kind not in ("megatron", "fsdp", "fsdp2", "dp", ""):
            self.draft.change(self.shown(source), "the trainer is FSDP2 or Megatron-Core")
        self.draft.put("backend.kind", "megatron" if kind == "megatron" else "fsdp", source)
        of_fsdp = f"{MODEL}.enable_gradient_checkpointing", f"{ACTOR}.ulysses_sequence_parallel_size"
        other = of_fsdp if kind == "megatron" else f"{ACTOR}.megatron"
        self.defaults = {name: text for name, text in self.defaults.items() if not name.startswith(other)}

    def _replay(self) -> None:
        """Set the replay mode: `router_replay.mode` and `.enabled` at any depth, and the switch of the rollout."""
        matches = [match for match in map(_REPLAY.fullmatch, self.options) if match]
        modes = [match[0] for match in matches if match[1] == "mode"]
        switches = {self.text(match[0]).lower() for match in matches if match[1] == "enabled"}
        returned = self.is_true(f"{ROLLOUT}.enable_rollout_routing_replay")
        known = {mode.lower(): ours for mode, ours in REPLAY_MODES.items()}
        if "false" in switches:
            self.draft.put("replay.mode", "off", "router_replay.enabled")
            return
        if not modes and not returned and not switches:
            self.draft.put("replay.mode", "off", "router_replay.mode", is_default=True)
        elif not modes:
            shown = "enable_rollout_routing_replay" if returned else "router_replay.enabled"
            self.draft.remark(shown, "which routes are replayed is not said; set router_replay.mode=R2 or R3", "replay")
        for name in modes:
            mode = known.get(self.text(name).lower())
            if mode is None:
                self.draft.remark(self.shown(name), f"only {', '.join(REPLAY_MODES)} can be converted", "replay")
            self.draft.put("replay.mode", mode, name)
        setting = self.draft.settings.get("replay.mode")
        if returned and setting is not None and setting.value != "r3":
            self.draft.remark("enable_rollout_routing_replay", f"no effect with replay.mode = {setting.value}")

    def _batches(self) -> None:
        self.batches("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
        micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        if not self.is_true(f"{ACTOR}.use_dynamic_bsz") and micro in self.options:
            length = self.number("data.max_prompt_length", 512) + self.number("data.max_response_length", 512)
            self.draft.micro_batch(self.number(micro, 1), int(length), micro)
        if "steps" in self.draft.settings:
            self.draft.drop("data.epochs", "the number of steps is set")
        ratio = f"{ACTOR}.optim.lr_warmup_steps_ratio"
        if fraction := self.number(ratio, 0.0):
            self.draft.warm_up(fraction, ratio, self.shown(ratio))

    def _loss(self) -> None:
        mode = f"{ACTOR}.policy_loss.loss_mode"
        kind = self.text(mode, "vanilla").lower()
        if kind not in LOSSES:
            reason = f"not implemented; {', '.join(LOSSES)} are, or write one: docs/extending.md"
            self.draft.remark(self.shown(mode), reason, "loss")
        elif kind == "gspo":
            self.draft.put("algorithm.importance_sampling_level", "sequence", mode)
        elif kind != "vanilla":
            self.draft.put("algorithm.loss", LOSSES[kind], mode)
        if kind != "vanilla":
            self.draft.drop("algorithm.delta", f"no effect with {kind}")
        if kind == "sapo":  # whatever loss_agg_mode says
            self.draft.put("algorithm.loss_aggregation", "seq_mean_token_mean", mode)
        self.top_k(f"{ROLLOUT}.top_k")
        clip = f"{ACTOR}.clip_ratio"
        for key in ("algorithm.clip_low", "algorithm.clip_high"):
            if clip in self.options and key not in self.draft.settings:
                self.draft.put(key, self.text(clip), clip)
        coefficient = f"{ACTOR}.kl_loss_coef"
        if self.is_true(f"{ACTOR}.use_kl_loss"):
            self.draft.put("algorithm.beta", self.text(coefficient, "0.001"), coefficient)
        elif coefficient in self.options:
            self.draft.remark(self.shown(coefficient), "no effect without use_kl_loss")
        if "algorithm.adv_estimator" not in self.options:
            self.draft.remark("algorithm.adv_estimator=gae", "the default of verl, which needs a critic", "loss")
        if not {f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"} & self.options.keys():
            for key in ("model.lora_alpha", "model.lora_target_modules", "model.lora_merge"):
                self.draft.drop(key, "no effect without a LoRA rank")

    def _data(self) -> None:
        self.path("data.train_files", "data.path")
        self.path("data.val_files", "data.eval_path")
        prompt = self.text("data.prompt_key", "prompt")
        self.draft.put("data.columns", {prompt: "prompt"} if prompt != "prompt" else None, "data.prompt_key")
        self.draft.drop_evaluation(self.shown("trainer.test_freq"))

    def _engine(self) -> None:
        stale = "async_training.staleness_threshold"
        if stale in self.options:
            steps = max(math.ceil(self.number(stale, 1.0)), 1)
            self.draft.put("rollout.max_staleness", steps, stale, change="in whole steps, rounded up")
            for key in ("rollout.sleep", "backend.offload"):
                self.draft.drop(key, "engine and trainer run concurrently")
        engine = self.draft.settings.get("rollout.engine")
        if engine is None or engine.value == "vllm":
            self.draft.put("rollout.engine", "vllm", f"{ROLLOUT}.name")
            return
        for key in [key for key in self.draft.settings if key.startswith("rollout.options.")]:
            setting = self.draft.settings.pop(key)
            if not setting.is_default:
                self.draft.change(self.shown(setting.source), "an engine option: pass it to the server")
        sleep = self.draft.settings.pop("rollout.sleep", None)
        if engine.value == "sglang_server":
            self.draft.put("rollout.urls", ["http://127.0.0.1:30000"], "the address of your SGLang server")
            reason = "SGLang runs as a separate server, not on the trainer's GPUs: docs/engines.md"
            self.draft.change(self.shown(f"{ROLLOUT}.name"), reason)
        if sleep is not None and not sleep.is_default:
            self.draft.remark(self.shown(sleep.source), f"{engine.value} does not sleep")

    def _environment(self) -> None:
        option = f"{ROLLOUT}.agent.default_agent_loop"
        name = self.text(option, "single_turn_agent")
        if name == "tool_agent":
            tools = OPTIONS[f"{ROLLOUT}.multi_turn.tool_config_path"]
            self.draft.remark(self.shown(option), tools.note, tools.subject)
        elif name != "single_turn_agent":
            self.draft.environment(name, self.shown(option), option, may_split=True)

    def _reward(self) -> None:
        for prefix in ("reward.custom_reward_function", "custom_reward_function"):
            path = self.text(f"{prefix}.path")
            if path.lower() not in NEVER:
                name = self.text(f"{prefix}.name", "compute_score")
                function = f"verl:{PurePath(path).stem}:{name}"
                self.draft.put("reward.functions", [function], f"{prefix}.path; its folder must be on PYTHONPATH")
                return
        self.draft.put("reward.functions", [REWARD], "verl's default, by data_source; verl must be installed")
