"""Frozen weights of a policy with adapters that are the engine's: its memory, which the trainer computes with too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from moe_replay.errors import EngineError, ExitStatus
from moe_replay.train.backends.frozen import Owner, put_back
from moe_replay.utils.misc import gib_or_kib
from moe_replay.weights.shared import REMEDY, OpenedWeights, digests, place_of, same_bits


class SharedWeightsError(EngineError):
    """Memory of frozen weights that trainer and engine share has changed, or they see different memory."""

    exit_status = ExitStatus.CHECK_FAILED


class SharedBase:
    """The frozen parameters of a model on the only rank of a trainer, in memory of the engine where it has them.

    A parameter is a view of that memory if it has the type and shape of the engine's tensor in the same place of the
    model, and the same bits as the checkpoint; otherwise it is a copy.

    export   as `Engine.share_weights` returns it
    """

    def __init__(self, export: str, device: torch.device) -> None:
        self._device = device
        self._opened = OpenedWeights(export, device).tensors
        self._views: dict[str, Tensor] = {}  # by place in the model
        self._copied: dict[str, dict[str, int]] = defaultdict(dict)  # by reason: bytes by name
        self._digests: dict[str, str] = {}
        self._parameters: list[nn.Parameter] = []

    # ---- loading ------------------------------------------------------------------------------------------------

    def put_back(self, owners: list[Owner], name: str, values: Tensor) -> None:
        """Give modules their parameter: a view of the engine's memory, or a copy of these values.

        name     of the parameter in the model without adapters
        values   as the checkpoint has them, in the type of the computation
        """
        view, reason = self._find(name, values)
        if view is None:
            view = values.to(self._device, copy=True)
            self._copied[reason][name] = values.nbytes
        else:
            self._views[place_of(name)] = view
        # `.data`: else autograd's version counter is that of the whole memory, which `set_` of one parameter moves.
        self._parameters.append(put_back(owners, view.data))

    def _find(self, name: str, values: Tensor) -> tuple[Tensor | None, str]:
        """Return the engine's memory with these values, or None and why there is none."""
        view = self._opened.get(place_of(name))
        if view is None:
            return None, "repacked or under another name in the engine"
        if view.dtype != values.dtype:
            return None, f"{_word(view.dtype)} in the engine, {_word(values.dtype)} in the trainer"
        if view.ndim == values.ndim and len(view) > len(values):
            view = view[: len(values)]  # rows of padding: the engine's vocabulary
        if view.shape != values.shape:
            return None, "of another shape in the engine"
        if not same_bits(view, values.to(self._device)):
            return None, "of other values in the engine: stored in another order, or converted"
        return view, ""

    # ---- the probe ----------------------------------------------------------------------------------------------

    def check(self, of_engine: Mapping[str, str]) -> None:
        """Raise unless the current digests of both sides are those of the first comparison."""
        of_trainer = digests(self._views)
        self._digests = self._digests or of_trainer
        for side, current in {"trainer": of_trainer, "engine": self._of_rows(of_engine)}.items():
            changed = [place for place, original in self._digests.items() if current.get(place, original) != original]
            if changed:
                layer, _, weight = changed[0].partition(":")
                first = f"{weight} of layer {layer}" if layer else weight
                raise SharedWeightsError(
                    f"frozen weights that trainer and engine share have changed, as the {side} sees them",
                    found=f"{len(changed)} of {len(of_trainer)} tensors, the first: {first}",
                    remedy=f"Adapters of this step may come of other weights: resume from a checkpoint. {REMEDY}",
                )

    def _of_rows(self, of_engine: Mapping[str, str]) -> dict[str, str]:
        """Return the engine's digests of tensors that are shared whole."""
        return {
            place: of_engine.get(place, "missing")
            for place, view in self._views.items()
            if view.shape == self._opened[place].shape
        }

    # ---- in words -----------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the engine's memory that the trainer computes with."""
        return sum(view.nbytes for view in self._views.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes of frozen weights that the trainer has a copy of."""
        return sum(size for of_reason in self._copied.values() for size in of_reason.values())

    def describe(self) -> Iterator[str]:
        """Yield lines for the console: what is shared, and what is copied and why."""
        yield (
            f"frozen weights: {gib_or_kib(self.num_bytes)} in {len(self._views)} tensors are the engine's memory, "
            f"{gib_or_kib(self.copied_bytes)} are copies"
        )
        for reason, of_reason in self._copied.items():
            kinds = sorted({name.rpartition("layers.")[2].partition(".")[2] or name for name in of_reason})
            first_kinds = ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")
            yield f"copied: {gib_or_kib(sum(of_reason.values()))} in {len(of_reason)} tensors ({first_kinds}), {reason}"

    def release(self) -> None:
        """Let go of the engine's memory, before the engine ends; the model cannot be used any more."""
        for parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)
        self._parameters, self._views, self._opened = [], {}, {}
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
