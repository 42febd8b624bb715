"""All settings of a training run, by section; a field's docstring is its help text everywhere.

Types and bounds are declared with the fields, checks across fields are in `checks.py`, and `file.py` reads recipes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from moe_replay.engines.base import OLD_CAPTURE_NAMES, Capture
from moe_replay.engines.registry import ENGINES, engine_spec, trainable_engines
from moe_replay.routes.router_families import ROUTER_FAMILIES
from moe_replay.train.config.registries import (
    AdvantageChoice,
    Aggregation,
    Correction,
    EnvironmentChoice,
    ImportanceLevel,
    LossChoice,
    PluginName,
    RewardChoices,
    SinkChoices,
    ToolFormatChoice,
    TransportChoice,
    TurnAdvantages,
    WeightFamilyChoice,
)
from moe_replay.train.config.section import Limit, Section, Setting

LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a lower one above 0 is requested."""
PROBE_TOLERANCE, QUANTISED_PROBE_TOLERANCE = 0.05, 0.2

Dtype = Literal["float32", "bfloat16", "float16"]
ReplayMode = Literal["off", "r2", "r3", "auto"]
ReplayPolicyName = Literal["ids", "ids+gates", "margin", "drop", "shift"]

RouterFamilyChoice = Annotated[str | None, PluginName(lambda: ROUTER_FAMILIES, "router family", offered=tuple)]
_ENGINE_NAMES = {"vllm_server": "'rollout_server'", "plain_vllm_server": "'vllm_serve'"}
EngineChoice = Annotated[str, PluginName(lambda: ENGINES, "engine", offered=trainable_engines, renamed=_ENGINE_NAMES)]
ToolChoices = Annotated[tuple[str, ...], PluginName(dict, "tool")]


def replay_mode_name(value: Any) -> Any:
    """Return our name of a replay mode that is spelled as in ms-swift (R2, R3, disabled)."""
    name = value.lower() if isinstance(value, str) else value
    return "off" if name == "disabled" else name


