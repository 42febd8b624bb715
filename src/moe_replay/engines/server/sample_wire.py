"""The samples of one prompt as bytes: routes of the prompt once for all of them, no dense layers.

    u32 length of the header | header, JSON | trace of each distinct prompt | for each sample: trace of its completion,
    log-probs (float32), sampling mask if it has one

All numbers are little-endian; traces and masks are in the formats of docs/trace-format.md. The reader validates
everything but `RouteTrace.check_rows`: the server has checked the rows of its traces, and a `RouteBatch` checks them
again on the rank that replays them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from moe_replay.errors import TraceFormatError
from moe_replay.records import FinishReason, Sample
from moe_replay.routes.trace import RouteTrace
from moe_replay.sampling_mask import mask_from_bytes, mask_to_bytes

MEDIA_TYPE = "application/vnd.moe-replay.samples"
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 2**24

Bytes = bytes | bytearray | memoryview


class _SampleHeader(BaseModel, extra="forbid", strict=True):
    prompt: int = Field(ge=0)  # index of the trace of its prompt
    trace_bytes: int = Field(ge=0)
    tokens: int = Field(ge=0)
    finish_reason: str
    weight_version: int = Field(ge=0)
    info: dict[str, str] = {}
    weights_id: str = ""
    mask_bytes: int | None = Field(None, ge=0)


class _Header(BaseModel, extra="forbid", strict=True):
    prompt_bytes: list[int]
    samples: list[_SampleHeader]
    logprobs_crc: int


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Encode the samples of one prompt. A sample whose prompt was routed differently has its own prompt routes."""
    prompts: list[RouteTrace] = []
    headers, bodies, crc = [], [], 0
    for sample in samples:
        cut = len(sample.prompt_ids)
        prompt, completion = sample.trace[:cut], sample.trace[cut:]
        number = next((i for i, stored in enumerate(prompts) if stored == prompt), len(prompts))
        if number == len(prompts):
            prompts.append(prompt)
        trace, logprobs = completion.to_bytes(), sample.logprobs.astype("<f4").tobytes()
        mask = None if sample.sampling_mask is None else mask_to_bytes(sample.sampling_mask)
        crc = zlib.crc32(logprobs, crc)
        bodies += [trace, logprobs, mask or b""]
        headers.append(
            _SampleHeader(
                prompt=number,
                trace_bytes=len(trace),
                tokens=len(sample.completion_ids),
                finish_reason=sample.finish_reason,
                weight_version=sample.weight_version,
                info=sample.info,
                weights_id=sample.weights_id,
                mask_bytes=None if mask is None else len(mask),
            )
        )
    blobs = [prompt.to_bytes() for prompt in prompts]
    header = _Header(prompt_bytes=[len(blob) for blob in blobs], samples=headers, logprobs_crc=crc)
    text = header.model_dump_json(exclude_none=True).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs, *bodies])


def decode_samples(data: Bytes) -> list[Sample]:
    """Decode samples; truncated or corrupted bytes are an error."""
    body = _Cursor(data)
    (length,) = _LENGTH.unpack(body.take(_LENGTH.size, "length of the header"))
    if length > _MAX_HEADER_BYTES:
        raise TraceFormatError(
            "samples with an impossible header", expected=f"at most {_MAX_HEADER_BYTES}", found=length
        )
    try:
        header = _Header.model_validate_json(bytes(body.take(length, "header")))
    except ValidationError as error:
        raise TraceFormatError(f"samples with an unreadable header: {error}") from error
    prompts = [RouteTrace.from_bytes(body.take(size, f"prompt {i}")) for i, size in enumerate(header.prompt_bytes)]
    samples, crc = [], 0
    for number, described in enumerate(header.samples):
        completion = RouteTrace.from_bytes(body.take(described.trace_bytes, f"trace of sample {number}"))
        logprobs = body.take(4 * described.tokens, f"log-probs of sample {number}")
        crc = zlib.crc32(logprobs, crc)
        mask = None
        if described.mask_bytes is not None:
            blob = body.take(described.mask_bytes, f"sampling mask of sample {number}")
            mask = mask_from_bytes(blob, sample=number)
            mask.check_sampled(completion.token_ids, sample=number)
        if described.prompt >= len(prompts) or described.finish_reason not in tuple(FinishReason):
            raise TraceFormatError("a sample with an impossible header", sample=number, found=described)
        prompt = prompts[described.prompt]
        samples.append(
            Sample(
                prompt_ids=prompt.token_ids,
                completion_ids=completion.token_ids,
                logprobs=np.frombuffer(logprobs, "<f4").astype(np.float32),
                finish_reason=FinishReason(described.finish_reason),
                trace=prompt.extend(completion),
                weight_version=described.weight_version,
                info=described.info,
                weights_id=described.weights_id,
                sampling_mask=mask,
            )
        )
    body.check_end()
    if crc != header.logprobs_crc:
        raise TraceFormatError("log-probs were corrupted in transit", expected=header.logprobs_crc, found=crc)
    return samples


class _Cursor:
    """Sequential reader of bytes."""

    def __init__(self, data: Bytes) -> None:
        self.view = memoryview(data)
        self.at = 0

    def take(self, size: int, part: str) -> memoryview:
        if size < 0 or self.at + size > len(self.view):
            raise TraceFormatError(
                f"samples are truncated in the {part}",
                expected=f"{size} bytes from byte {self.at} on",
                found=f"{len(self.view)} bytes in all",
            )
        self.at += size
        return self.view[self.at - size : self.at]

    def check_end(self) -> None:
        if self.at != len(self.view):
            raise TraceFormatError("bytes after the last sample", expected=self.at, found=len(self.view))
