"""`moe-replay train --dry-run`: the plan and the problems of a run, without weights, engines or output files."""

from __future__ import annotations

from math import ceil, lcm
from pathlib import Path
from typing import Any, NamedTuple

from moe_replay.cluster.capacity import check_capacity, demand_of, nodes_of
from moe_replay.engines.base import devices_per_engine
from moe_replay.errors import MoeReplayError, UnsupportedRouterError
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology, text_config
from moe_replay.tools.memory_check import bytes_on_cpus, check_memory
from moe_replay.tools.plan import Dimensions, Parallel, Work, plan_layout
from moe_replay.train.backends.lora import targets_of
from moe_replay.train.config.checks import warnings
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import BackendConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.replay_mode import asks_for_routes, plan_replay
from moe_replay.train.rollout.prompts import is_hub_name, read_rows
from moe_replay.train.setup import preflight
from moe_replay.train.setup.engines import check_adapter, check_sizes
from moe_replay.train.setup.inputs import epochs_in_words
from moe_replay.train.setup.launch import crowding
from moe_replay.utils.device import accelerator
from moe_replay.utils.secrets import mask_passwords
from moe_replay.weights.model_folder import ModelError, read_config


class DryRun(NamedTuple):
    """Description of a run, and the problems known now that would stop it before its first step."""

    report: str
    problems: list[MoeReplayError]


def dry_run(config: TrainConfig, ranks: int | None = None) -> DryRun:
    """Check layout, packages, engine, data, rewards, memory and cluster; `ranks` None: the minimum for the layout."""
    problems, replay = preflight.find_problems(config), plan_replay(config)
    parallel, model, layout, steps = None, None, "", f"{config.steps} steps"
    with problems.collected():
        parallel = parallel_of(config.backend, ranks)
    with problems.collected():
        model = _model(config)
    with problems.collected():
        steps = _steps(config)
    if model is not None and parallel is not None:
        with problems.collected():
            layout = _layout(config, model, parallel)
    memory, cluster = _memory(config, model, parallel, problems), ""
    if config.cluster.launcher == "ray":
        cluster = "see below"
        with problems.collected():
            cluster = cluster_fit(config)
    lines = [
        f"replay   {replay.mode}: {replay.reason}",
        f"policy   {_policy(config, parallel, ranks)}",
        f"rollout  {_rollout(config)}",
        f"step     {_step(config)}; {steps}",
        f"tokens   {_tokens(config)}",
        f"prompts  {_prompts(config)}",
        *(f"warning  {warning}" for warning in [*warnings(config), *crowding(config)]),
        *(["", layout] if layout else []),
        "",
        f"memory   {memory}",
        *([f"cluster  {cluster}"] if cluster else []),
    ]
    return DryRun("\n".join(lines), problems)


def _layout(config: TrainConfig, model: Any, parallel: Parallel) -> str:
    """Return which rank replays which layers and rows; raise for sizes that the model or the layout cannot have."""
    check_sizes(config, text_config(model))
    try:
        topology = MoeTopology.from_config(model, load_router_family(config.model.router_family))
    except UnsupportedRouterError as unsupported:
        if plan_replay(config).mode != "off":
            raise
        return f"Layout not checked: {unsupported}"
    if config.model.lora_rank:
        targets = targets_of(model, config.model)
        if config.rollout.lora:
            check_adapter(targets)
    plan = plan_layout(
        topology,
        parallel,
        work_of(config, parallel),
        dimensions=Dimensions.from_config(model),
        with_routes=asks_for_routes(config),
    )
    return f"If every sequence has its maximum length:\n{plan}"


def _memory(config: TrainConfig, model: Any, parallel: Parallel | None, problems: preflight.Problems) -> str:
    """Return the estimated memory, or why it is unknown."""
    if config.cluster.launcher == "ray":
        return "not checked: the run is on cluster machines; see `moe-replay plan --recipe`"
    if not config.model.path:
        return "little: the embedded tiny model"
    if model is None or parallel is None:
        return "see below"
    if config.backend.device == "auto" and accelerator() is None:
        return "not checked: no GPU on this machine; see `moe-replay plan --recipe`"
    try:
        return check_memory(config, model, parallel.world)
    except UnsupportedRouterError:
        return "not checked: a dense model"
    except MoeReplayError as problem:
        problems.append(problem)
        return "see below"


def cluster_fit(config: TrainConfig) -> str:
    """Return how a run fits into its Ray cluster; raise if it does not fit or there is no cluster."""
    nodes = nodes_of(config)
    return check_capacity(nodes, demand_of(config, nodes, *_host_memory(config)))


def _host_memory(config: TrainConfig) -> tuple[float, float]:
    """Return the host memory in bytes per rank and per engine on CPUs; 0 on GPUs."""
    if config.backend.device != "cpu" or not config.model.path:
        return 0, 0
    try:
        return bytes_on_cpus(config, _model(config), config.cluster.ranks)
    except (ModelError, UnsupportedRouterError):
        return 0, 0