class ModelConfig(Section):
    """The policy model, the reference model and LoRA."""

    path: str = ""
    """Model folder or Hub name; empty: a tiny built-in MoE."""
    dtype: Dtype = "bfloat16"
    """Compute dtype of the trainer."""
    base_dtype: Literal["fp8"] | None = None
    """With lora_rank, on one rank (fsdp): fp8 keeps frozen weights of linear layers and experts as float8_e4m3fn with a
    scale per block of 128 x 128, in half the memory; default: as dtype."""
    trust_remote_code: bool = False
    """Allow Python code from the model repository (config, modeling, tokenizer) to run."""
    attn_implementation: str = "auto"
    """auto: the fastest of varlen, flex and blocks, sequence by sequence (fsdp); or of Transformers: sdpa, eager."""
    compile: bool | Literal["auto"] = "auto"
    """Compile decoder layers with torch.compile (fsdp); auto: on CUDA."""
    gradient_checkpointing: bool | Literal["auto", "offload"] = "auto"
    """Recompute activations in the backward pass, which saves memory and slows updates by about a quarter. auto: on a
    GPU, unless 15 % of its memory stays free without, by the estimate of moe-replay plan; never on a CPU. offload
    (fsdp): true, and what each layer was given waits in host memory."""
    router_family: RouterFamilyChoice = None
    """Router family of an unsupported model type (fsdp): "module:name", or the model type of a supported family."""
    reference: str | None = None
    """Folder of the reference model when algorithm.beta > 0; default: the initial weights of the policy."""
    lora_rank: int = Field(0, ge=0)
    """LoRA rank; 0: full fine-tuning."""
    lora_alpha: float = Field(32.0, gt=0)
    """LoRA alpha; adapters are scaled by alpha / rank."""
    lora_target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Modules with a LoRA adapter, by the last part of their checkpoint name (q_proj, ...; also in experts). "router":
    routers; "all-linear": everything except embeddings, output projection and routers."""
    lora_merge: bool = True
    """Export merged weights in addition to the adapter; false: only the adapter, as a PEFT folder."""


class BackendConfig(Section):
    """The training backend and its parallelism."""

    kind: Literal["fsdp", "megatron"] = "fsdp"
    """fsdp: FSDP2 on a Transformers model; megatron: Megatron-Core."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Device of the trainer; auto: the accelerator torch detects, else the CPU (npu: docs/routers.md)."""
    tensor_parallel: int = Field(1, ge=1)
    """Tensor parallel size (megatron)."""
    expert_parallel: int = Field(1, ge=1)
    """Expert parallel size: ranks that the experts of a layer are divided among."""
    expert_tensor_parallel: int | None = Field(None, ge=1)
    """Tensor parallel size of the experts; default: tensor_parallel (megatron)."""
    pipeline_parallel: int = Field(1, ge=1)
    """Pipeline parallel size (megatron)."""
    virtual_pipeline: int | None = Field(None, ge=2)
    """Model chunks per pipeline stage, for the interleaved schedule (megatron)."""
    context_parallel: int = Field(1, ge=1)
    """Context parallel size: ranks that share a sequence; on fsdp best a divisor of the model's attention heads."""
    megatron: dict[str, Setting | list[str]] = Field({})
    """Additional TransformerConfig fields of Megatron-Core, e.g. recompute_granularity = "selective", or lists."""
    weight_family: WeightFamilyChoice = None
    """Mapping between Transformers and Megatron-Core weights; default: by model_type (megatron)."""
    distributed_optimizer: bool = False
    """Shard optimizer states across data-parallel ranks (megatron)."""
    offload: bool = False
    """Offload weights to host memory during rollouts, gradients and optimizer states whenever there is no update."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free gathered weights after each layer (fsdp). auto: keep them up to the optimizer step if GPU memory allows."""
    heartbeat_timeout_s: float = Field(600.0, ge=1)
    """Seconds after which a silent rank is dead; sampling, loading, saving and tensor collectives may take longer."""

    @property
    def model_parallel(self) -> int:
        """Ranks per copy of the dense layers."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


class DataConfig(Section):
    """Training and evaluation prompts."""

    path: str = ""
    """A .jsonl or .parquet file, a datasets folder, or a Hub dataset name; empty: arithmetic for the built-in model."""
    subset: str | None = None
    """Subset (configuration) of a Hub dataset."""
    split: str = Field("train", min_length=1)
    """Split of a Hub dataset or datasets folder."""
    columns: dict[str, str] = Field({})
    """Columns to rename, e.g. problem = "prompt"; prompts are in the column prompt or messages."""
    chat_template: Literal["auto", "none"] = "auto"
    """Prompts that are text. auto: as a user turn in the model's chat template, if it has one; none: as they are."""
    system: str = ""
    """System prompt of prompts without one, in the model's chat template."""
    max_prompt_length: int = Field(512, ge=1)
    """Maximum prompt length in tokens; longer prompts are dropped."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch."""
    epochs: float | None = Field(None, gt=0, le=1e6)
    """Epochs over the prompts, possibly fractional; replaces `steps`."""
    eval_path: str | None = None
    """Evaluation prompts, in the formats of `path`."""
    eval_split: str | None = Field(None, min_length=1)
    """Evaluation split; default: `split`."""


