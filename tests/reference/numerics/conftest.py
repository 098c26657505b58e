from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def draw() -> Callable[..., np.ndarray]:
    """Standard normal float64 values of a shape, the same in every run."""
    random = np.random.default_rng(20260701)

    def values(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    return values


@pytest.fixture(scope="session")
def delta_rule_inputs(draw: Callable[..., np.ndarray]) -> Callable[[int], dict[str, Any]]:
    """Inputs of the delta rule for n tokens: 2 key heads of 16, 4 value heads of 24."""

    def make(n: int) -> dict[str, Any]:
        def unit(x: np.ndarray) -> np.ndarray:
            return x / np.linalg.norm(x, axis=-1, keepdims=True)

        return {
            "query": unit(draw(n, 2, 16)),
            "key": unit(draw(n, 2, 16)),
            "value": draw(n, 4, 24),
            # From states that fade within a token to such that hardly fade at all.
            "g": -np.exp(2.0 * draw(n, 4) - 2.0),
            "beta": 1.0 / (1.0 + np.exp(-2.0 * draw(n, 4))),
            "state": draw(4, 24, 16),
        }

    return make