def parallel_of(backend: BackendConfig, ranks: int | None) -> Parallel:
    """Return the parallel layout of a backend on `ranks` ranks; None: the minimum."""
    tensor_and_context = backend.tensor_parallel * backend.context_parallel
    experts = backend.expert_parallel * (backend.expert_tensor_parallel or backend.tensor_parallel)
    if ranks is not None and ranks % backend.model_parallel:
        raise ConfigError(
            "the number of ranks does not fit the parallel sizes",
            expected=f"a multiple of {backend.model_parallel} = backend.tensor_parallel * pipeline_parallel * "
            "context_parallel",
            found=f"{ranks} ranks",
        )
    min_dp = lcm(tensor_and_context, experts) // tensor_and_context
    return Parallel(
        tp=backend.tensor_parallel,
        cp=backend.context_parallel,
        pp=backend.pipeline_parallel,
        vpp=backend.virtual_pipeline or 1,
        dp=min_dp if ranks is None else ranks // backend.model_parallel,
        ep=backend.expert_parallel,
        etp=backend.expert_tensor_parallel,
        sp=bool(backend.megatron.get("sequence_parallel", True)),
        ulysses=backend.kind == "fsdp",
    )


def work_of(config: TrainConfig, parallel: Parallel) -> Work:
    """Return the largest possible step: all sequences at maximum length, evenly distributed."""
    per_rank = ceil(config.rollout.sequences / parallel.dp)
    micro_batches = ceil(per_rank / _max_sequences_per_micro_batch(config))
    multiple = parallel.pp if parallel.vpp > 1 else 1
    per_micro_batch = ceil(per_rank / micro_batches)
    return Work(
        lengths=(config.max_length,) * per_micro_batch,
        micro_batches=ceil(micro_batches / multiple) * multiple,
        packed=config.batch.packed,
        prompt=min(config.data.max_prompt_length, config.max_length - 1),
        group=config.rollout.num_generations,
    )


def _max_sequences_per_micro_batch(config: TrainConfig) -> int:
    return min(max(config.batch.tokens_per_micro_batch // config.max_length, 1), config.rollout.sequences)


def _model(config: TrainConfig) -> Any:
    if config.model.path:
        return read_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
    from moe_replay.demo.model import FULL, model_config

    return model_config(FULL)


# ---- lines -----------------------------------------------------------------------------------------------------------


def _policy(config: TrainConfig, parallel: Parallel | None, ranks: int | None) -> str:
    adapters = f"LoRA of rank {config.model.lora_rank} on {', '.join(config.model.lora_target_modules)}"
    weights = adapters if config.model.lora_rank else "all weights"
    minimum = "" if ranks is not None else ", the minimum for this layout"
    model = config.model.path or "the embedded tiny model"
    world = ranks or 1 if parallel is None else parallel.world
    on_ranks = f"{world} rank{'s' * (world > 1)}{minimum}"
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
    """Describe the number and placement of engines in separate processes."""
    rollout, cluster = config.rollout, config.cluster
    if not config.starts_servers:
        return ""
    devices = devices_per_engine(rollout.options)
    per_engine = f", {devices} GPUs each" if devices > 1 else ""
    if not cluster.starts_engines:
        return f" ({rollout.engines_per_node} on every trainer node{per_engine})"
    where = f"on the {cluster.trainer_nodes} trainer" if cluster.placement == "colocated" else "on separate GPUs"
    machines = f" node{'s' * (cluster.trainer_nodes > 1)}" if cluster.placement == "colocated" else ""
    return f" ({cluster.engines} {where}{machines}{per_engine})"


def _step(config: TrainConfig) -> str:
    rollout, updates, passes = config.rollout, config.algorithm.updates_per_rollout, config.algorithm.num_iterations
    return (
        f"{rollout.prompts_per_step} prompts x {rollout.num_generations} generations = {rollout.sequences} sequences; "
        f"{f'{passes} passes of ' if passes > 1 else ''}{updates} update{'s' * (updates > 1)} of "
        f"{config.sequences_per_update}"
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
    fitting = _max_sequences_per_micro_batch(config)
    fits = f"{fitting} sequences of maximum length" if budget >= longest else "a longer sequence gets a separate one"
    kind = "packed" if config.batch.packed else "padded"
    return f"at most {longest:,} per sequence and {budget:,} per micro-batch, {kind}: {fits}"


def _prompts(config: TrainConfig) -> str:
    path = config.data.path
    if not path:
        return "the embedded data"
    if is_hub_name(path):
        return f"{path} on the Hub, split {config.data.split}"
    return path if Path(path).exists() else f"{path}: not found here"
