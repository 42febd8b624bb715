"""All settings of a training run, by section; the docstring of a field is its help text everywhere.

Types and bounds stand with the fields, checks across fields in `checks.py`; `file.py` reads files and command lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BeforeValidator, Field, field_validator

from moe_replay.rollout.engine import Capture
from moe_replay.rollout.registry import ENGINES, engine_spec, trainable_engines
from moe_replay.routes.router_families import ROUTER_FAMILIES
from moe_replay.train.advantages import ADVANTAGES
from moe_replay.train.config.cluster_section import ClusterConfig
from moe_replay.train.config.data_sections import CheckpointConfig, DataConfig, EvalConfig, LogConfig, RewardConfig
from moe_replay.train.config.plugin_names import PluginName
from moe_replay.train.config.section import Limit, Section
from moe_replay.train.config.weights_section import WeightsConfig
from moe_replay.train.environments import ENVIRONMENTS
from moe_replay.train.losses.aggregation import Aggregation
from moe_replay.train.losses.registry import LOSSES
from moe_replay.train.losses.types import Correction, Level
from moe_replay.train.tool_calls import TOOL_FORMATS
from moe_replay.train.tools import TOOLS


def _finite_size(value: Any) -> Any:
    """Refuse integers beyond 64 bits: TOML has none, and files could not be read again."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must fit into 64 bits")
    return value


def _weight_families() -> Mapping[str, Any]:
    from moe_replay.megatron.weights import WEIGHT_MAPS  # imports torch, which settings do without

    return WEIGHT_MAPS


PROBE_TOLERANCE, QUANTISED_PROBE_TOLERANCE = 0.05, 0.2
Setting = Annotated[int | Annotated[float, AllowInfNan()] | bool | str, BeforeValidator(_finite_size)]
Dtype = Literal["float32", "bfloat16", "float16"]
ReplayMode = Literal["off", "r2", "r3", "auto"]
RouterFamilyChoice = Annotated[str | None, PluginName(lambda: ROUTER_FAMILIES, "router family", offered=tuple)]
WeightFamilyChoice = Annotated[str | None, PluginName(_weight_families, "weight family")]
EngineChoice = Annotated[str, PluginName(lambda: ENGINES, "engine", offered=trainable_engines)]
EnvironmentChoice = Annotated[str | None, PluginName(lambda: ENVIRONMENTS, "environment")]
ToolChoices = Annotated[tuple[str, ...], PluginName(lambda: TOOLS, "tool")]
ToolFormatChoice = Annotated[str, PluginName(lambda: TOOL_FORMATS, "format of tool calls")]
AdvantageChoice = Annotated[str, PluginName(lambda: ADVANTAGES, "advantage estimator")]
LossChoice = Annotated[str, PluginName(lambda: LOSSES, "policy loss")]


def replay_mode_name(value: Any) -> Any:
    """Return our name of a replay mode that is spelled as in ms-swift (R2, R3, disabled)."""
    name = value.lower() if isinstance(value, str) else value
    return "off" if name == "disabled" else name


class ModelConfig(Section):
    """The model that is trained."""

    path: str = ""
    """Folder or hub name of the model; empty: a tiny mixture of experts that comes with the library."""
    dtype: Dtype = "bfloat16"
    """Type that the trainer computes in."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model: its config, its layers, its tokenizer."""
    attention: str = "sdpa"
    """Attention of a Transformers model: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward, which saves memory."""
    router_family: RouterFamilyChoice = None
    """Routers of a model that this release does not know (fsdp): "module:name", or the model type of a known family."""
    reference: str | None = None
    """Folder of the reference model where algorithm.beta > 0; left out: the weights that the run starts with."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters; 0: all weights are trained."""
    lora_alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: they add alpha / rank times their product."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Layers that get an adapter, by their last name in the checkpoint (q_proj, down_proj, ...; those of experts too);
    also router, and all-linear: everything but embeddings, output projection and routers."""
    lora_merge: bool = True
    """Export merged weights beside the adapter; false: the adapter alone, as a PEFT folder."""


class BackendConfig(Section):
    """The backend that trains the model, and its parallel layout."""

    kind: Literal["fsdp", "megatron"] = "fsdp"
    """FSDP2 on a Transformers model, or Megatron-Core."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where the trainer computes; auto: the accelerator that torch finds, if there is one (npu: docs/npu.md)."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share a layer (megatron)."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that share the experts (megatron)."""
    expert_tensor_parallel: int | None = Field(None, ge=1)
    """Ranks that share one expert; left out: tensor_parallel (megatron)."""
    pipeline_parallel: int = Field(1, ge=1)
    """Stages that the layers are cut into (megatron)."""
    virtual_pipeline: int | None = Field(None, ge=2)
    """Chunks of layers in each stage, for the interleaved schedule (megatron)."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share a sequence (megatron)."""
    megatron: dict[str, Setting | list[str]] = Field({})
    """More of Megatron-Core's TransformerConfig, e.g. recompute_granularity = "selective"; lists are allowed."""
    weight_family: WeightFamilyChoice = None
    """How weights of Transformers map onto Megatron-Core; left out: by the model_type of the model (megatron)."""
    distributed_optimizer: bool = False
    """Spread the optimizer's state over data-parallel ranks (megatron)."""
    offload: bool = False
    """Keep the trainer in host memory while the engine samples: weights, gradients and optimizer state, of which the
    latter two are on the device in updates only."""
    rank_timeout_s: float = Field(600.0, ge=1)
    """Seconds without a sign of life after which another rank counts as lost. Sampling, loading and saving may take as
    long as they take; collectives of tensors have the timeout of their own backend."""

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the dense layers."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


