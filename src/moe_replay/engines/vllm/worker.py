"""Extension of vLLM's workers that loads new weights in place, chunk by chunk.

vLLM mixes `WeightUpdates` into its worker (`worker_extension_cls`) and calls the methods by name. They return an error
text instead of raising: an exception of a worker arrives as a bare `Exception` without its type.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from moe_replay.engines.vllm.cpu import forget_packed_experts
from moe_replay.engines.vllm.lora import ADAPTER_ID, ADAPTER_NAME, adapted_layers, unadapted_routers
from moe_replay.engines.vllm.selftest import RouterWatch, unhooked_layers
from moe_replay.engines.vllm.shared import checkpoint_rows
from moe_replay.engines.vllm.weights import CopiedWeights, TransferLoader
from moe_replay.utils.processes import end_with_parent

if TYPE_CHECKING:
    from moe_replay.weights.shared import ExportedWeights

OK = ""
_NOT_ADAPTED = (
    "vLLM computes {} routers without their adapters because experts have adapters too, among them {}; "
    "set rollout.lora = false, or leave routers or experts out of model.lora_target_modules"
)
_NOT_STARTED = "no update has been started"
_SHARED = "the trainer computes with the memory of these weights; an update of them would change its own"


def _returning_errors(work: Callable[..., str]) -> Callable[..., str]:
    """Have a method return the text of its error; weights that do not fit the model can make vLLM raise anything."""

    @wraps(work)
    def method(*arguments: Any) -> str:
        try:
            return work(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return method


class WeightUpdates:
    """Replaces the weights of a running model: `begin`, any number of `load`, `finish`."""

    model_runner: Any  # vLLM's
    vllm_config: Any
    replay_updating: bool = False
    replay_copied: CopiedWeights
    replay_by_plan: bool = False
    replay_transfer: TransferLoader | None = None
    replay_watch: RouterWatch | None = None
    replay_shared: ExportedWeights | None = None

    def __new__(cls, *arguments: Any, **options: Any) -> WeightUpdates:
        """Have the worker end with the process that started it, before it allocates anything."""
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            end_with_parent(parent.pid)
        return super().__new__(cls)

    def replay_allow_amx(self) -> str:
        """Request permission for AMX tile registers, which vLLM's bfloat16 attention uses without requesting it.

        Unless something else in the process has requested it before, the worker dies of an illegal instruction.
        """
        torch.cpu._init_amx()
        return OK

    def replay_watch_routers(self) -> str:
        """Record what the routers compute from now on, for the self-test of route capture."""
        routes = getattr(self, "replay_routes", None)  # of our capture
        if routes is not None:
            routes.forget_forward()
        self.replay_watch = RouterWatch(self.model_runner.get_model())
        return OK

    def replay_watched(self, settings: str, tokens: str) -> str:
        """Stop recording; return the experts that the routers chose, by layer, and layers without a hook, as JSON."""
        watch = self.replay_watch
        assert watch is not None, "replay_watch_routers comes first"
        self.replay_watch = None
        watch.stop()
        by_layer = {int(layer): tuple(values) for layer, values in json.loads(settings).items()}
        unhooked = unhooked_layers(self.model_runner.get_model())
        return json.dumps({"chosen": watch.chosen(by_layer, int(tokens)), "unhooked": unhooked})

    def replay_device(self) -> str:
        """Return type and id of this worker's device, and the devices whose memory it can open, a line each."""
        return self._replay_loader().device_id()

    def replay_share_weights(self) -> str:
        """Return what the trainer opens this worker's weights with, as JSON; they stay where they are from now on."""
        from moe_replay.weights.shared import ExportedWeights

        if self.replay_shared is None:
            runner = self.model_runner
            self.replay_shared = ExportedWeights(checkpoint_rows(runner.get_model()), runner.device)
        return self.replay_shared.message()

    def replay_shared_digests(self) -> str:
        """Return the digests of the exported weights as JSON."""
        assert self.replay_shared is not None, "replay_share_weights comes first"
        return json.dumps(self.replay_shared.digests())

    # ---- updates ------------------------------------------------------------------------------------------------

    @_returning_errors
    def replay_begin_update(self) -> str:
        """Start an update; nothing can be sampled until `finish`."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.replay_shared is not None:
            return _SHARED
        if self.replay_updating and not self.replay_by_plan:
            self._replay_finish_layers()  # of an interrupted update: its weights are overwritten now
        self.replay_by_plan = False
        model = self.model_runner.get_model()
        forget_packed_experts(model)
        with self._replay_vllm_config():
            initialize_layerwise_reload(model)
        self.replay_copied = CopiedWeights(model)
        self.replay_updating = True
        return OK

    @_returning_errors
    def replay_load(self, file: str) -> str:
        """Load the tensors of one safetensors file, under their names in the checkpoint."""
        from safetensors.torch import load_file

        if not self.replay_updating:
            return _NOT_STARTED
        with self._replay_vllm_config(), torch.device(self.model_runner.device):
            self.replay_load_tensors(load_file(file))
        return OK

    @_returning_errors
    def replay_join(self, settings: str) -> str:
        """Start an update by a transfer, and wait until all participants have joined."""
        if self.replay_shared is not None:
            return _SHARED
        loader = self._replay_loader()
        loader.join(settings)
        if not loader.by_plan:
            return self.replay_begin_update()
        if self.replay_updating and not self.replay_by_plan:
            self._replay_finish_layers()  # of an interrupted update
        self.replay_updating = self.replay_by_plan = True
        return OK

    def replay_receive(self, message: str) -> str:
        """Load one chunk of the transfer."""
        error = self._replay_receive(message)
        if error:
            self._replay_loader().fail(error)
        return error

    @_returning_errors
    def _replay_receive(self, message: str) -> str:
        if not self.replay_updating:
            return _NOT_STARTED
        with self._replay_vllm_config(), torch.device(self.model_runner.device):
            self._replay_loader().receive(message)
        return OK

    @_returning_errors
    def replay_load_adapter(self, folder: str) -> str:
        """Load a PEFT folder in place of the current adapter."""
        from vllm.lora.request import LoRARequest

        if not self.model_runner.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, folder, load_inplace=True)):
            return "the adapter was not loaded"
        manager = self.model_runner.lora_manager._adapter_manager
        layers = adapted_layers(self.model_runner)
        all_here = self.vllm_config.parallel_config.pipeline_parallel_size == 1  # else some are on other ranks
        loaded = manager.get_adapter(ADAPTER_ID).loras.keys()
        unused = sorted(loaded - layers.keys()) if all_here else []
        if unused:
            return f"no room for {len(unused)} modules of the adapter, among them {unused[0]}"
        unadapted = sorted(loaded & unadapted_routers(layers))
        return _NOT_ADAPTED.format(len(unadapted), unadapted[0]) if unadapted else OK

    @_returning_errors
    def replay_finish_update(self) -> str:
        """Convert all weights to the layout of the kernels; an error text if some are missing."""
        if not self.replay_updating:
            return _NOT_STARTED
        loader = self.replay_transfer
        if loader is not None and loader.joined and loader.by_plan:
            error = self._replay_finish_copies(loader)
        else:
            error = self._replay_finish_layers()
        if loader is not None:
            loader.leave(complete=not error)
        return error

    def replay_load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load tensors by vLLM's own loaders, with its configuration set."""
        self.replay_copied.expect(tensors)
        self.replay_copied.process(self.model_runner.get_model().load_weights(iter(tensors.items())))

    def _replay_vllm_config(self) -> AbstractContextManager[Any]:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)

    def _replay_loader(self) -> TransferLoader:
        if self.replay_transfer is None:
            self.replay_transfer = TransferLoader(self)
        return self.replay_transfer

    def _replay_finish_copies(self, loader: TransferLoader) -> str:
        missing = loader.missing()
        if missing:
            return f"{len(missing)} tensors missing, among them {', '.join(missing[:3])}"
        with self._replay_vllm_config(), torch.device(self.model_runner.device):
            loader.finish_by_plan()
        self.replay_updating = False
        return OK

    def _replay_finish_layers(self) -> str:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        missing, tied = _unloaded(model)
        with self._replay_vllm_config(), torch.device(self.model_runner.device):
            with self._replay_loader().recording():
                finalize_layerwise_reload(model, self.model_runner.model_config)
            for name in tied:
                module: Any = model.get_submodule(name)
                module.quant_method.process_weights_after_loading(module)  # on CPU it computes with a packed copy
        self.replay_updating = False
        return f"weights of {len(missing)} modules missing, among them {', '.join(missing[:3])}" if missing else OK


def _unloaded(model: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Return the modules that lack some of their weights, and those that got them from a module they are tied to.

    vLLM itself would silently keep the old weights of the former, or part of them.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    incomplete: dict[str, set[int]] = {}  # module -> addresses of its weights
    complete: set[int] = set()
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        parameters = list(module.parameters(recurse=False))
        if is_deferred_attention_layer(module) or not parameters:  # scales that no checkpoint has; nothing to load
            continue
        if info.kernel_tensors is None:  # loaded completely
            complete |= {parameter.data_ptr() for parameter in parameters}
            continue
        expected = sum(parameter.numel() for parameter in parameters)
        if "num_embeddings_padded" in vars(module):  # has rows for tokens that no checkpoint has, or these alone
            rows: Any = module.shard_indices
            expected = min(1, int(rows.num_org_elements))
        memory = {parameter.data_ptr() for parameter in info.kernel_tensors[0].values()}
        if info.load_numel < expected:
            incomplete[name] = memory
        else:
            complete |= memory
    tied = [name for name, memory in incomplete.items() if memory <= complete]  # an output head to the embedding
    return [name for name in incomplete if name not in tied], tied
