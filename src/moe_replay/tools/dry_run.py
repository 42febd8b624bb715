"""What a training configuration amounts to: loads no weights, starts no engine, writes nothing."""

from __future__ import annotations

from math import ceil, lcm
from pathlib import Path
from typing import Any, NamedTuple

from moe_replay.cluster.capacity import check_capacity, demand_of
from moe_replay.cluster.nodes import nodes_of
from moe_replay.errors import MoeReplayError, UnsupportedRouterError
from moe_replay.rollout.engine import devices_per_engine
from moe_replay.routes.layer_rules import setting
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology, text_config
from moe_replay.tools.memory_check import bytes_on_cpus, check_memory
from moe_replay.tools.model_config import ModelConfigError, model_config
from moe_replay.tools.plan import Dimensions, Parallel, Work, plan_layout
from moe_replay.tools.plan.text import plan_text
from moe_replay.train import preflight
from moe_replay.train.backends.lora_targets import targets_of
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import BackendConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import read_rows
from moe_replay.train.engines import check_adapter, check_length
from moe_replay.train.hub_data import is_hub_name
from moe_replay.train.inputs import check_names, epochs_in_words
from moe_replay.train.replay_mode import asks_for_routes, plan_replay
from moe_replay.utils.device import accelerator
from moe_replay.utils.secrets import mask_passwords


def dry_run(config: TrainConfig, ranks: int | None = None) -> str:
    """Return the report, or raise for an impossible layout. `ranks` None: the fewest ranks that the layout allows."""
    check_names(config)
    replay = plan_replay(config)
    parallel = parallel_of(config.backend, ranks)
    lines = [
        f"replay   {replay.mode}: {replay.reason}",
        f"policy   {_policy(config, parallel, ranks)}",
        f"rollout  {_rollout(config)}",
        f"step     {_step(config)}",
        f"tokens   {_tokens(config)}",
        f"prompts  {_prompts(config)}",
    ]
    try:
        model = _model(config.model.path)
        check_length(config, setting(text_config(model), "max_position_embeddings"))
        topology = MoeTopology.from_config(model, load_router_family(config.model.router_family))
    except ModelConfigError as unreadable:
        return "\n".join([*lines, "", f"The layout is not checked: {unreadable}"])
    except UnsupportedRouterError as unsupported:
        if replay.mode != "off":
            raise
        return "\n".join([*lines, "", f"The layout is not checked: {unsupported}"])
    if config.model.lora_rank:
        targets = targets_of(model, config.model)
        if config.rollout.lora:
            check_adapter(targets)
    plan = plan_layout(
        topology,
        parallel,
        work_of(config, parallel),
        dimensions=Dimensions.from_config(model),
        routes_travel=asks_for_routes(config),
    )
    return "\n".join([*lines, "", "If every sequence has its maximum length:", plan_text(plan)])


class Readiness(NamedTuple):
    """Findings about a run on this machine before it starts.

    memory     what it will hold of the memory, or why that is not known
    problems   what would stop it before its first step: packages, engine, data, rewards, memory, the cluster
    cluster    how it fits into the cluster; empty without one
    """

    memory: str
    problems: list[MoeReplayError]
    cluster: str = ""


def readiness(config: TrainConfig, ranks: int | None = None) -> Readiness:
    """Check everything that can be checked without loading weights."""
    problems = preflight.find_problems(config)
    if config.cluster.kind == "ray":
        return _readiness_on_ray(config, problems)
    if not config.model.path:
        return Readiness("little: the embedded default model", problems)
    try:
        model = _model(config.model.path)
        if config.backend.device == "auto" and accelerator() is None:
            return Readiness("not checked: this machine has no GPU; see `moe-replay plan --recipe`", problems)
        memory = check_memory(config, model, parallel_of(config.backend, ranks).world)
    except UnsupportedRouterError:
        memory = "not checked: a dense model"
    except MoeReplayError as problem:
        return Readiness("see below", [*problems, problem])
    return Readiness(memory, problems)


def _readiness_on_ray(config: TrainConfig, problems: list[MoeReplayError]) -> Readiness:
    memory = "not checked: on the cluster's machines; see `moe-replay plan --recipe`"
    try:
        return Readiness(memory, problems, cluster_fit(config))
    except MoeReplayError as problem:
        return Readiness(memory, [*problems, problem], "see below")


def cluster_fit(config: TrainConfig) -> str:
    """Return how a run fits into its Ray cluster; raise if it does not, or if there is none."""
    nodes = nodes_of(config)
    return check_capacity(nodes, demand_of(config, nodes, *_host_memory(config)))


def _host_memory(config: TrainConfig) -> tuple[float, float]:
    """Return the bytes of host memory of a rank and of an engine that compute on CPUs; 0 where they do not."""
    if config.backend.device != "cpu" or not config.model.path:
        return 0, 0
    try:
        return bytes_on_cpus(config, _model(config.model.path), config.cluster.ranks)
    except (ModelConfigError, UnsupportedRouterError):
        return 0, 0