class RolloutConfig(Section):
    """The engine that samples, and how much."""

    engine: EngineChoice = "vllm"
    """The engine that samples, in the trainer's process or on servers."""
    urls: tuple[str, ...] = ()
    """Addresses of the servers, e.g. http://10.0.0.2:8000; passwords in them are masked in the run's folder."""
    token: str | None = Field(None, repr=False)
    """Token of the servers, in a recipe only; left out: $MOE_REPLAY_TOKEN. It is never written to the run's folder."""
    min_servers: int | None = Field(None, ge=1)
    """Servers that must be reachable when the run starts, the others are warned about; left out: all of them."""
    engines_per_node: int | None = Field(None, ge=1, le=1024)
    """Engines that each machine of the trainer starts, in separate processes and on equal shares of its GPUs; left
    out: one engine, in the process of rank 0."""
    drivers: int = Field(1, ge=1, le=1024)
    """Processes on rank 0's machine that talk to the servers, play environments and build trajectories, each for a
    share of the groups; 1: rank 0's own. One takes some hundred sequences of 1k tokens a second."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the engine computes in; auto: the type of the weights on disk."""
    prompts_per_step: int = Field(8, ge=1)
    """Prompts of a step."""
    num_generations: int = Field(8, ge=2)
    """Samples of each prompt, the group that advantages are taken in."""
    max_tokens: int = Field(256, ge=1)
    """Tokens of a completion at most."""
    max_length: int | None = Field(None, ge=2)
    """Tokens of a sequence at most; left out: data.max_prompt_tokens and max_tokens of each turn."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probs of trainer and engine are both at this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1: from all of them."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest tokens; 0: from all of them."""
    sampling_mask: Literal["auto", "off"] = "auto"
    """What the trainer does about top_p and top_k. auto: it scores each token over the tokens that were left, which the
    engine returns; off: over the whole vocabulary, which biases importance ratios."""
    capture: Capture = "auto"
    """Which capture records routes (vllm). ours: in vLLM's worker; vllm: its own; checked: both, which must agree,
    slow; auto: ours unless other options of the engine forbid it."""
    reproducible: bool = True
    """Give every request a seed, so that a run can be repeated; on large GPU batches sampling is faster without."""
    max_staleness: int = Field(0, ge=0, le=1000)
    """Steps that samples may be behind the weights; more than 0: sampling and training overlap."""
    partial_rollout: bool = True
    """Let a weight update interrupt running samples, whose rest the new weights sample; false: it waits for them."""
    environment: EnvironmentChoice = None
    """Function that answers a completion, for rollouts of several turns."""
    tools: ToolChoices = ()
    """Python functions that the model may call, described to it by signature and docstring (environment "tools")."""
    tool_format: ToolFormatChoice = "hermes"
    """How the model writes calls of tools."""
    tool_timeout_s: Limit = Field(60.0, gt=0)
    """Seconds that the call of a tool may take; after that the model is told so."""
    max_turns: int = Field(8, ge=1)
    """Completions of a sequence at most, where there is an environment."""
    environment_timeout_s: Limit = Field(3600.0, gt=0)
    """Seconds that an environment may take for one sequence, its sampling included."""
    environment_threads: int = Field(1, ge=1, le=256)
    """Event loops for environments, each in a thread; sequences of one loop wait for one that blocks it."""
    sleep: bool = False
    """Free the engine's memory while training."""
    sleep_level: int = Field(2, ge=1, le=2)
    """1: an engine that sleeps keeps its weights in host memory; 2: it drops them, since it is sent new ones."""
    lora: bool = False
    """Send the LoRA adapter alone to the engine, which is started for it (vllm, vllm_server), not merged weights."""
    check_weights: bool = True
    """After each update of the weights, compare log-probs of engine and trainer on a probe."""
    probe_tolerance: Limit | None = Field(None, gt=0)
    """Median difference of log-probs on the probe above which the run stops; left out: 0.05, and 0.2 for an engine that
    quantises its weights (options.quantization)."""
    options: dict[str, Setting] = Field({})
    """More of the engine's own options, e.g. gpu_memory_utilization = 0.3."""

    @property
    def weights_tolerance(self) -> float:
        """The value of `probe_tolerance`; a default where it is left out."""
        default = QUANTISED_PROBE_TOLERANCE if self.options.get("quantization") else PROBE_TOLERANCE
        return default if self.probe_tolerance is None else self.probe_tolerance

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are sampled from a part of the distribution."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def replays_sampling_mask(self) -> bool:
        """Whether the engine returns the support of each token, and the trainer scores over it."""
        return self.is_truncated and self.sampling_mask == "auto"

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.prompts_per_step * self.num_generations

    @property
    def is_server(self) -> bool:
        """Whether the engine runs in other processes than the trainer's, reached by `urls`."""
        return engine_spec(self.engine).is_server


