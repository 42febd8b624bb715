"""The Megatron GRPO trainer of the released ms-swift on a CPU, on a plain GPTModel.

Transformer Engine, which ms-swift imports and our model does not use, is a stand-in. Trainers are made without their
constructor, as ms-swift's own loss on Ray does, and their loss and optimizer are ours. Everything that routes pass
through is ms-swift's: collator, old-log-prob pass, update, `train_step`, and on Ray the loss and the scoring.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types
from contextlib import nullcontext
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.plugins import verl_megatron_cpu
from tests.plugins.absent import Absent
from tests.plugins.verl_cpu import PROMPT, Rollout, open_process_group

MICRO_BATCH = 3


class _Absent(type):
    """A class of which every attribute is itself a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(name)


def _absent(name: str) -> type:
    return _Absent(name, (), {"__init__": lambda self, *_, **__: None})


class _TransformerEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of Transformer Engine that have any name and do nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        is_engine = name.split(".")[0] in ("transformer_engine", "transformer_engine_torch")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_engine else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        vars(module).update(__path__=[], __version__="2.0.0", __getattr__=_module_attribute)
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def _module_attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(name)


@cache
def on_cpu(*, plugin: bool = True) -> None:
    """Let ms-swift's trainers be imported and compute on a CPU, and load the plug-in as ms-swift does."""
    os.environ.setdefault("MODELSCOPE_CACHE", tempfile.mkdtemp())
    from moe_replay.megatron import cpu

    cpu.enable()
    open_process_group()
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.transformer.moe.router  # noqa: F401  these must find that there is no Transformer Engine

    if find_spec("zmq") is None:  # workers on Ray import it to send weights
        sys.modules["zmq"] = Absent("zmq")
        sys.modules["zmq"].__spec__ = importlib.machinery.ModuleSpec("zmq", None, is_package=True)
    sys.meta_path.insert(0, _TransformerEngine())
    import megatron.core.extensions.transformer_engine as extensions

    needed = ("TEGroupedLinear", "TELinear", "TELayerNormColumnParallelLinear", "TEColumnParallelLinear")
    needed += ("TERowParallelLinear", "TENorm", "TEDotProductAttention", "TEFusedMLP", "SplitAlongDim", "te_checkpoint")
    needed += ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "_get_extra_te_kwargs")
    for name in {*needed, *(name for name in vars(extensions) if name[:2] in ("TE", "te"))}:
        if getattr(extensions, name, None) is None:
            setattr(extensions, name, _absent(name))
    if plugin:
        load_plugin()
    from swift.megatron.trainers import base, utils
    from swift.megatron.utils import router_replay_utils

    router_replay_utils.device_name = "cpu"
    router_replay_utils.apply_router_replay_patch()
    utils.get_current_device = lambda: "cpu"
    base.logical_and_across_model_parallel_group = bool
    base.reduce_max_stat_across_model_parallel_group = float


def load_plugin() -> None:
    """Load what `moe-replay plugin ms-swift` prints, as every argument class of ms-swift does."""
    from contextlib import redirect_stdout

    from swift.utils import import_external_file

    from moe_replay.cli.plugin import plugin

    file = Path(tempfile.mkdtemp()) / "plugin.py"
    with file.open("w") as out, redirect_stdout(out):
        plugin("ms-swift")
    import_external_file(str(file))


def template(*, padded: bool, context: int = 1) -> Any:
    """A template of ms-swift, as far as collating needs it."""
    from swift.template import Template

    made = Template.__new__(Template)
    vars(made).update(
        processor=SimpleNamespace(pad_token_id=0),
        packing=False,
        task_type="causal_lm",
        mode="train",
        padding_side="right",
        padding_free=not padded,
        use_megatron=True,
        sequence_parallel_size=context,
        remove_unused_columns=True,
        model=None,
    )
    return made


def samples_of(rollout: Rollout, routed_experts: torch.Tensor | None) -> list[Any]:
    """Samples as ms-swift's rollout leaves them: T-1 rows of routes, all decoder layers."""
    made = []
    for row, mask in enumerate(rollout.mask.bool()):
        ids = rollout.ids[row][mask].tolist()
        prompt = int(mask[:PROMPT].sum())
        encoded = {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "length": len(ids)}
        routes = None if routed_experts is None else routed_experts[row][mask][:-1].long()
        fields = {"routed_experts": routes, "is_truncated": False, "rollout_logprobs": None}
        made.append(SimpleNamespace(encoded=encoded, **fields))
    return made


