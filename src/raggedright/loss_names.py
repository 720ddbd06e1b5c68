"""The losses that there are, by name: `tensors/losses.py` computes them, and a config names them without torch."""

from typing import Literal

PolicyLoss = Literal["ppo", "gspo", "reinforce"]
KlEstimator = Literal["k1", "k2", "k3"]