class RolloutConfig(Section):
    """The rollout engine and sampling."""

    engine: EngineChoice = "vllm"
    """Rollout engine, in the trainer process or on servers."""
    urls: tuple[str, ...] = ()
    """Server URLs, e.g. http://10.0.0.2:8000; passwords in them are masked in the run folder."""
    token: str | None = Field(None, repr=False)
    """Access token of the servers, in a recipe only; default: $MOE_REPLAY_TOKEN. Never written to the run folder."""
    min_servers: int | None = Field(None, ge=1)
    """Servers that must be reachable at startup; the others only cause a warning. Default: all."""
    engines_per_node: int | None = Field(None, ge=1, le=1024)
    """Engines on each trainer node, in processes that split its GPUs evenly; default: one in the process of rank 0."""
    workers: int = Field(1, ge=1, le=1024)
    """Rollout worker processes on the host of rank 0, which send requests, run environments and build trajectories; 1:
    rank 0 itself. One worker handles a few hundred sequences of 1k tokens per second."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype of the engine; auto: that of the checkpoint."""
    prompts_per_step: int = Field(8, ge=1)
    """Prompts per step."""
    num_generations: int = Field(8, ge=2)
    """Completions per prompt; advantages are computed within this group."""
    max_tokens: int = Field(256, ge=1)
    """Maximum completion length in tokens."""
    max_length: int | None = Field(None, ge=2)
    """Maximum sequence length in tokens; default: data.max_prompt_length + max_tokens per turn."""
    temperature: float = Field(1.0, ge=LOWEST_TEMPERATURE)
    """Sampling temperature, at least 0.01; trainer and engine log-probs are both computed at this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling threshold; 1: off."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0: off."""
    sampling_mask: Literal["auto", "off"] = "auto"
    """Handling of top_p and top_k in the trainer. auto: normalise log-probs over the tokens that could be sampled, as
    returned by the engine; off: over the whole vocabulary, which biases importance ratios."""
    capture: Capture = "auto"
    """Route capture (vllm). kv_slot: ours, in vLLM's worker; vllm: its own; cross_check: both, which must agree (slow);
    auto: kv_slot unless other engine options rule it out; checked: auto with a self-test at the start."""
    reproducible: bool | Literal["auto"] = "auto"
    """Seed every request so that runs are repeatable; auto: on a CPU. On a GPU kernels depend on the batch, and vLLM
    launches a kernel for each sequence with a seed in every step."""
    max_staleness: int = Field(0, ge=0, le=1000)
    """Maximum age of samples in steps; above 0, sampling and training overlap."""
    partial_rollout: bool = True
    """Interrupt running samples for a weight update and continue them with the new weights; false: wait for them."""
    environment: EnvironmentChoice = None
    """Function that responds to completions, for multi-turn rollouts."""
    tools: ToolChoices = ()
    """Python functions the model may call, described to it by signature and docstring (environment "tools")."""
    tool_format: ToolFormatChoice = "hermes"
    """Tool call format of the model."""
    tool_timeout_s: Limit = Field(60.0, gt=0)
    """Timeout of a tool call in seconds; the model is told about it."""
    max_turns: int = Field(8, ge=1)
    """Maximum turns per episode."""
    environment_timeout_s: Limit = Field(3600.0, gt=0)
    """Timeout of an episode in seconds, sampling included."""
    environment_threads: int = Field(1, ge=1, le=256)
    """Threads that run environments, each with an event loop; a blocking environment stalls only its own loop."""
    sleep: bool = False
    """Free the engine's GPU memory during training."""
    sleep_level: int = Field(2, ge=1, le=2)
    """Sleep level as in vLLM. 1: offload weights to host memory; 2: discard them, since an update follows."""
    lora: bool = False
    """Send only the LoRA adapter to the engine instead of merged weights (vllm, rollout_server)."""
    share_weights: bool = True
    """With lora and one rank: the trainer computes with the memory of vLLM's frozen weights."""
    check_weights: bool = True
    """After each weight update, compare engine and trainer log-probs on a probe prompt."""
    probe_tolerance: Limit | None = Field(None, gt=0)
    """Maximum median log-prob difference on the probe; the run stops above it. Default: 0.05, or 0.2 if the engine
    quantises its weights (options.quantization)."""
    options: dict[str, Setting] = Field({})
    """Additional engine options, e.g. gpu_memory_utilization = 0.3."""

    @field_validator("capture", mode="before")
    @classmethod
    def _renamed_capture(cls, value: Any) -> Any:
        if isinstance(value, str) and value in OLD_CAPTURE_NAMES:
            raise ValueError(f'"{value}" is now "{OLD_CAPTURE_NAMES[value]}"')
        return value

    @property
    def weights_tolerance(self) -> float:
        default = QUANTISED_PROBE_TOLERANCE if self.options.get("quantization") else PROBE_TOLERANCE
        return default if self.probe_tolerance is None else self.probe_tolerance

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0

    @property
    def replays_sampling_mask(self) -> bool:
        """Whether the engine returns the sampling mask of each token, and the trainer scores over it."""
        return self.is_truncated and self.sampling_mask == "auto"

    @property
    def sequences(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def is_server(self) -> bool:
        """Whether the engine is reached by `urls`."""
        return engine_spec(self.engine).is_server


class WeightSyncConfig(Section):
    """Weight updates from the trainer to the engine (docs/engines.md)."""

    transport: TransportChoice = "auto"
    """Weight transport. auto: ipc if trainer and engine share GPUs, nccl between different GPUs, else http."""
    chunk_mib: int = Field(512, ge=1)
    """Buffer size of ipc and nccl in MiB; larger tensors get a larger buffer."""
    timeout_s: float = Field(600.0, gt=0)
    """Timeout per chunk in seconds (ipc, nccl); the update then fails."""


class ReplayConfig(Section):
    """Routing replay in the trainer."""

    mode: ReplayMode = "auto"
    """Routes the trainer uses. off: its own; r2: of the old-log-prob pass; r3: of the rollout; auto: by updates."""
    policy: ReplayPolicyName = "ids"
    """How recorded routes are used (docs/training.md). ids: their experts, with current gate weights; ids+gates: gate
    weights too, with r2; margin: an expert only if the router prefers another by at most replay.margin; drop: as ids,
    and tokens without a route leave the loss, with r3; shift: as the mode, and importance ratios are scaled down where
    routers have moved since the old-log-prob pass."""
    margin: Annotated[float, Field(ge=0)] | None = None
    """Largest difference between logarithms of routing weights, of policy = margin: 0.1 is about 10 %."""
    shift_floor: float = Field(0.1, gt=0, le=1)
    """Smallest factor of policy = shift."""
    score_native_every: int = Field(10, ge=0)
    """Every N steps, also score the batch without replay to measure its effect; 0: never. Every tenth step costs about
    3 % of scoring and updates (docs/training.md)."""
    observe: bool = True
    """Compare rollout routes with the trainer's own (routing/agreement), and test for shifted routes in each step."""
    first_ratio_tolerance: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Maximum log-prob difference between the old pass and the first update of a step, with replay; auto: 0, or the
    noise between two identical passes if kernels are not deterministic."""
    deterministic: bool = False
    """Use deterministic kernels in the trainer; without, Megatron-Core sums experts in varying order on GPUs."""

    @field_validator("mode", mode="before")
    @classmethod
    def _other_spellings(cls, value: Any) -> Any:
        return replay_mode_name(value)


class ServerChecksConfig(Section):
    """Limits on what rollout servers report, each per server and step; beyond them a server is not believed."""

    action: Literal["quarantine", "stop", "warn"] = "quarantine"
    """What happens to a server beyond a limit. quarantine: it is not used again and its samples are not trained on; the
    run stops if none is left or the engine is in the trainer process; stop: the run stops; warn: it is logged once."""
    min_covered: float = Field(0.99, ge=0, le=1)
    """Minimum fraction of sampled tokens with routes, where the rollout's are replayed (r3)."""
    max_k3: Limit = Field(0.5, gt=0)
    """Maximum k3 KL between the server's log-probs and the trainer's."""
    max_mean_ratio: Limit = Field(1.2, gt=1)
    """Maximum mean ratio of the trainer's probabilities to the server's, and of its inverse; 1 for log-probs of the
    distribution that was sampled from, at any staleness."""
    min_ess: float = Field(0.01, ge=0, le=1)
    """Minimum effective sample size, as a fraction of tokens."""


class AlgorithmConfig(Section):
    """Advantages and policy loss."""

    updates_per_rollout: int = Field(1, ge=1)
    """Mini-batches per rollout, with one optimizer step each (steps_per_generation in ms-swift)."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each rollout, with updates_per_rollout optimizer steps each."""
    advantage: AdvantageChoice = "grpo"
    """Advantage estimator."""
    advantage_turns: TurnAdvantages = "episode"
    """Advantages of the samples of an episode whose environment rewrites its history. episode: the same for all; last:
    only the last sample is trained on; discounted: times advantage_discount for each sample that follows."""
    advantage_discount: float = Field(0.95, gt=0, le=1)
    """Discount per sample of advantage_turns = "discounted"."""
    importance_sampling_level: ImportanceLevel = "token"
    """Importance ratio per token (GRPO) or per sequence (GSPO)."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """Lower clip range: ratios are clipped at 1 - clip_low."""
    clip_high: Limit = Field(0.2, ge=0)
    """Upper clip range: ratios are clipped at 1 + clip_high."""
    delta: Limit = Field(math.inf, gt=1)
    """Upper bound of the ratio for negative advantages too: two-sided clipping of ppo_clip (clip_ratio_c in verl)."""
    loss: LossChoice = "ppo_clip"
    """Policy loss."""
    tau_pos: float = Field(1.0, gt=0)
    """Temperature of the gate of sapo for positive advantages."""
    tau_neg: float = Field(1.05, gt=0)
    """Temperature of the gate of sapo for other advantages."""
    loss_aggregation: Aggregation = "token_mean"
    """Aggregation of token losses in a mini-batch. token_mean: mean over all tokens (DAPO); seq_mean_token_mean: mean
    per sequence, then over sequences (GRPO); seq_mean_token_sum_norm: sum / (sequences x rollout.max_tokens)
    (Dr. GRPO)."""
    old_logprobs: Literal["auto", "always", "rollout"] = "auto"
    """Source of old log-probs. auto: the first update's own forward, and a pass before it for later mini-batches;
    always: a separate pass for all; rollout: the engine's (verl's bypass mode)."""
    beta: float = Field(0.0, ge=0)
    """KL coefficient; 0: no reference model is loaded."""
    rollout_correction: Correction = "off"
    """Importance sampling correction for the mismatch between rollout engine and old policy."""
    rollout_correction_low: float = Field(0.5, ge=0, le=1)
    """Lower bound of the ratio old policy / rollout; tokens below are masked."""
    rollout_correction_high: Limit = Field(2.0, ge=1)
    """Upper bound of the ratio old policy / rollout; tokens above are truncated or masked."""
    overlong_filter: bool = False
    """Exclude completions truncated at rollout.max_tokens from the loss."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by sampling other prompts."""
    max_refills: int = Field(4, ge=1)
    """Maximum rounds of dynamic sampling per step."""


