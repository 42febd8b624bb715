"""Load a Transformers checkpoint into a model sharded by FSDP2; each rank reads only its rows.

A folder that cannot be read row by row (other names than the model's checkpoint, files that are not safetensors,
buffers that only a loaded model has) is loaded by Transformers on rank 0 and scattered; it reports problems.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from moe_replay.distributed.collectives import ACROSS, rank_grid
from moe_replay.distributed.ranks import from_rank_0, raise_on_all_ranks
from moe_replay.megatron.weights.checkpoint import INDEX, QUANTIZATION, Checkpoint
from moe_replay.megatron.weights.tensor_slices import WeightMapError
from moe_replay.train.backends import attention, expert_adapters, expert_parallel, experts, lora
from moe_replay.train.backends.fp8_base import Fp8Base, names_in_8_bits
from moe_replay.train.backends.fp8_weights import CODES, SCALES
from moe_replay.train.backends.frozen import Frozen, take_out
from moe_replay.train.backends.offload import local_part
from moe_replay.train.backends.shared_base import SharedBase
from moe_replay.train.config.one_copy import check_alone
from moe_replay.train.config.sections import ModelConfig
from moe_replay.utils.tested_versions import release_numbers
from moe_replay.weights.checkpoint import CheckpointForm, can_convert, model_tensor
from moe_replay.weights.model_folder import (
    ModelError,
    build_model,
    check_dtypes,
    check_experts,
    check_finite,
    check_unexpected,
    load_model,
    read_config,
)

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
EXPERT_ID = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""Of an expert, in the name of a tensor of a checkpoint."""


class FolderShards:
    """The tensors of a folder in the form of a Transformers model.

    model   on any device, `meta` too
    parts   tensors of the checkpoint that make up each tensor of the model, with their shapes
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, parts: dict[str, dict[str, Shape]]) -> None:
        self._checkpoint, self._model, self._parts = checkpoint, model, parts

    @classmethod
    def of(cls, folder: str, model: Any, *, has_scales: bool) -> FolderShards | None:
        """Return what reads a folder for a model on the `meta` device; None if Transformers has to load it.

        has_scales   its weights are in 8 bits: raise what is wrong with it, Transformers would not read them
        """
        path = Path(folder)
        if not (path / INDEX).is_file() and not (path / "model.safetensors").is_file():
            return None
        if any(not _is_rotary(module) for module in _with_constants(model)):
            return None
        try:
            checkpoint = Checkpoint(path)
            present = checkpoint.names
        except WeightMapError:
            if has_scales:
                raise
            return None
        tied, form = tied_names(model), CheckpointForm(model)
        tensors = {name: form.tensors(name, tensor) for name, tensor in model.state_dict().items() if name not in tied}
        expected = {part: tensor for of_tensor in tensors.values() for part, tensor in of_tensor.items()}
        if any(part not in present or checkpoint.shape(part) != tensor.shape for part, tensor in expected.items()):
            return None
        check_unexpected(model, present - expected.keys() - tied, folder)
        stored = {part: checkpoint.stored_dtype(part) for part in expected}
        floating = {part: tensor.is_floating_point() for part, tensor in expected.items()}
        check_dtypes(stored, floating, folder, quantized=checkpoint.is_quantized)
        parts = {
            name: {part: tuple(tensor.shape) for part, tensor in of_tensor.items()}
            for name, of_tensor in tensors.items()
        }
        return cls(checkpoint, model, parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def rows(self, name: str, shape: Shape, first: int, count: int) -> Tensor:
        """Return some rows of a tensor of the model; nothing else is read where that is possible."""
        parts = self._parts[name]
        if list(parts) == [name]:
            return self._checkpoint.read(name, (slice(first, first + count), *(slice(0, size) for size in shape[1:])))
        experts = {int(match[0]) for part in parts if (match := EXPERT_ID.search(part))}
        if experts == set(range(shape[0])) and all(map(EXPERT_ID.search, parts)) and count:
            rows = self._converted(name, range(first, first + count))
            if tuple(rows.shape) == (count, *shape[1:]):
                return rows
        return self._converted(name)[first : first + count]

    def whole(self, name: str) -> Tensor:
        return self._converted(name)

    def _converted(self, name: str, experts: range | None = None) -> Tensor:
        """Return a tensor of the model, or the part of it that holds some experts."""
        chosen = {}
        for part, shape in self._parts[name].items():
            number = EXPERT_ID.search(part)
            if experts is None or (number is not None and int(number[0]) in experts):
                chosen[part] = self._checkpoint.read(part, tuple(slice(0, size) for size in shape))
        return model_tensor(self._model, name, chosen)


def without_scales(settings: Any) -> bool:
    """Remove from a Transformers config that weights are in 8 bits: they are read as float32. Return whether it did."""
    quantization = getattr(settings, QUANTIZATION, None)
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return False
    del settings.quantization_config
    return True


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters under which a model has them a second time."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return names - {name for name, _ in model.named_parameters()}


# ---- what no checkpoint has ------------------------------------------------------------------------------------------


def _with_constants(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if module._non_persistent_buffers_set)


def _is_rotary(module: nn.Module) -> bool:
    """Whether Transformers can recompute the constants of a module."""
    has_no_parameters = next(module.parameters(), None) is None
    return "RotaryEmbedding" in type(module).__name__ and hasattr(module, "original_inv_freq") and has_no_parameters


@torch.no_grad()
def compute_constants(model: Any) -> None:
    """Compute the buffers that a checkpoint does not hold, as Transformers does for a model that it loads."""
    for module in _with_constants(model):
        for name in module._non_persistent_buffers_set:
            getattr(module, name).fill_(torch.nan)
        model._init_weights(module)
        for name in module._non_persistent_buffers_set:
            assert torch.isfinite(getattr(module, name)).all(), f"{name} of {type(module).__name__} was not computed"


def recompute_layers(model: Any, *, offloaded: bool) -> None:
    """Have the layers of a Transformers model in training recomputed in the backward.

    offloaded   the hidden states that each layer was given wait in host memory
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if offloaded:
        model._set_gradient_checkpointing(True, _checkpoint_on_host)


