# SPDX-License-Identifier: Apache-2.0
"""A small Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) for images of CIFAR's size.

The image is cut into patches, each a token; a class token is put before them and positions are learned. Every block is
attention and a two-layer perceptron of four times the width, each after a LayerNorm and added to its input. The class
token's last state gives the outputs.

MH-pFedHN's App. D.2 uses ViT-Tiny on images scaled to 224x224, which is ``vit:patch=16:width=192:depth=12:heads=3``
there (5,717,416 parameters for 1,000 classes). Decision of ours: patches of 4x4 and a width of 96, so that a 32x32
image is 64 tokens and CIFAR-100 takes 691,972 parameters, as much as the paper's other networks. No dropout, and
attention written out: the fused kernels cannot run for a stack of clients.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.zoo._shapes import check_grid, check_widths

DEEPEST = 1000
"""Blocks: a name may come from a file of somebody else's, and each takes memory, however narrow it is."""


class _Attention(nn.Module):
    """Every token looks at every token, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # three times (B, heads, tokens, width / heads)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        looks = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
        out: Tensor = self.proj((looks @ v).transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    """Attention, then a perceptron, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), _Attention(width, heads)
        self.norm2, self.fc1, self.fc2 = (
            nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class ViT(nn.Module):
    """A Vision Transformer for small images: 4x4 patches, width 96, 6 blocks, 3 heads."""

    name: ClassVar[str] = "vit"
    head: ClassVar[str] = "fc"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        patch: int = 4,
        width: int = 96,
        depth: int = 6,
        heads: int = 3,
    ) -> None:
        super().__init__()
        given = {"patch": patch, "width": width, "depth": depth, "heads": heads}
        # a width of 96x on the command line is one too
        (patch,), (width,), (depth,), (heads,) = (check_widths(self.name, o, v, count=1) for o, v in given.items())
        if depth > DEEPEST:
            raise ConfigError(f"vit takes a depth of at most {DEEPEST:,}; got {depth:,}. Take fewer blocks.")
        check_grid(self.name, input_shape, at_least=patch)
        if width % heads:
            raise ConfigError(f"vit needs a width that its heads divide; got {width} and {heads}. Change one of them.")
        channels, height, breadth = input_shape
        if height % patch or breadth % patch:
            fits = max(size for size in range(1, patch) if not (height % size or breadth % size))
            raise ConfigError(
                f"vit needs a patch that divides the height and the width of images; got {patch} for {input_shape}. "
                f"Write e.g. --model vit:patch={fits}."
            )
        tokens = 1 + (height // patch) * (breadth // patch)
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (B, patches, width)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        logits: Tensor = self.fc(self.norm(self.blocks(x))[:, 0])  # (B, num_outputs)
        return logits