class OptimConfig(Section):
    """AdamW and the learning rate schedule."""

    lr: float = Field(1e-6, ge=0, le=1e30)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam betas."""
    eps: float = Field(1e-8, gt=0)
    """Adam epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule; linear and cosine decay to 0 at the end of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    max_grad_norm: Limit = Field(1.0, gt=0)
    """Gradient clipping norm."""
    max_skipped_updates: int = Field(3, ge=0)
    """Maximum consecutive updates skipped for non-finite gradients; one more stops the run."""


class BatchConfig(Section):
    """Micro-batches."""

    packed: bool = True
    """Pack sequences without padding; false: one sequence per row, right-padded."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Maximum tokens per micro-batch, padding included, shared ones once; a longer sequence has its own micro-batch."""
    share_prompts: bool | Literal["auto"] = "auto"
    """Compute tokens that samples of a group begin with once per micro-batch (fsdp); auto: where the model allows."""
    balance: Literal["tokens", "experts"] = "tokens"
    """Divide samples into micro-batches by tokens, or also by the load of expert-parallel ranks (docs/training.md)."""
    logit_chunk: int = Field(1024, ge=1)
    """Tokens per chunk of float32 logits, a quarter of a compiled chunk; the backward pass recomputes them."""


class RewardConfig(Section):
    """Reward functions."""

    functions: RewardChoices = Field(("math_verify",), min_length=1)
    """Reward functions; the reward is their weighted sum."""
    weights: tuple[float, ...] | None = None
    """Weights of the functions; default: 1 each."""
    workers: int = Field(4, ge=0, le=1024)
    """Reward worker processes; 0: threads of the trainer process, for functions that share state."""
    timeout_s: Limit = Field(60.0, gt=0)
    """Timeout of a reward function per sample, in seconds."""
    on_timeout: Literal["error", "unscored"] | None = None
    """Handling of a sample whose reward times out or kills its process. `error`: stop the run; `unscored`: exclude it
    from training and count it in `reward/timeouts`. Default: `unscored` for built-in rewards, else `error`."""