def _checkpoint_on_host(layer: Callable[..., Any], *inputs: Any) -> Any:
    """Run a layer that is recomputed in the backward; autograd keeps a copy of its inputs in host memory.

    Masks and position embeddings are keywords, which all layers share: they stay where they are.
    """
    if not any(isinstance(value, Tensor) and value.is_floating_point() for value in inputs):
        raise ModelError(
            "model.gradient_checkpointing: the inputs of a layer cannot be offloaded",
            expected="hidden states that the model hands to its layers as a positional argument",
            found=", ".join(type(value).__name__ for value in inputs) or "keywords only",
            remedy="Set model.gradient_checkpointing = true",
        )
    with save_on_cpu(pin_memory=True):  # inside the layer the hooks of the checkpoint apply, which keep nothing
        return checkpoint(layer, *inputs, use_reentrant=False)


_RANDOM_IN_TRAINING = (
    *("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    *("router_jitter_noise", "moe_jitter_eps"),
)


def _without_randomness(settings: Any) -> None:
    """Scoring and training must compute the same function of the weights: nothing is random in training.

    Also in the parts of a config, such as that of the language model in a multimodal one.
    """
    from transformers import PretrainedConfig

    for part in (settings, *(value for value in vars(settings).values() if isinstance(value, PretrainedConfig))):
        part.update({name: 0.0 for name in _RANDOM_IN_TRAINING if getattr(part, name, 0.0)})


def sharded_model(
    folder: str,
    config: ModelConfig,
    device: torch.device,
    *,
    trained: bool,
    resharded: bool = True,
    expert_size: int = 1,
    context_size: int = 1,
    base: SharedBase | Fp8Base | None = None,
) -> Any:
    """Return the model of a folder, sharded over all ranks; trainable, or frozen for scoring.

    Weights that are trained are float32, others of the type that they are computed in.

    resharded      free the gathered weights of a layer after its forward
    expert_size    ranks that the experts of each layer are divided among (expert_parallel.py)
    context_size   ranks that share a micro-batch (ulysses.py)
    base           holds the weights that are not trained, on the only rank: they are not sharded. None with
                   `model.base_dtype`: it is made here
    """
    whole, has_adapters = None, trained and bool(config.lora_rank)
    dtype: torch.dtype = getattr(torch, config.dtype)
    seed = from_rank_0(lambda: int(torch.randint(2**62, ())), "drawing a seed") if has_adapters else 0
    with raise_on_all_ranks("loading the model"):
        settings = read_config(folder, trust_remote_code=config.trust_remote_code)
        _without_randomness(settings)
        check_experts(folder)
        has_scales = without_scales(settings)
        model = _empty(settings, config)
        is_logged = trained and dist.get_rank() == 0
        attention.use_attention(model, config.attn_implementation, device, dtype, log=is_logged)
        attention.check_context_parallel(model, context_size)
        if expert_size > 1:
            expert_parallel.check_experts_can_be_divided(model, expert_size, config.router_family)
        else:
            experts.use_experts(model, device, log=is_logged, has_adapters=has_adapters)
        shards = FolderShards.of(folder, model, has_scales=has_scales) if can_convert() else None
        if has_scales and shards is None:
            raise ModelError(
                f"weights in 8 bits cannot be read from {folder}",
                expected="safetensors files with the names and shapes of the model's checkpoint, and Transformers 5",
                remedy="Complete the folder, or convert it to bfloat16 first",
            )
        if trained and config.base_dtype is not None:
            check_alone(config.base_dtype, dist.get_world_size())
            base = Fp8Base(names_in_8_bits(model, config.router_family), device)
        model = _prepared(model, config, trained)  # adapters that cannot be added fail early, here
        if has_adapters and model.config._experts_implementation == experts.NAME:
            expert_adapters.move_adapters(model)
        if shards is not None and has_adapters:
            whole = lora.initialized(_prepared(_empty(settings, config), config, trained), seed)
        elif shards is None and dist.get_rank() == 0:
            whole = _prepared(load_model(folder, **_options(settings, config)), config, trained)
    if trained and config.gradient_checkpointing in (True, "offload"):  # "auto" is decided before the start
        recompute_layers(model, offloaded=config.gradient_checkpointing == "offload")
    if can_mix_dtypes() or base is not None:
        _narrow_frozen(model, dtype)
    frozen = [] if base is None else take_out(model)
    grid = rank_grid(expert_size, device, "backend.expert_parallel") if expert_size > 1 else None
    _shard(model, dtype, device, grid, resharded)
    model.to_empty(device=device)
    if shards is None:
        _fill(model, whole)
    else:
        with raise_on_all_ranks("reading the weights"):
            _read(model, shards, whole)
    with raise_on_all_ranks("reading the frozen weights"):
        if base is not None:
            _put_back(base, frozen, shards, whole)
    with raise_on_all_ranks("checking the weights"):
        check_finite(((name, _checked(model, name, parameter)) for name, parameter in model.named_parameters()), folder)
    if isinstance(base, Fp8Base):
        logger.info("%s", base.describe())
    return model


def _checked(model: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """Return what has the values of a parameter that are not finite: of one in 8 bits, its scales."""
    return model.get_buffer(name + SCALES) if parameter.dtype == CODES else local_part(parameter)


def can_mix_dtypes() -> bool:
    """Whether FSDP2 shards frozen weights of another type beside trained ones; the oldest torch seen to."""
    return release_numbers(torch.__version__) >= (2, 13)


def _narrow_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep weights that are not trained in the type of the computation: FSDP2 would cast float32 ones in each pass."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def _read(model: Any, shards: FolderShards, adapters: nn.Module | None) -> None:
    """Fill the shards of this rank from the folder; adapters, which it does not have, from a model that holds them."""
    compute_constants(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        local, first = parameter.to_local(), row_offset(parameter)
        plain = lora.plain_name(name)
        if plain in shards:
            local.copy_(shards.rows(plain, tuple(parameter.shape), first, len(local)))
        else:
            assert adapters is not None, f"{name} is not in the folder"
            local.copy_(adapters.get_parameter(name)[first : first + len(local)])
    for name, buffer in model.named_buffers():
        if (plain := lora.plain_name(name)) in shards:
            buffer.copy_(shards.whole(plain))


@torch.no_grad()
def _put_back(base: SharedBase | Fp8Base, frozen: Frozen, shards: FolderShards | None, whole: nn.Module | None) -> None:
    """Give a model its frozen parameters, read one after the other from the folder, or from a model that holds them."""
    for owners, parameter in frozen:
        plain, shape = lora.plain_name(owners[0].name), tuple(parameter.shape)
        if shards is not None and plain in shards:
            values = shards.rows(plain, shape, 0, shape[0])
        else:
            assert whole is not None, f"{plain} is not in the folder"
            values = whole.get_parameter(owners[0].name)
        base.put_back(owners, plain, values.to(parameter.dtype))


def row_offset(tensor: DTensor) -> int:
    """Return the first row that this rank holds."""
    rows = expert_parallel.rows_of_rank(tensor, dist.get_rank())
    assert len(rows) == len(tensor.to_local()), f"sharded as {tensor.placements}"
    return rows.start


def _prepared(model: Any, config: ModelConfig, trained: bool) -> Any:
    if not trained:
        model.requires_grad_(False)
    elif config.lora_rank:
        lora.add_adapters(model, config)
    return model


def _options(settings: Any, config: ModelConfig) -> dict[str, Any]:
    return {
        "config": deepcopy(settings),  # a model writes its attention into it, and others that share it would follow
        "trust_remote_code": config.trust_remote_code,
        "dtype": torch.float32,
        "attn_implementation": attention.of_transformers(config.attn_implementation),
    }


def _empty(settings: Any, config: ModelConfig) -> Any:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return build_model(**_options(settings, config))


@torch.no_grad()
def _fill(model: nn.Module, whole: nn.Module | None) -> None:
    """Give every rank its shards of the weights, and all buffers, of the model that rank 0 has loaded."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if whole is not None:
            full.copy_(whole.get_parameter(name))
        if expert_parallel.is_divided(parameter):
            dist.broadcast(full, 0)
            first, local = row_offset(parameter), parameter.to_local()
            local.copy_(full[first : first + len(local)])
            continue
        shard = distribute_tensor(full, parameter.device_mesh, parameter.placements)  # scattered by rank 0
        parameter.to_local().copy_(shard.to_local())
    for name, buffer in model.named_buffers():
        if whole is not None:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)


def _shard(model: Any, dtype: torch.dtype, device: torch.device, ranks: DeviceMesh | None, resharded: bool) -> None:
    """Shard a model over all ranks; its experts over the grid of ranks, if there is one."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ModelError(
            "nothing says which modules are the model's layers",
            expected="_no_split_modules of the Transformers model",
            found=type(model).__name__,
        )
    if ranks is not None:
        # Gate weights stay as the router computes them: the experts' inputs are not cast.
        expert_policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
        for module in expert_parallel.divide_experts(model, ranks):
            fully_shard(module, mesh=ranks[ACROSS], mp_policy=expert_policy, reshard_after_forward=resharded)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=resharded)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def free_gathered(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that FSDP2 gathers one after the other; experts are part of their layer."""
    for name, module in model.named_modules():
        if name and isinstance(module, FSDPModule) and not expert_parallel.is_expert_parallel(module):
            yield name, module
