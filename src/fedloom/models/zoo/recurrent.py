# SPDX-License-Identifier: Apache-2.0
"""Recurrent networks for sequences of tokens, such as characters: a GRU and an LSTM.

Cho et al. 2014 (arXiv:1406.1078) and Hochreiter and Schmidhuber 1997, with the gates and the order of their weights as
in ``torch.nn.GRU`` and ``torch.nn.LSTM``. Tokens are embedded, the cells go from left to right, and the output layer
reads the last state, or every state where each token has a label. A state knows nothing of later tokens, so that
padding on the right changes no output before it; sequences with one label are padded on the left.

McMahan et al. 2017 (arXiv:1602.05629) predict the next character of Shakespeare by an LSTM of two layers with 256 units
on an embedding of 8: ``lstm:embedding=8:hidden=256:layers=2``, 822,570 parameters for 90 characters. Decision of ours:
64 units in one layer on an embedding of 16, so that a loom can weave it.

Ours: cells are written out in plain operators. torch's own recurrent kernels run for one client at a time only.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fedloom.models.zoo._shapes import check_sequence, check_widths


class _Layer(nn.Module):
    """Cells from left to right: (B, length, inputs) -> (B, length, hidden). A kind of cell says what a step is."""

    gates: ClassVar[int]

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input, self.state = nn.Linear(inputs, self.gates * hidden), nn.Linear(hidden, self.gates * hidden)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)  # as torch's recurrent layers


class _GRULayer(_Layer):
    """Gates: reset, update, new."""

    gates = 3

    def forward(self, x: Tensor) -> Tensor:
        given = self.input(x)
        h = torch.zeros_like(given[:, 0, : self.state.in_features])
        states = []
        for own in given.unbind(1):
            reset_x, update_x, new_x = own.chunk(3, -1)
            reset_h, update_h, new_h = self.state(h).chunk(3, -1)
            update = torch.sigmoid(update_x + update_h)
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            h = new + update * (h - new)
            states.append(h)
        return torch.stack(states, 1)


class _LSTMLayer(_Layer):
    """Gates: input, forget, cell, output."""

    gates = 4

    def forward(self, x: Tensor) -> Tensor:
        given = self.input(x)
        h = c = torch.zeros_like(given[:, 0, : self.state.in_features])
        states = []
        for own in given.unbind(1):
            let_in, forget, cell, out = (own + self.state(h)).chunk(4, -1)
            c = torch.sigmoid(forget) * c + torch.sigmoid(let_in) * torch.tanh(cell)
            h = torch.sigmoid(out) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1)


class _Recurrent(nn.Module):
    """Embedding, layers of cells, output layer."""

    name: ClassVar[str]
    head: ClassVar[str] = "output"
    layer: ClassVar[type[_Layer]]

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        vocabulary: int,
        per_token: bool = False,
        embedding: int = 16,
        hidden: int = 64,
        layers: int = 1,
    ) -> None:
        super().__init__()
        check_sequence(self.name, input_shape)
        given = {"embedding": embedding, "hidden": hidden, "layers": layers}
        (embedding,), (hidden,), (layers,) = (check_widths(self.name, o, v, count=1) for o, v in given.items())
        self.per_token = per_token
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.layers = nn.ModuleList(self.layer(hidden if i else embedding, hidden) for i in range(layers))
        self.output = nn.Linear(hidden, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)  # (B, length, embedding)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(x if self.per_token else x[:, -1])  # (B, num_outputs) or (B, length, num_outputs)
        return logits


class GRU(_Recurrent):
    """Gated recurrent units over embedded tokens: embedding 16, 64 units, 1 layer."""

    name: ClassVar[str] = "gru"
    head: ClassVar[str] = "output"
    layer = _GRULayer


class LSTM(_Recurrent):
    """Long short-term memory over embedded tokens: embedding 16, 64 units, 1 layer."""

    name: ClassVar[str] = "lstm"
    head: ClassVar[str] = "output"
    layer = _LSTMLayer
