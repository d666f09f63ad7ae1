# SPDX-License-Identifier: Apache-2.0
"""Tensors as safetensors and back, without a copy: what is read lies where the bytes lie, perhaps unaligned."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.core.errors import DataError

KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {kind: name for name, kind in KINDS.items()}
LARGEST_HEADER = 1 << 24


def write_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file, in the order given."""
    header = header_of({name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}, metadata)
    return b"".join([header, *(bytes_of(value) for value in tensors.values())])


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What stands before the numbers in a file of such tensors."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (kind, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * kind.itemsize
        described[name] = {"dtype": NAMES[kind], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_tensors(data: memoryview | bytes, largest_header: int = LARGEST_HEADER) -> dict[str, Tensor]:
    """The tensors of a safetensors file; refuses anything that is not exactly one."""
    return _read(data, largest_header)[0]


def read_with_metadata(data: memoryview | bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and what is written beside them."""
    return _read(data, LARGEST_HEADER)


def _read(data: memoryview | bytes, largest_header: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        header, start = _header(data, largest_header)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are no texts")
        body = memoryview(data)[start:]
        found: dict[str, Tensor] = {}
        spans = []
        for name, one in header.items():
            kind, shape, (begin, end) = KINDS[one["dtype"]], one["shape"], one["data_offsets"]
            whole = [type(number) is int and 0 <= number <= len(body) for number in (*shape, begin, end)]
            if set(one) != {"dtype", "shape", "data_offsets"} or not all(whole):
                raise ValueError(f"{name!r} is described wrongly")
            if len(shape) > 8 or end - begin != math.prod(shape) * kind.itemsize or end > len(body):
                raise ValueError(f"{name!r} has another size than it says")
            spans.append((begin, end))
            part = body[begin:end]
            found[name] = (_from(part, kind) if end > begin else torch.empty(0, dtype=kind)).reshape(shape)
        spans.sort()
        if [begin for begin, _ in spans] != [0, *(end for _, end in spans)][: len(spans)]:
            raise ValueError("its tensors do not follow each other")
        if (spans[-1][1] if spans else 0) != len(body):
            raise ValueError("there is more in it than it says")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise DataError(f"This is no safetensors file: {error}.") from error
    return found, metadata


def _header(data: memoryview | bytes, largest: int) -> tuple[dict[str, Any], int]:
    if len(data) < 8:
        raise ValueError("it is too short")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(largest, len(data) - 8):
        raise ValueError("its header is longer than it can be")
    header = json.loads(bytes(data[8 : 8 + length]))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, 8 + length


def _from(part: memoryview, kind: torch.dtype) -> Tensor:
    # torch wants to be able to write; bytes that cannot be written are copied
    return torch.frombuffer(bytearray(part) if part.readonly else part, dtype=kind)


def bytes_of(value: Tensor) -> bytes:
    """A tensor's numbers as they lie in a file."""
    plain = value.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
