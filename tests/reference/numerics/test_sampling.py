"""Top-k, top-p and the inverse transform.

What vLLM 0.27.1 keeps was recorded from its ``apply_top_k_top_p`` on a CPU: how many of which
logits, as its sort leaves open which of equals.
"""

from __future__ import annotations

import numpy as np
import pytest

from servespec.reference.numerics.sampling import (
    inverse_transform,
    sampling_probabilities,
    top_k,
    top_p,
)

TIES = np.array([1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 1.0])
EQUAL = np.zeros(4)
MASKED = np.array([-np.inf, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("logits", "k", "p", "kept"),
    [
        (TIES, 2, 1.0, [2, 2, 2]),
        (TIES, 7, 0.1, [2]),
        (TIES, 7, 0.3, [2, 2]),
        (TIES, 7, 0.7, [2, 2, 2]),
        (TIES, 7, 0.8, [1, 1, 2, 2, 2]),
        (TIES, 7, 0.95, [1, 1, 1, 2, 2, 2]),
        (TIES, 7, 0.99, [0, 1, 1, 1, 2, 2, 2]),
        (TIES, 4, 0.8, [1, 2, 2, 2]),
        (TIES, 4, 0.9, [1, 1, 2, 2, 2]),
        (TIES, 4, 1.0, [1, 1, 1, 2, 2, 2]),
        (EQUAL, 4, 0.25, [0]),
        (EQUAL, 4, 0.5, [0, 0]),
        (EQUAL, 4, 0.51, [0, 0, 0]),
        (MASKED, 4, 1.0, [0, 0, 1]),
    ],
)
def test_what_stays_is_what_stays_in_vllm(logits, k, p, kept):
    probabilities = sampling_probabilities(logits, 1.0, k, p)
    found = probabilities > 0
    assert sorted(logits[found]) == kept
    weights = np.exp(logits[found])
    np.testing.assert_allclose(probabilities[found], weights / weights.sum(), rtol=1e-15)


def test_of_equals_the_lowest_indices_stay():
    for logits, p, kept in ((TIES, 0.1, [1]), (TIES, 0.3, [1, 2]), (TIES, 0.8, [0, 1, 2, 4, 5])):
        assert np.flatnonzero(sampling_probabilities(logits, 1.0, 7, p)).tolist() == kept


def test_each_step_alone():
    assert top_k(TIES, 1).tolist() == [False, True, True, False, True, False, False]
    assert top_k(TIES, 7).all()
    probabilities = np.array([0.125, 0.5, 0.25, 0.125])
    for p, kept in ((0.5, [1]), (0.6, [1, 2]), (0.75, [1, 2]), (0.8, [0, 1, 2]), (1e-9, [1])):
        assert np.flatnonzero(top_p(probabilities, p)).tolist() == kept
    assert top_p(np.array([1e-300, 1.0, 0.0]), 1.0).tolist() == [True, True, False]


def test_the_nucleus_is_taken_from_what_top_k_left():
    # Of all, 0.5 + 0.3 reach 0.7; of the first two alone, the first has 0.625 and both are needed;
    # at 0.6 it is enough by itself.
    logits = np.log([0.5, 0.3, 0.2])
    assert np.flatnonzero(sampling_probabilities(logits, 1.0, 3, 0.6)).tolist() == [0, 1]
    assert np.flatnonzero(sampling_probabilities(logits, 1.0, 2, 0.6)).tolist() == [0]


def test_the_temperature_is_a_power_of_the_probabilities():
    logits = np.log([0.5, 0.25, 0.25])
    np.testing.assert_allclose(
        sampling_probabilities(logits, 0.5, 3, 1.0), np.array([4, 1, 1]) / 6, rtol=1e-15
    )


def test_a_token_is_drawn_as_often_as_its_probability_says():
    probabilities = np.array([0.25, 0.0, 0.5, 0.25, 0.0])
    drawn = [inverse_transform(probabilities, u / 64) for u in range(64)]
    assert np.bincount(drawn, minlength=5).tolist() == [16, 0, 32, 16, 0]
    assert drawn == sorted(drawn)


def test_rounding_never_draws_what_cannot_be_drawn():
    probabilities = np.array([0.3, 0.6, 0.0])
    assert inverse_transform(probabilities, 0.95) == 1
