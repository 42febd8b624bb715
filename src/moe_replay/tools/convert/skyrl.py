"""SkyRL: `python -m skyrl.train.entrypoints.main_base key=value ...` to a recipe, less its environment."""

from __future__ import annotations

from moe_replay.tools.convert.draft import Draft, torchrun
from moe_replay.tools.convert.hydra import HydraCommand, overrides_of
from moe_replay.train.config.foreign.options import Option
from moe_replay.train.config.foreign.skyrl import (
    ALGORITHM,
    CAPTURE,
    DEFAULTS,
    GROUPS,
    LOSSES,
    MEGATRON,
    OPTIONS,
    REPLAY,
)

ENTRY_POINTS = ("main_base", "main_base.py", "main_fully_async")
TRANSFORMER_CONFIG = f"{MEGATRON}.transformer_config_kwargs."


def from_skyrl(words: list[str]) -> Draft:
    overrides = overrides_of(words, ENTRY_POINTS, "SkyRL", "python -m skyrl.train.entrypoints.main_base")
    draft = Draft()
    _SkyRL(draft, [word.removeprefix("cfg.") for word in overrides]).convert()
    return draft


class _SkyRL(HydraCommand):
    """The conversion of one training command."""

    table, groups, all_defaults = OPTIONS, GROUPS, DEFAULTS

    def convert(self) -> None:
        ranks = self.text("trainer.placement.policy_num_gpus_per_node", "1")
        launch = torchrun(ranks, self.text("trainer.placement.policy_num_nodes", "1"))
        self.draft.header += ["Converted from SkyRL's `main_base`. Check it with --dry-run first.", "", f"  {launch}"]
        self.apply_options()
        self._replay()
        self.batches("trainer.train_batch_size", "trainer.policy_mini_batch_size")
        micro = "trainer.micro_train_batch_size_per_gpu"
        length = self.number("trainer.max_prompt_length", 512)
        length += self.number("generator.sampling_params.max_generate_length", 1024)
        if micro in self.options:
            self.draft.micro_batch(self.number(micro, 1), int(length), micro)
        self._loss()
        self.path("data.train_data", "data.path")
        self.path("data.val_data", "data.eval_path")
        self.draft.drop_evaluation(self.shown("trainer.eval.interval"))
        self.draft.put("rollout.engine", "vllm", "generator.inference_engine.backend", is_default=True)
        if "environment.env_class" not in self.options:
            self.draft.remark("environment.env_class=gsm8k", OPTIONS["environment.env_class"].note, "reward")
        self.log("trainer.logger")

    def option(self, name: str) -> Option | None:
        if name.startswith(TRANSFORMER_CONFIG):
            return Option(f"backend.megatron.{name.removeprefix(TRANSFORMER_CONFIG)}")
        return super().option(name)

    def _replay(self) -> None:
        """Set the replay mode: R3 if the engine returns routes and the trainer replays them."""
        is_captured, is_replayed = self.is_true(CAPTURE), self.is_true(REPLAY)
        if is_captured != is_replayed:
            lacking, present = (REPLAY, CAPTURE) if is_captured else (CAPTURE, REPLAY)
            self.draft.remark(self.shown(present), f"R3 needs {lacking}=true too", "replay")
            return
        source = f"{CAPTURE}, {REPLAY}"
        self.draft.put("replay.mode", "r3" if is_captured else "off", source, is_default=not is_captured)

    def _loss(self) -> None:
        name = f"{ALGORITHM}.policy_loss_type"
        kind = self.text(name, "regular")
        if kind not in LOSSES:
            self.draft.remark(self.shown(name), f"not implemented; {', '.join(LOSSES)} are", "loss")
        self.draft.put("algorithm.loss", LOSSES.get(kind), name)
        if kind == "gspo":
            self.draft.put("algorithm.importance_sampling_level", "sequence", name)
        if kind == "dual_clip":
            self.draft.put("algorithm.delta", self.text(f"{ALGORITHM}.clip_ratio_c", "3.0"), name)
        if kind == "cispo":
            for key, bound, default in (("clip_low", "low", "1.0"), ("clip_high", "high", "4.0")):
                self.draft.put(
                    f"algorithm.{key}", self.text(f"{ALGORITHM}.cispo.cispo_eps_clip_{bound}", default), name
                )
        if self.is_true(f"{ALGORITHM}.use_kl_loss"):
            coefficient = f"{ALGORITHM}.kl_loss_coef"
            is_default = not {coefficient, f"{ALGORITHM}.use_kl_loss"} & self.options.keys()
            self.draft.put("algorithm.beta", self.text(coefficient, "0.001"), coefficient, is_default=is_default)
        self.top_k("generator.sampling_params.top_k")