def make_trainer(model: Any, *, padded: bool = False, mode: str = "R3") -> Any:
    """A trainer with ms-swift's own methods."""
    from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer

    forget_guard()
    made = MegatronGRPOTrainer.__new__(MegatronGRPOTrainer)
    made.args = SimpleNamespace(
        task_type="causal_lm",
        pipeline_model_parallel_size=model.config.pipeline_model_parallel_size,
        tensor_model_parallel_size=model.config.tensor_model_parallel_size,
        sequence_parallel=model.config.sequence_parallel,
        fp8_recipe=None,
        padding_free=not padded,
        context_parallel_size=model.config.context_parallel_size,
        cp_partition_mode="zigzag",
        is_multimodal=False,
        model_type="qwen3_moe",
        router_replay_mode=mode,
        attention_backend="flash",
        report_to=[],
        num_microbatches=2,
        seq_length=64,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=2 * MICRO_BATCH,
    )
    made.template = template(padded=padded, context=model.config.context_parallel_size)
    made.enable_routing_replay = True
    made.temperature, made.micro_batch_size, made.compute_entropy, made.beta = 1.0, MICRO_BATCH, False, 0.0
    made._has_teacher_explicit = made._is_dynamic_self_distillation = made.use_teacher_api = False
    made.unwrapped_models = made.wrapped_models = [model]
    model.zero_grad_buffer = model.zero_grad
    made.updates = []
    made.optimizer = SimpleNamespace(zero_grad=model.zero_grad, step=lambda: (made.updates.append(1), 0.0, None))
    made.opt_param_scheduler = SimpleNamespace(step=lambda increment: None)
    made.state, made._train_metrics = SimpleNamespace(iteration=0), {}
    made.loss_func = loss
    made._replace_data_iterator = lambda data_iterator: data_iterator
    return made


def on_ray(trainer: Any) -> Any:
    """The trainer of a worker on Ray: its updates are those of ms-swift's `GRPOLoss`."""
    from swift.ray.megatron.loss.grpo import GRPOLoss

    made = GRPOLoss.__new__(GRPOLoss)
    made._dummy = type(trainer).__new__(type(trainer))
    vars(made._dummy).update(vars(trainer) | {"unwrapped_models": [SimpleNamespace(training=True)]})
    trainer.forward_step = made.forward_step
    return trainer


def worker_on_ray(trainer: Any, *, ref: Any = None, teacher: Any = None) -> Any:
    """A worker on Ray that scores with this trainer; without `ref` the reference is the actor without its adapters."""
    from swift.ray.megatron.megatron_worker import MegatronWorker

    made = MegatronWorker.__new__(MegatronWorker)
    made._megatron, made._args = trainer, trainer.args
    made.actor = SimpleNamespace(null_ref_context=lambda: nullcontext(trainer.unwrapped_models))
    made.ref = ref and SimpleNamespace(models=[ref])
    made.teacher = teacher and SimpleNamespace(models=[teacher], loaded_context=nullcontext)
    return made


def keeps_ids_in_8_bits() -> bool:
    """Whether this release keeps the ids that R2 records in 8 bits, whatever the number of experts."""
    return metadata.version("ms-swift") in ("4.5.0", "4.5.1", "4.5.2")


def forget_guard() -> None:
    """A process has one guard: that of the trainer before goes."""
    from moe_replay.integrations.ms_swift_megatron import guards

    if guards.current is not None and guards.current.controller is not None:
        guards.current.controller.detach()
    guards.current = None


def loss(output: torch.Tensor, data: dict[str, Any]) -> tuple[torch.Tensor, dict]:
    return -(output * data["grpo_batch"].completion_mask).mean(), {}


def collated(trainer: Any, samples: list[Any]) -> list[dict[str, Any]]:
    """Micro-batches as ms-swift's trainer and its driver on Ray make them."""
    from swift.megatron.utils import get_padding_to
    from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch

    made = []
    for first in range(0, len(samples), MICRO_BATCH):
        inputs, batch = collate_to_grpo_micro_batch(
            samples[first : first + MICRO_BATCH],
            trainer.template,
            device=torch.device("cpu"),
            padding_to=get_padding_to(trainer.args),
            router_replay_mode=trainer.args.router_replay_mode,
        )
        batch.rollout_per_token_logps = torch.full(batch.completion_mask.shape, -5.0)
        made.append({**inputs, "grpo_batch": batch})
    return made


def scored(trainer: Any, samples: list[Any]) -> list[dict[str, Any]]:
    """Micro-batches after the old-log-prob pass."""
    return [trainer._maybe_compute_logps(data) for data in collated(trainer, samples)]


def step(trainer: Any, samples: list[Any]) -> dict[str, float]:
    """One update as off Ray, where the old-log-prob pass is a part of `train_step`: its metrics."""
    trainer._replace_data_iterator = lambda batches: iter([trainer._maybe_compute_logps(data) for data in batches])
    return update(trainer, collated(trainer, samples))


def update(trainer: Any, micro_batches: list[dict[str, Any]]) -> dict[str, float]:
    """One update: the metrics that the callback adds to ms-swift's."""
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from swift.megatron.callbacks import megatron_callbacks_map

    try:
        trainer.train_step(iter(micro_batches))
    finally:
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_indices()
    megatron_callbacks_map["moe_replay"](trainer).on_step_end()
    found = {name: float(pair[0] / pair[1]) for name, pair in trainer._train_metrics.items()}
    trainer._train_metrics = {}
    return found


def model_of_six_layers(**settings: Any) -> Any:
    """A Megatron model, the first layer dense; Megatron's list of replay objects has its routers only."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.global_router_replay_instances.clear()
    return verl_megatron_cpu.model_and_config(**settings)[0]
