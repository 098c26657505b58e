"""The bound on logits: derived by hand here, wide enough for rounding, too narrow for faults."""

from dataclasses import replace

import numpy as np
import pytest

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.checks.bounds import (
    CONDITION,
    TAIL,
    logits_bound,
    reduction_length,
    token_margin_bound,
)
from servespec.conformance.checks.numbers import compare_logits, compare_token, float_array
from servespec.conformance.verdicts import DivergedError, Tally
from servespec.reference.models import tiny

DENSE = tiny.config(layer_types=("full_attention",))
ROW = np.where(np.arange(DENSE.vocab_size) % 2 == 0, 3.0, -3.0)


def test_the_length_of_one_layer_is_what_paper_says() -> None:
    # Embedded sizes: hidden 64, head 32, 4 query heads, MLP 128; 10 keys.
    attention = 64 + 64 + 32 + 32 + 10 + 10 + 4 * 32
    assert reduction_length(DENSE, 10) == (64 + 64 + attention + 64 + 64 + 128, 12)
    linear = replace(DENSE, layer_types=("linear_attention",))
    state = 64 + 64 + 4 + 16 + 16 + 10 + 16 + 24 + 4 * 24
    assert reduction_length(linear, 10) == (64 + 64 + state + 64 + 64 + 128, 14)


def test_the_bound_is_relative_to_the_row() -> None:
    length, _ = reduction_length(DENSE, 10)
    expected = TAIL * CONDITION * 2.0**-24 * length**0.5 * 3.0
    assert logits_bound(ROW, DENSE, "float32", 10) == pytest.approx(expected)
    assert logits_bound(2 * ROW, DENSE, "float32", 10) == pytest.approx(2 * expected)
    assert logits_bound(ROW, DENSE, "bfloat16", 10) > 1000 * expected


def test_float32_arithmetic_in_another_order_stays_inside() -> None:
    """A chain of matrix products as deep as the embedded model, in float32 and float64."""
    random = np.random.default_rng(0)
    model = tiny.config()
    layers = [random.standard_normal((64, 64)) / 8 for _ in range(8 * 9)]
    x = random.standard_normal((500, 64))
    exact, rounded = x, x.astype(np.float32)
    for weight in layers:
        exact = exact @ weight
        rounded = rounded @ weight.astype(np.float32)
    bounds = np.array([logits_bound(row, model, "float32", 40) for row in exact])
    worst = np.abs(exact - rounded.astype(np.float64)).max(axis=1)
    assert (worst < bounds).all()


def compare(got: np.ndarray) -> None:
    compare_logits(ROW, got, DENSE, "float32", num_keys=10, step=1, request="a")


def test_errors_beyond_the_bound_diverge() -> None:
    bound = logits_bound(ROW, DENSE, "float32", 10)
    wrong = ROW.copy()
    wrong[17] += 0.9 * bound
    compare(wrong)
    wrong[17] += 0.2 * bound
    with pytest.raises(DivergedError, match=r"step 1, request a, logits\[17\]"):
        compare(wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_diverge(value: float) -> None:
    wrong = ROW.copy()
    wrong[5] = value
    with pytest.raises(DivergedError, match=r"logits\[5\]"):
        compare(wrong)


@pytest.mark.parametrize("value", [None, "x", [1.0], np.array(["a"]), np.zeros((2, 3))])
def test_logits_that_are_no_array_are_rubbish(value: object) -> None:
    with pytest.raises(ImplementationFailed, match="must be"):
        float_array(value, (1, DENSE.vocab_size), "logits")


def token_verdict(got: object, margin: float) -> tuple[bool, Tally]:
    logits = ROW.copy()
    logits[7] = logits.max() + margin
    tally = Tally()
    equal = compare_token(7, got, logits, DENSE, "float32", tally, num_keys=10, step=1, request="a")
    return equal, tally


def test_equal_tokens_and_ties_are_counted() -> None:
    assert token_verdict(7, 1.0)[0]
    bound = token_margin_bound(ROW, DENSE, "float32", 10)
    equal, tally = token_verdict(8, 0.9 * bound)
    assert not equal
    assert (tally.tokens, tally.ties) == (1, 1)


def test_a_token_with_a_clear_margin_diverges() -> None:
    bound = token_margin_bound(ROW, DENSE, "float32", 10)
    with pytest.raises(DivergedError, match=r"request a, sampled_token_ids\['a'\]: expected 7"):
        token_verdict(8, 1.1 * bound)


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (None, "must be an int"),
        ("7", "must be an int"),
        (7.0, "must be an int"),
        (True, "must be an int"),
        (-1, r"must be in \[0, vocab_size"),
        (DENSE.vocab_size, r"must be in \[0, vocab_size"),
    ],
)
def test_tokens_that_are_none_are_rubbish(got: object, wanted: str) -> None:
    with pytest.raises(ImplementationFailed, match=wanted):
        token_verdict(got, 1.0)
