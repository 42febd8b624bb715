"""`moe-replay plan`: check a parallel layout and estimate its costs before a run."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_replay.errors import ExitStatus, LayoutError

if TYPE_CHECKING:
    from moe_replay.tools.plan import Parallel, Work
    from moe_replay.train.config.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Show which rank replays which layers and rows, and the cost of routes. Exit with 2 for an impossible layout."""

    model: str = ""
    """Model folder, config.json or Hub name; weights are not read. Default with --recipe: the model of the recipe."""
    recipe: str | None = None
    """Recipe of a run: estimate memory per GPU and phase, the time of scoring and updates and of a weight sync instead;
    exit with 1 if the run does not fit."""
    auto: bool = False
    """Propose expert and context parallel sizes of the FSDP2 backend for a model, sequences of --length tokens and
    --gpus, or for a recipe; exit with 1 if nothing fits on them."""
    traces: str | None = None
    """Run folder with traces (log.traces), or a trace file: predict from its routes how even the loads of
    expert-parallel ranks are, by tokens and with batch.balance = "experts", and what a pass would gain."""
    ep_sizes: tuple[int, ...] = (8, 64, 256)
    """Expert parallel sizes to compare (with --traces); --ep is one alone."""
    tokens_per_micro_batch: int | None = None
    """Maximum tokens per micro-batch (with --traces); default: that of the run, or 8192."""
    gpus: int = 8
    """Trainer GPUs (with --recipe or --auto)."""
    gpu_gib: float = 79.6
    """Memory per GPU in GiB; an 80 GB card has 79.6."""
    gpu_tflops: float = 989.5
    """Peak of a GPU in TFLOP/s, in the dtype of the run; an H100 SXM or H200 has 989.5 in bfloat16 (with --recipe)."""
    mfu: float = 0.25
    """Fraction of it that scoring and updates are assumed to reach; time/train_mfu of a run shows yours."""
    tp: int = 1
    """Tensor parallel size, with sequence parallelism."""
    cp: int = 1
    """Context parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int = 1
    """Virtual pipeline size: model chunks per stage."""
    ep: int = 1
    """Expert parallel size."""
    etp: int | None = None
    """Expert tensor parallel size; default: tp."""
    dp: int | None = None
    """Data parallel size; default: world / (tp * cp * pp)."""
    world: int | None = None
    """Total number of ranks."""
    chunk_layers: tuple[int, ...] = ()
    """Decoder layers per chunk, pp * vpp values in model order; default: equal."""
    sequences: int | None = None
    """Sequences per step; default: 256, or with --traces all that were recorded."""
    length: int = 8192
    """Tokens per sequence."""
    prompt: int = 0
    """Prompt tokens, shared by a group."""
    group: int = 1
    """Sequences per prompt; prompt tokens are sent once per group."""
    micro_batch: int = 1
    """Sequences per micro-batch."""
    packed: bool = False
    """Pack the sequences of a micro-batch into one row."""
    width: int | None = None
    """Padded width of a micro-batch; default: the minimum."""
    ranks_per_node: int = 8
    """Ranks per node."""
    gbit: float = 100.0
    """Network bandwidth per node in Gbit/s."""
    rank: int | None = None
    """Print the plan of this rank only."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        from moe_replay.routes.topology import MoeTopology
        from moe_replay.tools.plan import Cluster, Dimensions, plan_layout
        from moe_replay.weights.model_folder import read_config

        for name in ("gpus", "gpu_gib", "gpu_tflops", "mfu", "ranks_per_node", "gbit", "length"):
            if not 0 < getattr(self, name) < math.inf:
                option = f"--{name.replace('_', '-')}"
                raise LayoutError(f"{option} is not a positive number", found=getattr(self, name))
        if self.prompt < 0:
            raise LayoutError("--prompt is negative", found=self.prompt)
        if self.traces is not None:
            self._plan_balance(Path(self.traces))
            return
        if not self.model and self.recipe is None:
            raise LayoutError("no model to plan for", expected="--model MODEL, or --recipe RECIPE")
        if self.auto:
            self._propose()
            return
        if self.recipe is not None:
            self._plan_recipe(self.recipe)
            return
        config = read_config(self.model)
        parallel = self._parallel()
        plan = plan_layout(
            MoeTopology.from_config(config),
            parallel,
            self._work(parallel),
            dimensions=Dimensions.from_config(config),
            cluster=Cluster(self.ranks_per_node, self.gbit),
        )
        if self.rank is None:
            print(plan.to_json() if self.json else str(plan))
            return
        if not 0 <= self.rank < parallel.world:
            raise LayoutError("no such rank", expected=f"0 to {parallel.world - 1}", found=self.rank)
        fields = dataclasses.asdict(plan.rank(self.rank))
        text = "\n".join(f"{name}: {value}" for name, value in fields.items())
        print(json.dumps(fields, indent=2) if self.json else text)

    def _propose(self) -> None:
        from moe_replay.tools.plan.proposal import propose
        from moe_replay.train.config.file import load_config
        from moe_replay.train.config.train_config import TrainConfig
        from moe_replay.weights.model_folder import read_config
        from moe_replay.weights.model_sizes import ModelSizes

        if self.recipe is not None:
            config = load_config(Path(self.recipe))
        else:
            prompt = self.prompt or 1
            if prompt >= self.length:
                raise LayoutError("no completion fits behind the prompt", expected=f"--length above {prompt}")
            tables = {
                "model": {"path": self.model, "dtype": "bfloat16"},
                "data": {"path": "prompts.jsonl", "max_prompt_length": prompt},
                "rollout": {
                    "engine": "rollout_server",
                    "urls": ["http://127.0.0.1:8000"],
                    "max_tokens": self.length - prompt,
                },
                "batch": {"packed": True, "tokens_per_micro_batch": self.length},
            }
            config = TrainConfig.model_validate(tables)
        model = read_config(self._model_of(config))
        machines = {"gpus": self.gpus, "gpu_gib": self.gpu_gib, "ranks_per_node": self.ranks_per_node}
        proposal = propose(config, ModelSizes.of(model), model, **machines)
        best = proposal.best
        if self.json:
            fields = {"gpus": proposal.gpus, "settings": None if best is None else best.settings}
            costs = {} if best is None else {"memory": best.memory.phases, "traffic": dataclasses.asdict(best.traffic)}
            print(json.dumps(fields | costs, indent=2))
        else:
            print(proposal)
            if best is not None:
                print(f"\n{best.memory}\n{best.traffic}")
        if best is None or proposal.gpus > self.gpus:
            raise SystemExit(ExitStatus.CHECK_FAILED)

    def _plan_balance(self, traces: Path) -> None:
        from moe_replay.tools.plan.balance import counts_of, plan_balance, run_budget
        from moe_replay.weights.model_folder import read_config
        from moe_replay.weights.model_sizes import ModelSizes

        sizes = (self.ep,) if self.ep > 1 else self.ep_sizes
        if min(*sizes, self.tp, self.cp, self.pp, self.etp or 1, self.tokens_per_micro_batch or 1) < 1:
            raise LayoutError("parallel sizes and tokens must be at least 1", found=sizes)
        model = ModelSizes.of(read_config(self.model)) if self.model else None
        counts = counts_of(traces, self.sequences, None if model is None else model.num_experts)
        has_ranks = self.dp is not None or self.world is not None
        plan = plan_balance(
            counts,
            sizes,
            budget=self.tokens_per_micro_batch or run_budget(traces),
            ranks_per_sample=self.tp * self.cp,
            expert_tensor=self.etp or self.tp,
            data_ranks=self._parallel().dp if has_ranks else None,
            expert_fraction=None if model is None else model.expert_fraction(counts.tokens.tolist()),
        )
        print(json.dumps(plan.fields(), indent=2) if self.json else plan)

    def _plan_recipe(self, recipe: str) -> None:
        from moe_replay.tools.plan.costs import Rates, plan_speed, plan_sync, plan_traffic, sync_text
        from moe_replay.train.config.file import load_config
        from moe_replay.train.setup.memory_plan import check_width, plan_memory, smallest_remedy
        from moe_replay.weights.model_folder import read_config
        from moe_replay.weights.model_sizes import ModelSizes

        config = load_config(Path(recipe))
        check_width(config, self.ranks_per_node)
        sizes = ModelSizes.of(read_config(self._model_of(config)))
        plan = plan_memory(config, sizes, gpus=self.gpus, gpu_gib=self.gpu_gib)
        remedy = None if plan.fits else smallest_remedy(config, sizes, gpus=self.gpus, gpu_gib=self.gpu_gib)
        speed = plan_speed(config, sizes, gpus=self.gpus, peak_tflops=self.gpu_tflops, mfu=self.mfu)
        is_fsdp = config.backend.kind == "fsdp"
        traffic = plan_traffic(config, sizes, gpus=self.gpus) if is_fsdp else None
        nodes, rates = -(-self.gpus // self.ranks_per_node), Rates(network=self.gbit / 8)
        servers = len(config.rollout.urls) or nodes * (config.rollout.engines_per_node or 1)
        itemsize = 4 if config.model.dtype == "float32" else 2
        costs = plan_sync(sizes.total, nodes=nodes, servers=servers, itemsize=itemsize, rates=rates)
        if self.json:
            fields = dataclasses.asdict(plan) | {
                "fits": plan.fits,
                "remedy": remedy,
                "speed": dataclasses.asdict(speed),
                "traffic": None if traffic is None else dataclasses.asdict(traffic),
            }
            print(json.dumps(fields | {"weight_sync": [dataclasses.asdict(cost) for cost in costs]}, indent=2))
        else:
            print(plan)
            if not plan.fits:
                print(
                    f"it fits with {remedy}" if remedy else "neither other settings nor 64 times the GPUs make it fit"
                )
            print(speed)
            if traffic is not None:
                print(traffic)
            print(sync_text(costs, rates) if not config.rollout.lora else "weight update: the adapter alone")
        if not plan.fits:
            raise SystemExit(ExitStatus.CHECK_FAILED)

    def _model_of(self, config: TrainConfig) -> str:
        if not self.model and not config.model.path:
            raise LayoutError("the recipe trains the embedded model", remedy="Name a model to plan for: --model MODEL")
        return self.model or config.model.path

    def _parallel(self) -> Parallel:
        from moe_replay.tools.plan import Parallel

        model_ranks = self.tp * self.cp * self.pp
        dp = self.dp
        if dp is None:
            dp = 1 if self.world is None else max(self.world // max(model_ranks, 1), 1)
        if self.world is not None and self.world != model_ranks * dp:
            raise LayoutError(
                "the world size does not fit the parallel sizes",
                expected=f"tp * cp * pp * dp = {model_ranks} * {dp} = {model_ranks * dp} ranks",
                found=self.world,
                remedy="Use a multiple of tp * cp * pp, or omit it",
            )
        return Parallel(
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            vpp=self.vpp,
            dp=dp,
            ep=self.ep,
            etp=self.etp,
            chunk_layers=self.chunk_layers or None,
        )

    def _work(self, parallel: Parallel) -> Work:
        from moe_replay.tools.plan import Work

        per_round = self.micro_batch * parallel.dp
        sequences = 256 if self.sequences is None else self.sequences
        if per_round < 1 or sequences < 1 or sequences % per_round:
            raise LayoutError(
                "the sequences of a step do not divide evenly",
                expected=f"a multiple of micro_batch * dp = {self.micro_batch} * {parallel.dp}",
                found=sequences,
            )
        return Work(
            lengths=(self.length,) * self.micro_batch,
            micro_batches=sequences // per_round,
            packed=self.packed,
            width=self.width,
            prompt=self.prompt,
            group=self.group,
        )
