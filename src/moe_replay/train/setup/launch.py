"""The device, the process group and the backend of this rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from moe_replay.distributed.collectives import open_control_group
from moe_replay.distributed.rank_watch import SILENCE_S, RankWatch
from moe_replay.distributed.ranks import from_rank_0, world_size
from moe_replay.errors import ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology
from moe_replay.train.backends.base import Backend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup.memory_plan import ROOM, with_memory_used
from moe_replay.utils.device import accelerator, collective_backends, device_module, device_type
from moe_replay.utils.misc import GIB, one_line
from moe_replay.utils.processes import on_end_of_parent
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.model_sizes import ModelSizes


class LaunchError(MoeReplayError):
    """A device that is not available, or ranks that cannot be connected."""


def device_kind(config: TrainConfig) -> str:
    """Return the type of the devices that ranks of this machine compute on; raise if there are too few."""
    try:
        kind = device_type(config.backend.device)
    except MissingExtraError:
        raise
    except MoeReplayError as error:
        raise LaunchError(
            "no GPU is available" if config.backend.device == "cuda" else error.problem,
            expected=f"backend.device = {config.backend.device!r}",
            found=error.found,
            remedy="Set backend.device = 'cpu'",
        ) from error
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if kind != "cpu" and ranks > (present := torch.accelerator.device_count()):
        raise LaunchError(
            f"more ranks than {kind} devices on this machine",
            expected=f"at most {present}, one per device",
            found=f"{ranks} ranks",
            remedy="Lower --nproc-per-node",
        )
    return kind


def choose_device(config: TrainConfig) -> torch.device:
    """Return the device of this rank: its own accelerator, or the CPU."""
    kind = device_kind(config)
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    device_module(device).set_device(device)
    return device


def crowding(config: TrainConfig) -> Iterator[str]:
    """Yield a warning if this machine has fewer cores than ranks that compute on them."""
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(os.sched_getaffinity(0))
    is_on_cpu = (config.backend.device if config.backend.device != "auto" else accelerator() or "cpu") == "cpu"
    if is_on_cpu and ranks > cores:
        yield f"{ranks} ranks share {cores} CPU core{'s' * (cores > 1)}; lower --nproc-per-node"


def end_with_launcher() -> None:
    """End this rank when its torchrun agent dies; nothing else would end it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        on_end_of_parent(_end)


def _end() -> None:
    os.write(2, f"rank {os.environ.get('RANK')}: torchrun died, exiting\n".encode())
    os._exit(ExitStatus.FAILED)


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Use deterministic kernels where there are some, if wanted; Megatron-Core follows torch's setting."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def process_group(device: torch.device, silence_s: float = SILENCE_S) -> Iterator[RankWatch]:
    """Open the process group of all ranks: an existing one, the launcher's (torchrun), or this process alone.

    Control messages have their own group. Ranks tell each other of failures; the processes of a launcher's are
    watched too, those of an existing group are left to its owner.

    silence_s   heartbeat timeout; a silent rank is treated as dead
    """
    watch, is_own = RankWatch(), not dist.is_initialized()
    if is_own:
        _join(device)
    try:
        with open_control_group():
            watch.start(silence_s, processes=is_own)
            yield watch
    finally:
        if is_own:
            dist.destroy_process_group()
            _forget_shardings()
        watch.stop()


def _join(device: torch.device) -> None:
    """Open the process group of a launcher's ranks, or of this process alone."""
    backend = collective_backends(device)
    if "RANK" in os.environ:
        _check_rank(os.environ["RANK"], os.environ.get("WORLD_SIZE", ""))
        try:
            store, rank, world_size = next(dist.rendezvous("env://"))
            dist.init_process_group(backend, store=_of_this_start(store), rank=rank, world_size=world_size)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"the ranks cannot be connected: {one_line(error)}",
                remedy="Start with torchrun; --master-port must be free, and --master-addr must be the first node",
            ) from error
        return
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise LaunchError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but RANK is not set",
            expected="both, or neither for one rank",
            remedy="Start with torchrun, or unset WORLD_SIZE",
        )
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _forget_shardings() -> None:
    """Empty this thread's cache of DTensor, which keeps groups that were destroyed.

    A process that another thread forks would end them with this thread's state, and crash: their threads are not there.
    """
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # torch 2.6 has no such cache
    if clear is not None:
        clear()