class ReplayConfig(Section):
    """The routes that the trainer's routers take."""

    mode: ReplayMode = "auto"
    """off: their own; r2: those of the old-log-prob pass; r3: those of the rollout; auto: by updates per rollout."""
    compare_every: int = Field(10, ge=0)
    """Score the batch without replay as well once in this many steps, to see what replay does; 0: never. Every tenth
    step adds about 2.5 % to scoring and updates, and less to a run (docs/training.md)."""
    observe: bool = True
    """Compare the rollout's routes with the trainer's own choice: routing/agreement, and a shift test each step."""
    first_ratio_tolerance: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """How far apart the log-probs of the old pass and of a step's first update may be, where routes are replayed;
    auto: not at all, or by the noise between two identical passes where kernels are not deterministic."""
    deterministic: bool = False
    """Use deterministic kernels in the trainer; on a GPU, Megatron-Core otherwise adds up experts in varying order."""

    @field_validator("mode", mode="before")
    @classmethod
    def _other_spellings(cls, value: Any) -> Any:
        return replay_mode_name(value)


class AlgorithmConfig(Section):
    """The policy loss."""

    updates_per_rollout: int = Field(1, ge=1)
    """Mini-batches that the samples of one rollout are split into, with one optimizer step on each
    (also steps_per_generation)."""
    num_iterations: int = Field(1, ge=1)
    """Passes over the samples of one rollout, each of updates_per_rollout optimizer steps."""
    baseline: AdvantageChoice = "std"
    """Advantage estimator of the samples of one prompt."""
    level: Level = "token"
    """Importance ratio of each token (GRPO) or of each sequence (GSPO)."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Limit = Field(0.2, ge=0)
    """The ratio is clipped above 1 + clip_high."""
    policy_loss: LossChoice = "clipped"
    """Policy loss."""
    loss: Aggregation = "dapo"
    """Mean over sequences (grpo), over all tokens (dapo), or sum over a constant (dr_grpo)."""
    beta: float = Field(0.0, ge=0)
    """Weight of the divergence from the reference model; 0: no reference model."""
    correction: Correction = "off"
    """Weights for samples that come from the engine and not from the old policy."""
    correction_low: float = Field(0.5, ge=0, le=1)
    """Ratios of old policy to rollout below are masked."""
    correction_high: Limit = Field(2.0, ge=1)
    """Ratios of old policy to rollout above are truncated or masked."""
    overlong_filter: bool = False
    """Take no loss on completions that were cut off at rollout.max_tokens."""
    dynamic_sampling: bool = False
    """Sample other prompts in place of groups in which all rewards are the same."""
    max_refills: int = Field(4, ge=1)
    """Rounds of such sampling in a step at most."""


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, ge=0, le=1e30)
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the run, if it does."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0."""
    max_grad_norm: Limit = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    max_bad_steps: int = Field(3, ge=0)
    """Consecutive updates that may be skipped for gradients that are not finite; one more stops the run."""


class BatchConfig(Section):
    """Division of sequences into micro-batches."""

    packed: bool = True
    """Sequences one after the other without padding; otherwise in rows, padded on the right."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Tokens of a micro-batch, padding included; a longer sequence has one for itself."""
    logit_chunk: int = Field(1024, ge=1)
    """Tokens whose logits are computed at once, in float32; the backward computes them again."""


class Sections(Section):
    """A training run: rollouts, rewards and policy updates, with the routes of the rollout replayed in the trainer."""

    output: Path | None = None
    """Folder of the run; left out: a new one, runs/<date-time>-<name>."""
    name: str = Field("run", min_length=1, pattern=r"^[\w.-]+$")
    """Name of the run."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything that is drawn: torch, numpy and Python too."""
    steps: int = Field(100, ge=1)
    """Steps; each is one rollout and its updates. With data.epochs the number follows from the data."""
    resume: bool = True
    """Resume from the newest checkpoint in the folder of the run, if there is one."""

    model: ModelConfig = ModelConfig()
    backend: BackendConfig = BackendConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    weights: WeightsConfig = WeightsConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    batch: BatchConfig = BatchConfig()
    reward: RewardConfig = RewardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def starts_servers(self) -> bool:
        """Whether the run starts engines in separate processes, which it reaches over HTTP."""
        return self.rollout.engines_per_node is not None or self.cluster.starts_engines

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the samples of one rollout, over all passes."""
        return self.algorithm.updates_per_rollout * self.algorithm.num_iterations

    @property
    def sequences_per_update(self) -> int:
        """Sequences that one optimizer step is taken on."""
        return self.rollout.sequences // self.algorithm.updates_per_rollout

    @property
    def max_length(self) -> int:
        """Tokens of a sequence at most."""
        turns = self.rollout.max_turns if self.rollout.environment else 1
        return self.rollout.max_length or self.data.max_prompt_tokens + self.rollout.max_tokens * turns
