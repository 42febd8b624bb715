"""Model folders of Transformers: read completely, or refused with the names of what is missing.

Transformers initializes weights that a folder lacks at random, and reports it in a table; here it is an error.
Code that comes with a model is run where `trust_remote_code` says so, and nowhere else: there is no prompt for it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies
from zipfile import is_zipfile

import torch
from torch import Tensor

from moe_replay.errors import MoeReplayError, needs_extra
from moe_replay.utils.misc import one_line
from moe_replay.weights.checkpoint import CheckpointForm

Shape = tuple[int, ...]

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_REMOTE_CODE = "Set model.trust_remote_code = true (--trust-remote-code) if you trust the code of the model"
_COMPLETE = "Complete the folder, or correct its config.json"
_SHOWN = 3
HUB_ANSWERS_S = 5.0
SAME_MODELS = {"kimi_k2": "deepseek_v3"}
"""Published `model_type` -> that of the same model in Transformers; its own code is not needed."""
_FLOATS = ("BF16", "F16", "F32", "F64")  # as safetensors names them

logger = logging.getLogger(__name__)


class ModelError(MoeReplayError):
    """A model folder that cannot be read, is incomplete or damaged, or holds no causal language model."""


# ---- config ----------------------------------------------------------------------------------------------------------


def read_config(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the Transformers config of a folder or of a name that Transformers can load."""
    check_files(Path(folder))
    from_transformers = _transformers()
    offline = {} if Path(folder).exists() or _hub_answers() else {"local_files_only": True}
    try:
        config = _renamed(Path(folder)) or from_transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, **offline
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, *_strict_errors()) as error:
        raise ModelError(
            "the model cannot be read",
            expected="a folder with config.json, or a name that Transformers can load",
            found=f"{str(folder)!r}: {one_line(error)}",
            remedy=_remedy(error) or (None if Path(folder).exists() else "Set model.path"),
        ) from error
    _check_numbers(config, folder)
    return config


def _renamed(folder: Path) -> Any:
    """Return the config of a folder whose model Transformers has under another name; None: under its own, or not."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # Transformers says what is wrong with it
        return None
    if not isinstance(content, dict) or (name := SAME_MODELS.get(str(content.get("model_type")))) is None:
        return None
    settings = {key: value for key, value in content.items() if key not in ("model_type", "auto_map")}
    return _transformers().AutoConfig.for_model(name, **settings)


def check_files(folder: Path) -> None:
    """Raise for a pipe or a device in a model folder: reading it may never end."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} is not a file", remedy=_COMPLETE)


def _hub_answers() -> bool:
    """Return whether the Hub can be reached: huggingface_hub tries for a minute or more before it gives up."""
    if getproxies():
        return True  # names may be resolved by the proxy alone
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
        socket.create_connection((endpoint.hostname or "", port), timeout=HUB_ANSWERS_S).close()
    except (OSError, ValueError):
        return False
    return True


def _check_numbers(config: Any, folder: str | Path) -> None:
    """Raise if a size is text, which Transformers before 5 does not notice."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if isinstance(value := getattr(config, name, None), str):
            raise ModelError(
                f"{name} in {Path(folder) / 'config.json'} is not a number",
                expected="a whole number",
                found=repr(value),
                remedy=_COMPLETE,
            )


def build_model(config: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the causal language model of a config, with weights as its constructor makes them."""
    with _refused(f"a {config.model_type} model"):
        return _transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


# ---- weights ---------------------------------------------------------------------------------------------------------


