# SPDX-License-Identifier: Apache-2.0
"""How this machine computes for a run: processes, precision, kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """What an engine may use. No field changes what is computed but ``precision``."""

    workers: int = 0
    """Processes of the parallel engines and of ray; 0: one per core, or per GPU."""
    precision: str = "exact"
    """exact, or on a GPU tf32 or bf16."""
    own_kernels: bool = True
    """Whether compiled steps on a GPU may have convolutions by kernels of our own."""
    ray_address: str | None = None
    """Where Ray is, for the engine of that name; None: it is started on this machine."""
    gpus: int = 0
    """GPUs that it uses, where clients run on GPUs; 0: all."""

    def take_over(self, device: torch.device) -> None:
        """Have this process compute for a run: on its GPU and in its precision, which other runs set too."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        set_precision(self.precision)


def set_precision(name: str) -> None:
    """Whether a GPU may round the factors of float32 products to TF32, which torch allows for convolutions."""
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
