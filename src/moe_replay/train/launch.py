"""The device, the process group and the backend of this rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moe_replay.distributed.control import open_control_group
from moe_replay.distributed.rank_watch import SILENCE_S, RankWatch
from moe_replay.errors import ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.train.backends.base import Backend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.device import collective_backends, device_module, device_type
from moe_replay.utils.messages import one_line
from moe_replay.utils.processes import on_end_of_parent


class LaunchError(MoeReplayError):
    """A device that is not available, or ranks that cannot be connected."""


def choose_device(config: TrainConfig) -> torch.device:
    """Return the device of this rank: its own accelerator, or the CPU."""
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
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    device_module(device).set_device(device)
    return device


def end_with_launcher() -> None:
    """End this rank when the agent of torchrun that started it is gone, since nothing else would."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        on_end_of_parent(_end)


def _end() -> None:
    os.write(2, f"rank {os.environ.get('RANK')}: torchrun is gone: ending\n".encode())
    os._exit(ExitStatus.FAILED)


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Use deterministic kernels where there are some, if wanted; Megatron-Core follows torch's setting."""
    if not wanted:
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

    silence_s   seconds without a sign of life after which another rank counts as lost
    """
    watch = RankWatch()
    if dist.is_initialized():
        try:
            with open_control_group():
                watch.start(silence_s, processes=False)
                yield watch
        finally:
            watch.stop()
        return
    backend = collective_backends(device)
    if "RANK" in os.environ:
        try:
            store, rank, world_size = next(dist.rendezvous("env://"))
            dist.init_process_group(backend, store=_of_this_start(store), rank=rank, world_size=world_size)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"the ranks cannot be connected: {one_line(error)}",
                remedy="Start with torchrun; --master-port must be free, and --master-addr that of the first machine",
            ) from error
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with open_control_group():
            watch.start(silence_s)
            yield watch
    finally:
        dist.destroy_process_group()
        watch.stop()


def _of_this_start(store: dist.Store) -> dist.Store:
    """Return the part of the launcher's store for this start of the ranks.

    torchrun keeps one store when it restarts ranks (--max-restarts): in it they would find the addresses of those
    that have died.
    """
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def open_backend(config: TrainConfig, folder: str, device: torch.device) -> Backend:
    """Return the backend with this rank's part of the policy, loaded from a folder."""
    if config.backend.kind == "megatron":
        from moe_replay.train.backends.megatron import MegatronBackend

        return MegatronBackend(config, folder, device)
    from moe_replay.train.backends.fsdp import FsdpBackend

    return FsdpBackend(config, folder, device)
