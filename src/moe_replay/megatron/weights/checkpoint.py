"""Transformers checkpoint folders, read and written: `config.json`, safetensors files, an index.

Reading is lazy, one slice of a tensor at a time. When writing, layers are dealt out to the ranks: no rank holds more
than its own layers, and each writes its own files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_replay.distributed.ranks import all_gather_json, barrier, raise_on_all_ranks, rank, world_size
from moe_replay.megatron.weights.tensor_slices import Shape, Slices, WeightMapError
from moe_replay.utils.files import Write, apply_umask
from moe_replay.weights.source import DividedSource, Group, PerLayerReceivers, WeightSource, owners_of

INDEX = "model.safetensors.index.json"
QUANTIZATION = "quantization_config"
SCALE_SUFFIX = "_scale_inv"
FILE_BYTES = 5 * 2**30
"""Maximum bytes of tensors per written file."""
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}

Block = tuple[int, int]


# ---- reading ---------------------------------------------------------------------------------------------------------


class Checkpoint:
    """A checkpoint folder that is read lazily: headers first, then only the requested slices of tensors."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = self._json("config.json")
        self._block = block_size(self.config)

    def _file(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise WeightMapError("not a checkpoint folder", expected=name, found=self.folder)
        return path

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads(self._file(name).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise WeightMapError(f"{self.folder / name} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise WeightMapError(f"{self.folder / name} is not a JSON object", found=type(content).__name__)
        return content

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self._file(name), framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightMapError(
                f"{self.folder / name} is damaged or cut short", found=error, remedy="Copy or download it again"
            ) from error

    @property
    def model_type(self) -> str:
        return self.config.get("model_type", "")

    @cached_property
    def _files(self) -> dict[str, Any]:
        """Open safetensors file of each tensor, by tensor name."""
        if (self.folder / INDEX).is_file():
            listed = self._weight_map()
        else:
            listed = dict.fromkeys(self._open("model.safetensors").offset_keys(), "model.safetensors")
        files = {name: self._open(name) for name in sorted(set(listed.values()))}
        stored = {name: file for file in files.values() for name in file.offset_keys()}
        if stored.keys() != listed.keys():
            different = sorted(stored.keys() ^ listed.keys())
            raise WeightMapError(
                f"{INDEX} does not match the safetensors files", expected=f"{len(listed)} tensors", found=different[:3]
            )
        return stored

    def _weight_map(self) -> dict[str, str]:
        listed = self._json(INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise WeightMapError(f"{self.folder / INDEX} lists no files", expected='"weight_map": {tensor: file, ...}')
        return listed

    @cached_property
    def _scales(self) -> dict[str, str]:
        """Name of each 8-bit tensor's scales, by tensor name; empty if nothing is quantized."""
        if self._block is None:
            return {}
        scales = {}
        for name in self._files:
            if self.stored_dtype(name).startswith("F8"):
                scale, expected = name + SCALE_SUFFIX, scale_shape(self.shape(name), self._block)
                shape = self.shape(scale) if scale in self._files else None
                if shape != expected:
                    problem = f"the scales of {name} in {self.folder} are missing or have the wrong shape"
                    raise WeightMapError(problem, expected=f"{scale} of shape {expected}", found=shape)
                scales[name] = scale
        return scales

    @property
    def names(self) -> set[str]:
        """Names of all tensors except scales."""
        return set(self._files) - set(self._scales.values())

    @cached_property
    def is_fused(self) -> bool:
        """Whether the experts of a layer are stored in one tensor."""
        return any(name.endswith(".experts.gate_up_proj") for name in self._files)

    def shape(self, name: str) -> Shape:
        return tuple(self._files[name].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of a tensor in its file, as safetensors names it."""
        return str(self._files[name].get_slice(name).get_dtype())

    @property
    def is_quantized(self) -> bool:
        """Whether some tensors may have 8 bits."""
        return self._block is not None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; bfloat16 for an 8-bit one."""
        if name in self._scales:
            return torch.bfloat16
        return self.read(name, tuple(slice(0, 0) for _ in self.shape(name))).dtype

    def read(self, name: str, slices: Slices) -> Tensor:
        """Read a slice of a tensor and nothing else; 8-bit tensors are read as float32."""
        values = self._files[name].get_slice(name)[slices]
        scale = self._scales.get(name)
        if scale is None or self._block is None:
            return values
        scales = self._files[scale].get_slice(scale)[blocks_of(slices, self._block)]
        return dequantized(values, scales, slices, self._block)

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor, in its `dtype`."""
        return self.read(name, tuple(slice(0, size) for size in self.shape(name))).to(self.dtype(name))


# ---- fp8 weights -----------------------------------------------------------------------------------------------------
# 8-bit weights with one scale per block, as DeepSeek-V3 is published, are read as float32:
# `model.layers.3.mlp.experts.7.up_proj.weight` (out, in) float8_e4m3fn is multiplied block by block with
# `...weight_scale_inv` (ceil(out / 128), ceil(in / 128)) float32.


def block_size(config: Mapping[str, Any]) -> Block | None:
    """Return the rows and columns of a block; None if not quantized. Refuses other kinds of quantization."""
    settings = config.get(QUANTIZATION)
    if settings is None:
        return None
    block = settings.get("weight_block_size") if isinstance(settings, dict) else None
    is_fp8 = isinstance(settings, dict) and settings.get("quant_method") == "fp8"
    if not is_fp8 or not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) for n in block):
        raise WeightMapError(
            "this kind of quantized checkpoint cannot be loaded",
            expected="no quantization, or fp8 with weight_block_size",
            found=settings,
            remedy="Convert it to bfloat16 first",
        )
    return block[0], block[1]


def scale_shape(shape: Shape, block: Block) -> Shape:
    return (*shape[:-2], *(-(-size // length) for size, length in zip(shape[-2:], block, strict=True)))


def blocks_of(slices: Slices, block: Block) -> Slices:
    """Return the slices of the scales that belong to a slice of a weight; leading dimensions are the weight's."""
    last = (slice(part.start // size, -(-part.stop // size)) for part, size in zip(slices[-2:], block, strict=True))
    return (*slices[:-2], *last)


def dequantized(values: Tensor, scales: Tensor, slices: Slices, block: Block) -> Tensor:
    for dim, (part, size) in enumerate(zip(slices[-2:], block, strict=True), start=-2):
        blocks = torch.arange(part.start, part.stop, part.step or 1) // size - part.start // size
        scales = scales.index_select(dim, blocks)
    return values.float() * scales.float()


# ---- writing ---------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Collects this rank's tensors in files of at most `file_bytes`.

    folder   None: files stay in memory until `finished` writes them; else each is written when it is full
    """

    def __init__(self, folder: str | Path | None, file_bytes: int = FILE_BYTES) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if present := sorted(path.name for path in self.folder.glob("*.safetensors")):
                raise WeightMapError(
                    "the folder already contains weights, which a reader would mix with the new ones",
                    expected="no safetensors files",
                    found=present[:3],
                    remedy="Choose an empty folder",
                )
        self._file_bytes = file_bytes
        self._pending: dict[str, Tensor] = {}
        self._full: list[dict[str, Tensor] | Path] = []
        self._sizes: list[dict[str, int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor; it stays in memory until its file is written."""
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self._file_bytes:
            self._flush()
        # copied, since safetensors refuses tensors that share memory, as slices of a parameter do
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def _flush(self) -> None:
        if not self._pending:
            return
        self._sizes.append({name: tensor.nbytes for name, tensor in self._pending.items()})
        if self.folder is None:
            self._full.append(self._pending)
        else:
            part = self.folder / f"part-{rank()}-{len(self._full)}.unfinished"
            _save(self._pending, part)
            self._full.append(part)
        self._pending = {}

    def finished(self, like: Path) -> Write:
        """Return the function that gives all files their final names; config and tokenizer are `like`'s. Collective."""
        self._flush()
        sizes: list[list[dict[str, int]]] = all_gather_json(self._sizes)
        count = sum(map(len, sizes))
        names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        first = sum(map(len, sizes[: rank()]))
        files = dict(zip(names[first : first + len(self._full)], self._full, strict=True))
        index = None
        if count > 1:
            contents = [file for rank_files in sizes for file in rank_files]
            weight_map = {tensor: name for name, file in zip(names, contents, strict=True) for tensor in file}
            total = sum(size for file in contents for size in file.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        config_source = like if rank() == 0 else None
        return lambda folder: _write_files(folder, files, config_source, index)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    apply_umask(path)


def _write_files(
    folder: Path, files: dict[str, dict[str, Tensor] | Path], like: Path | None, index: dict[str, Any] | None
) -> list[Path]:
    """Write the files of a rank; the rank with `like` also writes index, config and tokenizer."""
    folder.mkdir(exist_ok=True)
    written = [folder / name for name in files]
    for path, content in zip(written, files.values(), strict=True):
        if isinstance(content, Path):
            content.rename(path)
        else:
            _save(content, path)
    if like is None:
        return written
    if index is not None:
        written.append(folder / INDEX)
        written[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for path in sorted(like.iterdir()):
        if not path.is_file() or path.suffix not in _COPIED_SUFFIXES or path.name.endswith(".index.json"):
            continue
        written.append(folder / path.name)
        if path.name == "config.json":
            _copy_config(path, written[-1])
        else:
            shutil.copyfile(path, written[-1])
    return written


def _copy_config(source: Path, target: Path) -> None:
    """Copy a model's config without its quantization, since the written weights are not quantized."""
    config = json.loads(source.read_text(encoding="utf-8"))
    if isinstance(config, dict) and QUANTIZATION in config:
        del config[QUANTIZATION]
        target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(source, target)


class _RoundRobin(PerLayerReceivers):
    """One receiving rank per layer, in rank order."""

    def __init__(self) -> None:
        super().__init__([[receiver] for receiver in range(world_size())])

    def advance(self) -> None:
        self._layer = (self._layer + 1) % len(self._holders)


def stage_folder(
    source: WeightSource,
    like: Path,
    folder: Path | None = None,
    file_bytes: int = FILE_BYTES,
    *,
    extra: Iterable[tuple[str, Tensor]] = (),
) -> Write:
    """Collect this rank's part of all tensors, and return the function that writes it. Collective.

    folder   None: the part stays in host memory; else it is written there, file by file
    extra    tensors of this rank that the source does not have

    Ranks gather tensors together, so every rank iterates to the end even after a failed write.
    """
    from safetensors import SafetensorError

    with raise_on_all_ranks("preparing an export"):
        writer = CheckpointWriter(folder, file_bytes)
    failure: OSError | SafetensorError | None = None
    for group in _of_this_rank(source):
        for name, tensor in group:
            if failure is None:
                try:
                    writer.add(name, tensor)
                except (OSError, SafetensorError) as error:
                    failure = error
    with raise_on_all_ranks("writing an export"):
        if failure is not None:
            raise failure
        for name, tensor in extra:
            writer.add(name, tensor)
        writer._flush()
    return writer.finished(like)


def _of_this_rank(source: WeightSource) -> Iterator[Group]:
    """Yield the groups that this rank writes: those that it alone holds, and its part of all others. Collective."""
    receivers = _RoundRobin()
    if not owners_of(source):
        for group in source.groups(receivers):
            receivers.advance()
            yield group
        return
    assert isinstance(source, DividedSource)
    for handed in source.owned_groups(receivers, lambda _: (), parts=False):
        if handed.owner is None:
            receivers.advance()
        yield handed.tensors


def write_folder(
    source: WeightSource,
    folder: str | Path,
    like: Path,
    file_bytes: int = FILE_BYTES,
    *,
    extra: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """Write a source's tensors as a checkpoint folder; config and tokenizer are `like`'s. Collective."""
    write = stage_folder(source, like, Path(folder), file_bytes, extra=extra)
    with raise_on_all_ranks("writing an export"):
        write(Path(folder))
    barrier()  # no rank returns before the folder is complete