def load_model(folder: str | Path, *, config: Any = None, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the causal language model of a folder or name; raise unless the folder has every weight of it.

    options   of Transformers' `from_pretrained`: dtype, device_map, attn_implementation, ...
    """
    if config is None:
        config = read_config(folder, trust_remote_code=trust_remote_code)
    check_experts(folder)
    with _refused(str(folder)), _without_load_report():
        model, report = _transformers().AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    _check_report(model, report, folder)
    _check_stored_dtypes(model, Path(folder))
    return model


def check_finite(named: Iterable[tuple[str, Tensor]], source: str | Path) -> None:
    """Raise if a weight holds NaN or an infinity."""
    bad = [name for name, tensor in named if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ModelError(
            f"{len(bad)} weights of {source} hold values that are not finite",
            found=_some(bad),
            remedy="The folder is damaged, or was saved by a run that diverged: take another",
        )


def check_dtypes(
    stored: Mapping[str, str], floating: Mapping[str, bool], folder: str | Path, *, quantized: bool = False
) -> None:
    """Raise if a tensor is stored in a type that the model cannot have: casting it on loading would be silent.

    stored      dtype of each tensor, as safetensors names it
    floating    whether a tensor of the model's checkpoint holds floating-point numbers
    quantized   whether these may have 8 bits
    """
    for name, is_floating in floating.items():
        dtype = stored.get(name)
        if dtype is None:
            continue
        has_float = dtype in _FLOATS or (quantized and dtype.startswith("F8"))
        has_integer = dtype == "BOOL" or dtype[0] in "IU"
        if not (has_float if is_floating else has_integer):
            raise ModelError(
                f"{name} in {folder} is stored in a type that the model cannot have",
                expected=", ".join(_FLOATS) if is_floating else "integers or booleans",
                found=dtype,
                remedy="The folder is damaged, or its weights were quantized and config.json does not say how",
            )


def _check_stored_dtypes(model: Any, folder: Path) -> None:
    stored = {name: dtype for name, (dtype, _) in _stored(folder).items()}
    state = model.state_dict()
    if {*stored.values()} <= {*_FLOATS} and all(tensor.is_floating_point() for tensor in state.values()):
        return
    form = CheckpointForm(model)
    floating = {
        part: like.is_floating_point()
        for name, tensor in state.items()
        for part, like in form.tensors(name, tensor.to("meta")).items()
    }
    quantized = getattr(model.config, "quantization_config", None) is not None
    check_dtypes(stored, floating, folder, quantized=quantized)


def _check_report(model: Any, report: Mapping[str, Any], folder: str | Path) -> None:
    misshapen = sorted(_misshapen(model, report["mismatched_keys"], folder))
    if misshapen:
        name, stored_shape, shape = misshapen[0]
        raise ModelError(
            f"{len(misshapen)} tensors in {folder} have another shape than config.json says, first {name}",
            expected=shape,
            found=stored_shape,
            remedy=_COMPLETE,
        )
    if missing := sorted(report["missing_keys"]):
        unknown = sorted(report["unexpected_keys"])
        raise ModelError(
            f"{len(missing)} weights of the model are not in {folder}",
            expected=_some(missing),
            found=f"in their place {_some(unknown)}" if unknown else None,
            remedy=_COMPLETE,
        )
    _check_layers(model, report["unexpected_keys"], folder)


def check_unexpected(model: Any, names: Iterable[str], folder: str | Path) -> None:
    """Raise if tensors of a folder that are not the model's are those of more layers; log the others."""
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    _check_layers(model, [name for name in names if not any(pattern.search(name) for pattern in ignored)], folder)


def _check_layers(model: Any, unexpected: Iterable[str], folder: str | Path) -> None:
    unexpected = sorted(unexpected)
    if more := _more_layers(model, unexpected):
        raise ModelError(
            f"{folder} has {len(more)} tensors of layers that the model does not have",
            expected=f"{model.config.get_text_config().num_hidden_layers} layers, as config.json says",
            found=_some(more),
            remedy="Correct num_hidden_layers in config.json",
        )
    if unexpected:  # of other parts: a vision tower, layers that predict several tokens
        logger.warning("not used, as not part of the model: %s in %s", _some(unexpected), folder)


def _misshapen(model: Any, reported: Iterable[Any], folder: str | Path) -> Iterator[tuple[str, Shape, Shape]]:
    """Yield name, stored shape and shape in the model; Transformers before 5 reports the names alone."""
    named = list(reported)
    stored = _stored(Path(folder)) if any(isinstance(entry, str) for entry in named) else {}
    for entry in named:
        if isinstance(entry, str):
            _, shape = stored.get(entry, ("", ()))
            yield entry, shape, tuple(model.state_dict()[entry].shape)
        else:
            name, stored_shape, model_shape = entry
            yield name, tuple(stored_shape), tuple(model_shape)


def _more_layers(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the tensors that have the name of a weight of the model, but for their numbers."""
    config = model.config.get_text_config()
    predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    extra = {str(config.num_hidden_layers + number) for number in range(predicting)}
    weight_patterns = {re.sub(r"\d+", "#", name) for name in model.state_dict()}
    named = ((name, re.search(r"layers\.(\d+)\.", name)) for name in unexpected)
    return sorted(
        name
        for name, layer in named
        if re.sub(r"\d+", "#", name) in weight_patterns and not (layer is not None and layer[1] in extra)
    )


def check_experts(folder: str | Path) -> None:
    """Raise if a layer lacks tensors of one of its experts, or has one of another shape than those of the others."""
    layers: dict[str, dict[str, dict[int, Shape]]] = {}
    for name, (_, shape) in _stored(Path(folder)).items():
        if part := _EXPERT.fullmatch(name):
            layers.setdefault(part[1], {}).setdefault(part[3], {})[int(part[2])] = shape
    for layer, kinds in layers.items():
        count = 1 + max(expert for experts in kinds.values() for expert in experts)
        for kind, experts in kinds.items():
            if missing := [f"{layer}{expert}{kind}" for expert in range(count) if expert not in experts]:
                raise ModelError(
                    f"{len(missing)} tensors of experts are not in {folder}", expected=_some(missing), remedy=_COMPLETE
                )
            ((usual, _),) = Counter(experts.values()).most_common(1)
            for expert, shape in experts.items():
                if shape != usual:
                    raise ModelError(
                        f"{layer}{expert}{kind} in {folder} has another shape than the other experts",
                        expected=usual,
                        found=shape,
                    )


def _stored(folder: Path) -> dict[str, tuple[str, Shape]]:
    """Return dtype, as safetensors names it, and shape of all tensors in the files of a folder; no values are read."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return _stored_in_bin_files(folder)
    stored: dict[str, tuple[str, Shape]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.offset_keys():
                    tensor = tensors.get_slice(name)
                    stored[name] = str(tensor.get_dtype()), tuple(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is damaged or cut short", found=one_line(error), remedy="Copy or download it again"
            ) from error
    return stored


def _stored_in_bin_files(folder: Path) -> dict[str, tuple[str, Shape]]:
    stored: dict[str, tuple[str, Shape]] = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        with _refused(str(folder)):
            content = torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
            tensors = {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
        stored |= {name: (_short_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    return stored


def _short_name(dtype: torch.dtype) -> str:
    """Return the name of a type as safetensors has it, without the kind of an 8-bit float."""
    if dtype in (torch.bool, torch.bfloat16):
        return {torch.bool: "BOOL", torch.bfloat16: "BF16"}[dtype]
    kind = "F" if dtype.is_floating_point else "U" if str(dtype).startswith("torch.uint") else "I"
    return f"{kind}{8 * dtype.itemsize}"


# ---- Transformers ----------------------------------------------------------------------------------------------------


def _transformers() -> Any:
    with needs_extra("models are loaded by Transformers", "transformers"):
        import transformers
    return transformers


@contextmanager
def _refused(source: str) -> Iterator[None]:
    """Turn what Transformers raises for a model that it cannot build or load into one error."""
    from safetensors import SafetensorError
    from torch._weights_only_unpickler import UnpicklingError

    kinds = (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, RuntimeError, ZeroDivisionError)
    try:
        yield
    except (*kinds, SafetensorError, EOFError, UnpicklingError) as error:
        if isinstance(error, (MoeReplayError, torch.OutOfMemoryError)):
            raise
        is_bin = "weights_only" in str(error) or "pytorch checkpoint file" in str(error)  # the latter: Transformers 4
        if isinstance(error, EOFError) or is_bin:
            raise ModelError(
                f"{source} cannot be loaded: a .bin file is damaged, or holds more than tensors",
                remedy="Download it again, or use safetensors files",
            ) from error
        if "Unrecognized configuration class" in str(error):
            raise ModelError(
                f"{source} is not a causal language model",
                expected="a model that AutoModelForCausalLM loads",
                found=re.sub(r".*configuration class <class '.*?(\w+)'>.*", r"\1", one_line(error)),
                remedy="Of a model with a vision or audio part, use a folder with its language model alone",
            ) from error
        raise ModelError(f"{source} cannot be loaded: {one_line(error)}", remedy=_remedy(error)) from error


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep Transformers from printing its table of missing weights, which become an error."""
    reporter = logging.getLogger("transformers.modeling_utils")

    def is_serious(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    reporter.addFilter(is_serious)
    try:
        yield
    finally:
        reporter.removeFilter(is_serious)


def _strict_errors() -> tuple[type[Exception], ...]:
    """Return the error of Transformers 5 for a setting of the wrong type."""
    try:
        from huggingface_hub.errors import StrictDataclassError
    except ImportError:
        return ()
    return (StrictDataclassError,)


def _remedy(error: Exception) -> str | None:
    if isinstance(error, ImportError) and "attention" in str(error).lower():
        return "Install it, or set model.attn_implementation = 'sdpa'"
    return _REMOTE_CODE if "trust_remote_code" in str(error) else None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
