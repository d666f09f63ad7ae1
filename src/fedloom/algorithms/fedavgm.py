# SPDX-License-Identifier: Apache-2.0
"""FedAvgM: FedAvg whose server has momentum.

Hsu, Qi, Brown: Measuring the effects of non-identical data distribution for federated visual classification. 2019
(arXiv:1909.06335).

The mean of the clients' changes goes into a velocity, u <- beta u + mean, and the server steps along it. Clients do
what they do in FedAvg.

Symbols: beta: ``server_momentum``, u: ``optimiser``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its model's running statistics, unless they are averaged.
Kept by the server: the global parameters and the velocity.
Reduces to: FedAvg without momentum (``server_momentum=0``) at a server's rate of 1.
Differs from the paper: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedloom.algorithms import fedavg, fedopt
from fedloom.core.config import option
from fedloom.core.optim import Optimiser


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """FedAvgM's options."""

    server_momentum: float = option(0.9, "How much of its velocity the server keeps (the paper: 0.9).", low=0, high=1)
    server_lr: float = option(1.0, "Rate of the server's step (the paper: 1).", low=0)

    def server(self) -> Optimiser:
        """The server's optimiser."""
        return Optimiser("sgd", self.server_lr, self.server_momentum)


CITATION = """@article{hsu2019fedavgm,
  title={Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification},
  author={Hsu, Tzu-Ming Harry and Qi, Hang and Brown, Matthew},
  journal={arXiv:1909.06335}, year={2019}}"""

ALGORITHM = replace(fedopt.ALGORITHM, name="FedAvgM", citation=CITATION, config=Config)
