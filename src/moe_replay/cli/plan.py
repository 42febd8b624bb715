"""`moe-replay plan`: check and cost a parallel layout before it runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_replay.errors import ExitStatus, LayoutError

if TYPE_CHECKING:
    from moe_replay.tools.plan import Parallel, Work


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Show which rank replays which layers and rows, and what routes cost. Exits with 2 for an impossible layout."""

    model: str = ""
    """Folder, config.json or name of a model; weights are not read. With a recipe: that of the recipe, if left out."""
    recipe: str | None = None
    """Recipe of a run: print what it holds on each GPU, phase by phase, in place of routes; exits with 1 if it does not
    fit."""
    gpus: int = 8
    """GPUs of the recipe's trainer."""
    gpu_gib: float = 79.6
    """Memory of each GPU in GiB; cards of 80 GB have 79.6."""
    tp: int = 1
    """Tensor parallel size, with sequence parallelism."""
    cp: int = 1
    """Context parallel size."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks of each stage."""
    ep: int = 1
    """Expert parallel size."""
    etp: int | None = None
    """Tensor parallel size inside an expert; default: tp."""
    dp: int | None = None
    """Data parallel size; default: world / (tp * cp * pp)."""
    world: int | None = None
    """Total number of ranks."""
    chunk_layers: tuple[int, ...] = ()
    """Decoder layers of each of the pp * vpp chunks, in model order; default: equal."""
    sequences: int = 256
    """Sequences of one step."""
    length: int = 8192
    """Tokens of each sequence."""
    prompt: int = 0
    """Tokens of the prompt, shared by a group."""
    group: int = 1
    """Sequences per prompt, whose tokens are sent once."""
    micro_batch: int = 1
    """Sequences of a micro-batch."""
    packed: bool = False
    """Pack the sequences of a micro-batch into one row."""
    width: int | None = None
    """Input columns; default: the fewest possible."""
    ranks_per_node: int = 8
    """Ranks on each node."""
    gbit: float = 100.0
    """Network bandwidth of each node in Gbit/s."""
    rank: int | None = None
    """Print only the plan of this rank."""
    json: bool = False
    """Print everything as JSON."""

    def __call__(self) -> None:
        """Read the config, plan the layout and print the plan."""
        from moe_replay.routes.topology import MoeTopology
        from moe_replay.tools.model_config import model_config
        from moe_replay.tools.plan import Cluster, Dimensions, plan_layout
        from moe_replay.tools.plan.text import plan_text

        if self.recipe is not None:
            self._plan_recipe(self.recipe)
            return
        config = model_config(self.model)
        parallel = self._parallel()
        plan = plan_layout(
            MoeTopology.from_config(config),
            parallel,
            self._work(parallel),
            dimensions=Dimensions.from_config(config),
            cluster=Cluster(self.ranks_per_node, self.gbit),
        )
        if self.rank is None:
            print(plan.to_json() if self.json else plan_text(plan))
            return
        if not 0 <= self.rank < parallel.world:
            raise LayoutError("no such rank", expected=f"0 to {parallel.world - 1}", found=self.rank)
        told = dataclasses.asdict(plan.rank(self.rank))
        print(json.dumps(told, indent=2) if self.json else "\n".join(f"{name}: {told[name]}" for name in told))

    def _plan_recipe(self, recipe: str) -> None:
        from moe_replay.tools.model_config import model_config
        from moe_replay.tools.plan.memory import plan_memory
        from moe_replay.tools.plan.sizes import ModelSizes
        from moe_replay.tools.plan.sync import Rates, plan_sync, sync_text
        from moe_replay.train.config.file import load_config

        config = load_config(Path(recipe))
        sizes = ModelSizes.of(model_config(self.model or config.model.path))
        plan = plan_memory(config, sizes, gpus=self.gpus, gpu_gib=self.gpu_gib)
        print(plan)
        nodes, rates = -(-self.gpus // self.ranks_per_node), Rates(network=self.gbit / 8)
        servers = len(config.rollout.urls) or nodes * (config.rollout.engines_per_node or 1)
        itemsize = 4 if config.model.dtype == "float32" else 2
        print(sync_text(plan_sync(sizes.total, nodes=nodes, servers=servers, itemsize=itemsize, rates=rates), rates))
        if not plan.fits:
            raise SystemExit(ExitStatus.CHECK_FAILED)

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

        at_once = self.micro_batch * parallel.dp
        if at_once < 1 or self.sequences < 1 or self.sequences % at_once:
            raise LayoutError(
                "the sequences of a step cannot be divided evenly",
                expected=f"a multiple of micro_batch * dp = {self.micro_batch} * {parallel.dp}",
                found=self.sequences,
            )
        return Work(
            lengths=(self.length,) * self.micro_batch,
            micro_batches=self.sequences // at_once,
            packed=self.packed,
            width=self.width,
            prompt=self.prompt,
            group=self.group,
        )
