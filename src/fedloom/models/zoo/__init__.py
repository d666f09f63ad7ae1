# SPDX-License-Identifier: Apache-2.0
"""The target networks: what a client trains and what a hypernetwork generates.

Every public class in this folder is one network. It sets two class attributes, ``name`` (what ``--model``
takes) and ``head`` (the dotted name of its output layer, which FedPer and pFedHN-PC keep local), and is built
with ``(input_shape, num_outputs, **its own options)``; ``input_shape`` is one example's shape, without the
batch. One that takes tokens is also given ``vocabulary`` and ``per_token`` (``core.tokens.Tokens``). A file
whose name starts with an underscore holds helpers and no network.

Each network can be called through ``torch.func.functional_call`` under ``vmap`` and ``grad``. Two things need
care there in training mode: dropout (zenkenet, vgg8) wants ``vmap``'s ``randomness="different"``, and
BatchNorm (the ResNets) updates its buffers in place, so the buffers must be stacked by client as the
parameters are.
"""
