# SPDX-License-Identifier: Apache-2.0
"""A model for a client that took no part in training, on data that nobody trained on."""

import fedloom
from fedloom.data import from_arrays, load

digits = load("digits")
federation = from_arrays(digits.x[:1300], digits.y[:1300])
x, y = digits.x[1300:], digits.y[1300:]
x, y = x[(y == 3) | (y == 8)], y[(y == 3) | (y == 8)]  # the newcomer has two of the ten classes
half = len(x) // 2

options = {"clients": 10, "local_steps": 10, "local_lr": 0.02, "model": "mlp", "progress": "quiet"}
for method, cohort, rounds in (("pfedhn", 1, 200), ("fedavg", 10, 20)):
    run = fedloom.run(method, dataset=federation, cohort=cohort, rounds=rounds, **options)
    newcomer = run.admit(x[:half], y[:half])  # FedAvg would take admit(x): it uses no labels
    right = newcomer.predict(x[half:]).argmax(1).numpy() == y[half:]
    print(f"{method}: right on {right.sum()} of {len(right)} samples")
