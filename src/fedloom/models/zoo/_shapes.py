# SPDX-License-Identifier: Apache-2.0
"""Checks of input shapes and sizes, shared by the networks of this folder."""

from fedloom.core.errors import ConfigError


def check_not_empty(model: str, input_shape: tuple[int, ...]) -> None:
    """Refuse a shape without axes, or with an axis of no length."""
    if not input_shape or min(input_shape) < 1:
        raise ConfigError(
            f"{model} needs an input shape whose every axis is at least 1 long; got {input_shape}. "
            "Pass the shape of one example, such as (1, 28, 28)."
        )


def check_grid(model: str, input_shape: tuple[int, ...], at_least: int, windows: bool = False) -> None:
    """Refuse all but images (C, H, W), and time windows (C, L) where ``windows``, of a size that fits."""
    check_not_empty(model, input_shape)
    dims = len(input_shape) - 1  # 2 for images, 1 for time windows
    if dims != 2 and not (windows and dims == 1):
        wanted = "images (channels, height, width)" + (" or time windows (channels, length)" if windows else "")
        other = "mlp, or lenet for time windows (channels, length)" if dims == 1 and not windows else "mlp"
        raise ConfigError(f"{model} needs {wanted}; got {input_shape}. Use --model {other}.")
    if min(input_shape[1:]) < at_least:
        if dims == 1:
            wanted = f"time windows of at least {at_least} steps"
        else:
            wanted = f"images of at least {at_least}x{at_least} pixels"
        # lenet goes down to 4x4, so it is an answer for all but images that lenet itself refuses.
        other = "lenet or mlp" if min(input_shape[1:]) >= 4 else "mlp"
        raise ConfigError(f"{model} needs {wanted}; got {input_shape}. Use --model {other}.")


def check_widths(model: str, option: str, given: int | tuple[int, ...], count: int | None = None) -> tuple[int, ...]:
    """The layer widths of an option (a bare number is one width); there must be ``count``, if given."""
    widths = tuple(given) if isinstance(given, tuple | list) else (given,)
    if (count is not None and len(widths) != count) or any(not isinstance(w, int) or w < 1 for w in widths):
        wanted = {None: "whole numbers", 1: "a whole number"}.get(count, f"{count} whole numbers")
        raise ConfigError(
            f"{model} needs {wanted} of at least 1 for {option}; got {given!r}. "
            f"Write e.g. --model {model}:{option}={'x'.join(['32'] * (count or 2))}."
        )
    return widths


def check_dropout(model: str, dropout: float, below: float) -> None:
    """Refuse a dropout rate outside [0, below)."""
    if not isinstance(dropout, int | float) or not 0 <= dropout < below:
        raise ConfigError(
            f"{model} needs a dropout from 0 to below {below:g}; got {dropout!r}. "
            f"Leave it out for the default, or write --model {model}:dropout=0 for none."
        )


def check_sequence(model: str, input_shape: tuple[int, ...]) -> None:
    """Refuse all but sequences of tokens, (length,)."""
    check_not_empty(model, input_shape)
    if len(input_shape) != 1:
        raise ConfigError(f"{model} needs sequences of tokens, (samples, length); got samples of shape {input_shape}.")