class CheckpointConfig(Section):
    """Checkpoints: interval, content and retention."""

    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    at_end: bool = True
    """Save at the end of the run or when it is interrupted. With `every = 0`, false saves nothing."""
    keep: int = Field(2, ge=1)
    """Number of latest checkpoints to keep."""
    asynchronous: bool = True
    """Write checkpoints in the background; a step waits only for the copy to host memory."""
    export: bool = True
    """Also save the weights as a Transformers folder."""
    push_to_hub: str = Field("", pattern=r"^([\w.-]+/)?[\w.-]*$")
    """Hugging Face Hub repository (owner/name) to push the export to when the run is complete; "": none."""
    hub_private: bool = True
    """Create the Hub repository as private."""
    optimizer: bool = True
    """Include optimizer states; without, checkpoints are smaller and a resumed run starts with a fresh optimizer."""


class EvalConfig(Section):
    """Evaluation on held-out prompts."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: never."""
    prompts: int = Field(64, ge=1)
    """Maximum number of evaluation prompts."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature, at least 0.01; 0: greedy."""

    @field_validator("temperature")
    @classmethod
    def _not_too_low(cls, value: float) -> float:
        if 0 < value < LOWEST_TEMPERATURE:
            raise ValueError(f"should be 0, or at least {LOWEST_TEMPERATURE}")
        return value


