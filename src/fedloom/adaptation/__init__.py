# SPDX-License-Identifier: Apache-2.0
"""A predictor that gives class scores and a client's data, labelled or not: a better predictor for that client.

On label-skewed clients most of what a personal model knows is which classes its client has. A global model can be told:
``scores + log prior``. The prior is counted where there are labels and estimated where there are none
(``dirichlet``), after the scores have been calibrated without moving data (``calibration``), and trusted as far as a
newcomer's scores look like the participants' (``checks``); ``prior`` makes it a wrapper around any method whose models
do not know their client's classes yet, and ``report`` says what came of it.
"""
