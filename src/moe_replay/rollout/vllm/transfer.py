"""What a worker of vLLM does with the chunks of a transfer."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from moe_replay.errors import EngineError
from moe_replay.rollout.vllm.copy_plan import CopyPlan, CopyRecorder
from moe_replay.rollout.weights.receiver import WeightReceiver
from moe_replay.rollout.weights.staging import device_id
from moe_replay.rollout.weights.transfer import TransferError

logger = logging.getLogger("vllm.moe_replay")  # has a handler in vLLM's processes


class TransferLoader:
    """Loads transfers into one worker's model, the first by vLLM's loaders, later ones by their copies where possible.

    worker   vLLM's, with the methods of `WeightUpdates`
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._device: torch.device = worker.model_runner.device
        self._receiver: WeightReceiver | None = None
        self._plan: CopyPlan | None = None
        self._recorder: CopyRecorder | None = None
        self._by_plan = False
        self._names: set[str] = set()

    def device_id(self) -> str:
        """Return the name of the worker's device."""
        return f"{self._device.type} {device_id(self._device)}"

    def join(self, settings: str) -> None:
        """Take part in a transfer."""
        from moe_replay.rollout.weights.transfer_messages import TransferSettings

        self.leave()
        self._by_plan, self._names = self._plan is not None, set()
        if not self._by_plan and self._learns():
            self._recorder = CopyRecorder()
        parallel = self._worker.vllm_config.parallel_config  # ranks are numbered in each replica anew
        index = int(parallel.data_parallel_rank) * int(parallel.world_size) + int(self._worker.rank)
        self._receiver = WeightReceiver(TransferSettings.model_validate_json(settings), index, self._device)

    @property
    def joined(self) -> bool:
        """Whether a transfer is running."""
        return self._receiver is not None

    @property
    def by_plan(self) -> bool:
        """Whether the running transfer needs none of vLLM's loaders."""
        return self._by_plan

    def _learns(self) -> bool:
        """Whether parameters are all that vLLM computes with: on CPUs and with quantization it keeps other forms."""
        runner = self._worker.model_runner
        return self._device.type == "cuda" and runner.model_config.quantization is None

    def receive(self, message: str) -> None:
        """Load one chunk."""
        if self._receiver is None:
            raise EngineError("no transfer has been joined")
        tensors = self._receiver.receive(message)
        self._names.update(name for name, _ in tensors)
        if self._plan is not None and self._by_plan:
            self._plan.load(tensors)
            self._receiver.acknowledge()
            return
        own = [(name, tensor.clone()) for name, tensor in tensors]  # layers keep them until they are complete
        self._receiver.acknowledge()
        if self._recorder is None:
            self._worker.replay_load_tensors(dict(own))
            return
        self._recorder.announce(own)
        with self._recorder:
            self._worker.replay_load_tensors(dict(own))

    def recording(self) -> AbstractContextManager[Any]:
        """Record what is done to layers inside of this context, if the running transfer is recorded."""
        return self._recorder or nullcontext()

    def fail(self, text: str) -> None:
        """Report to the sender that this worker has failed."""
        if self._receiver is not None:
            self._receiver.fail(text, lost=text.startswith(TransferError.__name__))
        self._receiver = self._recorder = None

    def missing(self) -> list[str]:
        """Return the tensors that earlier updates had and this one has not."""
        return [] if self._plan is None else sorted(self._plan.infos.keys() - self._names)

    def finish_by_plan(self) -> None:
        """Compute what attention layers derive from their weights."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        runner = self._worker.model_runner
        for module in runner.get_model().modules():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(runner.model_config.dtype)

    def leave(self, *, complete: bool = False) -> None:
        """End the transfer; after a complete one its copies are known."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        recorder, self._recorder = self._recorder, None
        if complete and recorder is not None:
            self._plan, reason = recorder.plan()
            logger.info("weights are loaded by vLLM's loaders: %s", reason or "the next time by their copies")