def parallel_of(backend: BackendConfig, ranks: int | None) -> Parallel:
    """Return the parallel layout of a backend on `ranks` ranks, or on the fewest possible."""
    tensor_and_context = backend.tensor_parallel * backend.context_parallel
    experts = backend.expert_parallel * (backend.expert_tensor_parallel or backend.tensor_parallel)
    if ranks is not None and ranks % backend.model_parallel:
        raise ConfigError(
            "the number of ranks does not fit the parallel sizes",
            expected=f"a multiple of {backend.model_parallel}, which is backend.tensor_parallel * pipeline_parallel * "
            "context_parallel",
            found=f"{ranks} ranks",
        )
    fewest = lcm(tensor_and_context, experts) // tensor_and_context
    return Parallel(
        tp=backend.tensor_parallel,
        cp=backend.context_parallel,
        pp=backend.pipeline_parallel,
        vpp=backend.virtual_pipeline or 1,
        dp=fewest if ranks is None else ranks // backend.model_parallel,
        ep=backend.expert_parallel,
        etp=backend.expert_tensor_parallel,
        sp=bool(backend.megatron.get("sequence_parallel", True)),
    )


def work_of(config: TrainConfig, parallel: Parallel) -> Work:
    """Return the largest possible step: all sequences at their maximum length, evenly divided."""
    on_a_rank = ceil(config.rollout.sequences / parallel.dp)
    micro_batches = ceil(on_a_rank / _longest_in_micro_batch(config))
    multiple = parallel.pp if parallel.vpp > 1 else 1
    in_micro_batch = ceil(on_a_rank / micro_batches)
    return Work(
        lengths=(config.max_length,) * in_micro_batch,
        micro_batches=ceil(micro_batches / multiple) * multiple,
        packed=config.batch.packed,
        prompt=min(config.data.max_prompt_tokens, config.max_length - 1),
        group=config.rollout.num_generations,
    )


def _longest_in_micro_batch(config: TrainConfig) -> int:
    return min(max(config.batch.tokens_per_micro_batch // config.max_length, 1), config.rollout.sequences)


def _model(path: str) -> Any:
    if path:
        return model_config(path)
    from moe_replay.demo.model import build_model
    from moe_replay.demo.settings import FULL

    return build_model(FULL).config


# ---- lines -----------------------------------------------------------------------------------------------------------


def _policy(config: TrainConfig, parallel: Parallel, ranks: int | None) -> str:
    adapters = f"LoRA of rank {config.model.lora_rank} on {', '.join(config.model.lora_targets)}"
    weights = adapters if config.model.lora_rank else "all weights"
    fewest = "" if ranks is not None else ", the fewest for this layout"
    model = config.model.path or "the embedded default model"
    on_ranks = f"{parallel.world} rank{'s' * (parallel.world > 1)}{fewest}"
    return f"{model}: {weights} in {config.model.dtype}, {config.backend.kind} on {on_ranks}"


def _rollout(config: TrainConfig) -> str:
    rollout = config.rollout
    where = f" at {mask_passwords(', '.join(rollout.urls))}" if rollout.urls else ""
    stale = f", up to {rollout.max_staleness} steps ahead of the trainer" if rollout.max_staleness else ""
    cut = [f"top_p {rollout.top_p:g}"] * (rollout.top_p < 1) + [f"top_k {rollout.top_k}"] * (rollout.top_k > 0)
    mask = f" (sampling mask {'replayed' if rollout.replays_sampling_mask else 'off: ratios are biased'})" * bool(cut)
    where = where or _engines(config)
    return f"{', '.join([f'{rollout.engine}{where}', f'temperature {rollout.temperature:g}', *cut])}{mask}{stale}"


def _engines(config: TrainConfig) -> str:
    """Say how many engines a run starts and where, if they are in separate processes."""
    rollout, cluster = config.rollout, config.cluster
    if not config.starts_servers:
        return ""
    devices = devices_per_engine(rollout.options)
    each = f", {devices} GPUs each" if devices > 1 else ""
    if not cluster.starts_engines:
        return f" ({rollout.engines_per_node} on every machine of the trainer{each})"
    where = f"on the trainer's {cluster.trainer_nodes}" if cluster.placement == "colocated" else "on GPUs of their own"
    machines = f" machine{'s' * (cluster.trainer_nodes > 1)}" if cluster.placement == "colocated" else ""
    return f" ({cluster.engines} {where}{machines}{each})"


def _step(config: TrainConfig) -> str:
    rollout, updates, passes = config.rollout, config.algorithm.updates_per_rollout, config.algorithm.num_iterations
    return (
        f"{rollout.prompts_per_step} prompts x {rollout.num_generations} generations = {rollout.sequences} sequences; "
        f"{f'{passes} passes of ' if passes > 1 else ''}{updates} update{'s' * (updates > 1)} of "
        f"{config.sequences_per_update}; {_steps(config)}"
    )


def _steps(config: TrainConfig) -> str:
    epochs, path = config.data.epochs, Path(config.data.path)
    if epochs is None:
        return f"{config.steps} steps"
    if not config.data.path or not path.exists():
        return f"steps for {epochs:g} epoch{'s' * (epochs != 1)}"
    rows = len(read_rows(path, config.data.subset, config.data.split))
    return epochs_in_words(config, rows, "rows")


def _tokens(config: TrainConfig) -> str:
    budget, longest = config.batch.tokens_per_micro_batch, config.max_length
    fitting = _longest_in_micro_batch(config)
    fits = f"{fitting} of the longest" if budget >= longest else "a longer sequence gets its own"
    kind = "packed" if config.batch.packed else "padded"
    return f"at most {longest:,} a sequence and {budget:,} a micro-batch, {kind}: {fits}"


def _prompts(config: TrainConfig) -> str:
    path = config.data.path
    if not path:
        return "the embedded default data"
    if is_hub_name(path):
        return f"{path} on the hub, split {config.data.split}"
    return path if Path(path).exists() else f"{path}: not found here"
