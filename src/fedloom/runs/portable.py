# SPDX-License-Identifier: Apache-2.0
"""Models as files that need no fedloom: ONNX, for many runtimes, and torch.export's programs, for torch alone.

Both take batches of any size. Each file is read back and compared with the model before it gets its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedloom.core.errors import NeedsError, unknown
from fedloom.core.tokens import Tokens
from fedloom.data.preparation import Preparation
from fedloom.runs.files import write_file, writing

TOLERANCE = 1e-5
"""The largest difference from the model, in units of the largest output where that is above 1."""
BATCHES = (1, 2, 7)
INPUT, OUTPUT = "x", "outputs"
SAFETENSORS = "safetensors"


def write_portable(
    path: Path,
    form: str,
    module: nn.Module,
    input_shape: tuple[int, ...],
    about: Mapping[str, str],
    preparation: Preparation | None = None,
    tokens: Tokens | None = None,
) -> Path:
    """Write ``module`` as ``form``, onnx or pt2, at ``path`` with that ending; ``about`` goes into the file.

    ``preparation``: the module takes raw samples, of which it prepares those of ``input_shape``. ``tokens``: what its
    samples are like if they are not numbers.
    """
    if form not in FORMS:
        raise unknown("format", form, [SAFETENSORS, *FORMS])
    path = path.with_name(f"{path.name}.{form}")
    kind = next((t.dtype for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()), torch.float32)
    module = module.cpu().eval()
    draws = torch.Generator().manual_seed(0)
    samples = [_samples((number, *input_shape), tokens, draws, kind) for number in BATCHES]
    if preparation:
        samples = [_raw(x, preparation) for x in samples]
    with torch.no_grad():
        wanted = [module(x) for x in samples]
        data, run = FORMS[form](module, samples[-1], dict(about))
        found = [run(x) for x in samples]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    for ours, outputs in zip(found, wanted):
        off = float((ours - outputs).abs().max() / outputs.abs().max().clamp(min=1))
        if not off <= TOLERANCE:
            raise NeedsError(
                f"The {form} file differs from the model by {off:.1e}, more than {TOLERANCE:g}, and was not kept; "
                "give another --format."
            )
    write_file(path, data)
    return path


def _raw(x: Tensor, preparation: Preparation) -> Tensor:
    """Samples such as could have been there before ``x`` was prepared."""
    if preparation.kind == "images":
        return (128 + 50 * x).clamp(0, 255).round()
    draws = x[:, :1].abs() * 7
    columns = [
        column.mean + column.scale * draws if column.categories is None else (draws % max(1, column.size)).floor()
        for column in preparation.columns
    ]
    raw = torch.cat([column.to(x.dtype) for column in columns], 1)
    raw[0, 0] = torch.nan  # what is missing has its own way through
    return raw


def _samples(shape: tuple[int, ...], tokens: Tokens | None, draws: torch.Generator, kind: torch.dtype) -> Tensor:
    """Made-up samples."""
    if tokens:
        return torch.randint(tokens.vocabulary, shape, generator=draws)
    return torch.randn(shape, generator=draws, dtype=kind)


Run = Callable[[Tensor], Tensor]
"""What reads a file back: samples to outputs."""


def _onnx(module: nn.Module, x: Tensor, about: dict[str, str]) -> tuple[bytes, Run]:
    """An ONNX file, and the model as onnxruntime reads it; ``about`` is in its metadata."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise NeedsError(f"--format onnx needs {package}, which is not installed; pip install 'fedloom[onnx]'.")
    import onnx
    import onnxruntime

    with _said(module, "ONNX"), _silent():
        program = torch.onnx.export(_program(module, x), dynamo=True, verbose=False, input_names=[INPUT],
                                    output_names=[OUTPUT])  # fmt: skip
        assert program is not None
        model = program.model_proto
    onnx.helper.set_model_props(model, about)
    for node in model.graph.node:
        del node.metadata_props[:]  # where in which file of this machine it came from
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda x: torch.from_numpy(session.run(None, {INPUT: x.numpy()})[0])


