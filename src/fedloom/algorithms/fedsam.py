# SPDX-License-Identifier: Apache-2.0
"""FedSAM: FedAvg whose clients descend at the worst point nearby, towards flat minima.

Qu, Li, Duan, Liu, Tang, Lu: Generalized federated learning via sharpness aware minimization. ICML 2022
(arXiv:2206.02618). The same idea at the same time: Caldarola, Caputo, Ciccone, ECCV 2022 (arXiv:2203.11834).

On every batch a client takes its gradient, goes rho along it, uphill, takes the gradient there, and steps along that
one from where it was. All else is FedAvg.

Symbols: rho: ``radius``, g: the gradient at the parameters.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its model's running statistics, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg at rho = 0.
Differs from the paper: clients are weighted by their samples, as in FedAvg here; the paper weighs them equally. Its
variant with momentum, MoFedSAM, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedloom.algorithms import fedavg
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Program, Setup
from fedloom.core.training import Training, gradient, train_step
from fedloom.core.trees import Params, Tree, squared_norm, tree_map
from fedloom.programs.allowed import of_participants
from fedloom.programs.local import local_training


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """FedSAM's options."""

    radius: float = option(
        0.1, "How far the worst point is looked for, rho (FL-Simulator, and Caldarola et al.).", low=0
    )


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """A round of FedAvg with another client step."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    return fedavg.combine(setup, state, replies)


def training(config: Config) -> Program:
    """What a client of FedSAM runs."""
    return replace(local_training(config), name="fedsam.train", step=client_step)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """w <- w - eta times the gradient at w + rho g / ||g||, on the same batch."""

    def at_the_worst_point(grads: Params) -> Params:
        scale = home.config.radius / (squared_norm(grads).sqrt() + 1e-12)
        uphill = tree_map(lambda p, g: p + scale * g, carry.params, grads)
        # running statistics are those of the first pass
        worst, _, _ = gradient(home, uphill, carry.buffers, batch)
        return worst

    return train_step(home, carry, batch, correction=at_the_worst_point)


CITATION = """@inproceedings{qu2022fedsam,
  title={Generalized Federated Learning via Sharpness Aware Minimization},
  author={Qu, Zhe and Li, Xingyu and Duan, Rui and Liu, Yao and Tang, Bo and Lu, Zhuo},
  booktitle={ICML}, year={2022}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedSAM",
    citation=CITATION,
    config=Config,
    round=round,
    programs=of_participants(training),
)
