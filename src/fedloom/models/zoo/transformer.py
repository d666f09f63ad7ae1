# SPDX-License-Identifier: Apache-2.0
"""A small decoder-only Transformer for sequences of tokens (Vaswani et al. 2017, arXiv:1706.03762, as in GPT-2).

Tokens and positions are embedded and added. Every block is causal attention and a two-layer perceptron of four times
the width, each after a LayerNorm and added to its input. The output layer reads the last token's state, or every state
where each token has a label. A state knows nothing of later tokens, so that padding on the right changes no output
before it; sequences with one label are padded on the left.

Decision of ours: width 64, 2 blocks, 4 heads, no dropout, embedding and output layer apart, embeddings from
N(0, 0.02^2), and attention written out: the fused kernels cannot run for a stack of clients.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.zoo._shapes import check_sequence, check_widths


class _CausalAttention(nn.Module):
    """Every token looks at itself and at those before it, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # three times (B, heads, length, width / heads)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        looks = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        out: Tensor = self.proj((looks @ v).transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    """Attention, then a perceptron, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), _CausalAttention(width, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """A decoder-only Transformer over tokens: width 64, 2 blocks, 4 heads."""

    name: ClassVar[str] = "transformer"
    head: ClassVar[str] = "output"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        vocabulary: int,
        per_token: bool = False,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        check_sequence(self.name, input_shape)
        given = {"width": width, "depth": depth, "heads": heads}
        (width,), (depth,), (heads,) = (check_widths(self.name, o, v, count=1) for o, v in given.items())
        if width % heads:
            raise ConfigError(
                f"transformer needs a width that its heads divide; got {width} and {heads}. Change one of them."
            )
        self.per_token = per_token
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(input_shape[0], width))
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.embedding(x) + self.positions))  # (B, length, width)
        logits: Tensor = self.output(x if self.per_token else x[:, -1])  # (B, num_outputs) or (B, length, num_outputs)
        return logits