def _pt2(module: nn.Module, x: Tensor, about: dict[str, str]) -> tuple[bytes, Run]:
    """A program of torch.export, and the model as torch reads it; ``about`` is in it as ``about.json``."""
    buffer = io.BytesIO()
    with _said(module, "torch.export"), _silent():
        torch.export.save(_program(module, x), buffer, extra_files={"about.json": json.dumps(about)})
        program = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    return buffer.getvalue(), program


FORMS: Mapping[str, Callable[[nn.Module, Tensor, dict[str, str]], tuple[bytes, Run]]] = {
    "onnx": _onnx,
    "pt2": _pt2,
}
"""(module, samples, about) -> the file, and how it is read back; by the ending of its name."""


def _program(module: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    """The module as a graph, for batches of any size, and without the names of files on this machine."""
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    with _Unfolded():
        program = torch.export.export(module, (x,), dynamic_shapes=shapes, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


@contextlib.contextmanager
def _said(module: nn.Module, what: str) -> Iterator[None]:
    """Whatever keeps a network from being exported, in a sentence."""
    try:
        yield
    except NeedsError:
        raise
    except Exception as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise NeedsError(
            f"The model cannot be written by {what}: {type(error).__name__}: {why[:300]}. Give --format safetensors, "
            "or write the network's forward pass without what it names."
        ) from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what the exporter says of its own parts."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)


class _Unfolded(TorchFunctionMode):
    """Within it, convolutions and pools of networks that differ from sample to sample are made of plain products.

    As one convolution they have as many groups as there are samples, a number that a file would have to fix.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {F.conv2d: _convolved, F.max_pool2d: _pooled}.get(function)
        stacked = torch._C._functorch.maybe_current_level() is not None
        return (own if own and stacked else function)(*args, **(kwargs or {}))


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """(samples, channels, height, width) by (outputs, channels, rows, columns)."""
    if groups != 1 or isinstance(padding, str):
        raise NeedsError("a convolution in groups, or with padding named, has no form for weights of each sample")
    shifted, size = _shifted(x, tuple(weight.shape[-2:]), stride, padding, dilation, 0.0)
    patches = torch.stack(shifted, 2).flatten(1, 2).flatten(2)  # (samples, channels * rows * columns, places)
    found = (weight.flatten(1) @ patches).reshape(len(x), -1, *size)
    return found if bias is None else found + bias[:, None, None]


def _pooled(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:  # fmt: skip
    """The maximum over windows of (samples, channels, height, width)."""
    if ceil_mode or return_indices:
        raise NeedsError("a pool with ceil_mode or return_indices has no form for networks of each sample")
    shifted, _ = _shifted(x, _pair(kernel_size), stride or kernel_size, padding, dilation, -torch.inf)
    return torch.stack(shifted).amax(0)


def _shifted(
    x: Tensor, window: tuple[int, ...], stride: Any, padding: Any, dilation: Any, fill: float
) -> tuple[list[Tensor], tuple[int, int]]:
    """What each place of a window sees of ``x``, and how many windows there are."""
    (rows, columns), (sy, sx), (py, px), (dy, dx) = (_pair(one) for one in (window, stride, padding, dilation))
    x = F.pad(x, (px, px, py, py), value=fill)
    height, width = x.shape[-2:]
    high, wide = ((a - d * (k - 1) - 1) // s + 1 for a, d, k, s in ((height, dy, rows, sy), (width, dx, columns, sx)))
    parts = [
        x[..., i * dy : i * dy + (high - 1) * sy + 1 : sy, j * dx : j * dx + (wide - 1) * sx + 1 : sx]
        for i in range(rows)
        for j in range(columns)
    ]
    return parts, (high, wide)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