def _check_rank(rank: str, size: str) -> None:
    """Raise for a rank that the others do not wait for: it would wait for them."""
    if not rank.isdecimal() or not size.isdecimal() or int(rank) >= int(size):
        raise LaunchError(
            "RANK and WORLD_SIZE do not fit together",
            expected="0 <= RANK < WORLD_SIZE",
            found=f"RANK = {rank!r}, WORLD_SIZE = {size!r}",
            remedy="Start with torchrun",
        )


def _of_this_start(store: dist.Store) -> dist.Store:
    """Return the part of the launcher's store for this start of the ranks.

    torchrun keeps one store when it restarts ranks (--max-restarts): in it they would find the addresses of those
    that have died.
    """
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def with_memory_decided(
    config: TrainConfig, folder: str, device: torch.device, tell: Callable[[str], None]
) -> TrainConfig:
    """Return the settings without "auto" where memory is traded for time. All ranks call it; rank 0 decides."""
    model, backend = config.model, config.backend
    recomputed, resharded = model.gradient_checkpointing, backend.reshard_after_forward
    if device.type == "cpu":
        recomputed, resharded = recomputed != "auto" and recomputed, resharded is not False

    def decide() -> tuple[Any, Any, str]:
        total = device_module(device).mem_get_info(device)[1] / GIB
        try:
            settings = read_config(folder, trust_remote_code=model.trust_remote_code)
            topology = MoeTopology.from_config(settings, load_router_family(model.router_family))
            sizes = ModelSizes.of(settings, topology, trust_remote_code=model.trust_remote_code)
            chosen = with_memory_used(config, sizes, gpus=world_size(), gpu_gib=total)
        except (MoeReplayError, AttributeError, TypeError) as error:
            return True, True, f"the memory of the run cannot be estimated: {one_line(error)}"
        reason = f"so that {ROOM:.0%} of {total:.0f} GiB stay free, by estimate"
        return chosen.model.gradient_checkpointing, chosen.backend.reshard_after_forward, reason

    if "auto" in (recomputed, resharded):
        recomputed, resharded, reason = from_rank_0(decide, "deciding what memory is used for")
        gathered = "" if backend.kind == "megatron" else f", gathered weights are {'freed' if resharded else 'kept'}"
        tell(f"layers are {'' if recomputed else 'not '}recomputed{gathered} ({reason})")
    return config.model_copy(
        update={
            "model": model.model_copy(update={"gradient_checkpointing": recomputed}),
            "backend": backend.model_copy(update={"reshard_after_forward": resharded}),
        }
    )


def open_backend(
    config: TrainConfig,
    folder: str,
    device: torch.device,
    tell: Callable[[str], None] = lambda text: None,
    export: str | None = None,
) -> Backend:
    """Return the backend with this rank's part of the policy, loaded from a folder.

    export   weights of the engine whose memory holds the frozen ones (`Engine.share_weights`), with FSDP2
    """
    config = with_memory_decided(config, folder, device, tell)
    tell(f"loading the policy: {folder}")
    began, base = time.monotonic(), None
    if config.backend.kind == "megatron":
        from moe_replay.train.backends.megatron import MegatronBackend

        backend: Backend = MegatronBackend(config, folder, device)
    else:
        from moe_replay.train.backends.fsdp import FsdpBackend
        from moe_replay.train.backends.shared_base import SharedBase

        base = None if export is None else SharedBase(export, device)
        backend = FsdpBackend(config, folder, device, base)
    tell(f"policy: ready after {time.monotonic() - began:.0f} s")
    for line in [] if base is None else base.describe():
        tell(line)
    return backend