class LogConfig(Section):
    """Metric sinks and logged samples."""

    tensorboard: bool = False
    """Log metrics to TensorBoard files in the run folder."""
    wandb: bool = False
    """Log metrics to Weights & Biases."""
    mlflow: bool = False
    """Log metrics to MLflow at $MLFLOW_TRACKING_URI."""
    trackio: bool = False
    """Log metrics to Trackio, a local dashboard, in $TRACKIO_DIR."""
    sinks: SinkChoices = ()
    """Additional metric sinks."""
    project: str = "moe-replay"
    """Weights & Biases or Trackio project, MLflow experiment."""
    traces: int = Field(0, ge=0)
    """Samples per step whose route traces are saved in the run folder."""
    completions: bool = False
    """Save prompts and completions with rewards and advantages as parquet in the run folder."""
    num_completions_to_print: int = Field(4, ge=0)
    """Completions per step to print on the console, best and worst, if `completions` is set; 0: none."""
    report: bool = True
    """Write report.html at the end of `moe-replay train`; `moe-replay report` writes it at any time."""

    @property
    def enabled_sinks(self) -> tuple[str, ...]:
        """Names of all metric sinks of the run, metrics.jsonl first."""
        enabled = [name for name in ("tensorboard", "wandb", "mlflow", "trackio") if getattr(self, name)]
        return tuple(dict.fromkeys(["jsonl", *enabled, *self.sinks]))


class ClusterConfig(Section):
    """The launcher, and the nodes of trainer and engines."""

    launcher: Literal["torchrun", "ray"] = "torchrun"
    """torchrun: ranks are started by the launcher of this command; ray: this command starts all ranks and engines as
    Ray actors (docs/cluster.md), sized by the other keys of this section."""
    address: str | None = None
    """Ray cluster to join, e.g. 10.0.0.1:6379 or auto; default: $RAY_ADDRESS, else a new cluster on this host."""
    trainer_nodes: int = Field(1, ge=1, le=65536)
    """Trainer nodes."""
    ranks_per_node: int = Field(1, ge=1, le=1024)
    """Ranks per trainer node, with one GPU each unless backend.device = cpu."""
    engines: int | None = Field(None, ge=1, le=65536)
    """Total rollout engines, each on the GPUs that rollout.options requests (tensor_parallel_size x data_parallel_size
    x pipeline_parallel_size); default: none are started, and [rollout] locates the engine."""
    placement: Literal["separate", "colocated"] = "separate"
    """separate: engines have their own GPUs; colocated: they share the trainer's GPUs, evenly across its nodes."""
    cpus_per_rank: int = Field(1, ge=1, le=65536)
    """CPU cores, and threads, per rank."""
    cpus_per_engine: int = Field(1, ge=1, le=65536)
    """CPU cores, and threads, per engine."""
    max_restarts: int = Field(3, ge=0)
    """Maximum restarts of the ranks from the latest checkpoint after losing a rank or node, and of each engine."""
    node_timeout_s: float = Field(300.0, gt=0)
    """Timeout for free nodes in seconds. At startup the run then fails; after losing a node it continues without."""

    @property
    def ranks(self) -> int:
        return self.trainer_nodes * self.ranks_per_node

    @property
    def starts_engines(self) -> bool:
        return self.launcher == "ray" and self.engines is not None


class Sections(Section):
    """A training run: rollouts, rewards and policy updates, with the rollout's routes replayed in the trainer."""

    output: Path | None = None
    """Run folder; default: a new one, runs/<date-time>-<name>."""
    name: str = Field("run", min_length=1, pattern=r"^[\w.-]+$")
    """Run name."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Random seed of the run, also for torch, numpy and Python."""
    steps: int = Field(100, ge=1)
    """Training steps, each one rollout and its updates; data.epochs replaces it."""
    resume: bool = True
    """Resume from the latest checkpoint in the run folder, if any."""

    model: ModelConfig = ModelConfig()
    backend: BackendConfig = BackendConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    replay: ReplayConfig = ReplayConfig()
    server_checks: ServerChecksConfig = ServerChecksConfig()
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
        """Whether the run starts engines in separate processes, reached over HTTP."""
        return self.rollout.engines_per_node is not None or self.cluster.starts_engines

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model besides the policy; without its adapters that can be the reference."""
        return self.algorithm.beta > 0 and not (self.model.lora_rank and self.model.reference is None)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per rollout, over all passes."""
        return self.algorithm.updates_per_rollout * self.algorithm.num_iterations

    @property
    def sequences_per_update(self) -> int:
        return self.rollout.sequences // self.algorithm.updates_per_rollout

    @property
    def max_length(self) -> int:
        turns = self.rollout.max_turns if self.rollout.environment else 1
        return self.rollout.max_length or self.data.max_prompt_length + self.rollout.max_tokens * turns
