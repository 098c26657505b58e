"""The delta rule against its definition, its two forms against each other, and transformers.

Bound between evaluations in float64. Each token multiplies the state from the right by
``exp(g) (I - beta k k^T)``, whose norm is at most 1 for ``|k| = 1``: an error made at one token
never grows later. What a token adds is rounded with at most ``key_dim + chunk + 8`` operations on
numbers no larger than M, the largest state row or value norm. So after n tokens two evaluations
differ by at most ``2 n (key_dim + chunk + 8) eps M``.
"""

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from servespec.reference.numerics.gated_delta_rule import (
    CHUNK_SIZE,
    chunked_gated_delta_rule,
    gating,
    recurrent_gated_delta_rule,
)

EPS = np.finfo(np.float64).eps


def definition(query, key, value, g, beta, state):
    """One scalar at a time, in the widest float of the machine."""
    wide = np.longdouble
    outputs = np.zeros(value.shape, wide)
    states = state.astype(wide)
    repeats = value.shape[1] // key.shape[1]
    largest = 0.0
    for t in range(len(value)):
        for head in range(value.shape[1]):
            q, k = (x[t, head // repeats].astype(wide) for x in (query, key))
            fade, rate = np.exp(wide(g[t, head])), wide(beta[t, head])
            for row in range(value.shape[2]):
                held = [fade * s for s in states[head, row]]
                delta = rate * (wide(value[t, head, row]) - sum(map(wide.__mul__, held, k)))
                states[head, row] = [s + delta * part for s, part in zip(held, k, strict=True)]
                outputs[t, head, row] = sum(map(wide.__mul__, states[head, row], q)) / np.sqrt(
                    wide(len(q))
                )
            largest = max(largest, float(np.linalg.norm(states[head].astype(float), axis=1).max()))
    return outputs, states, max(largest, float(np.abs(value).max()))


def bound(n, key_dim, chunk, largest):
    return 2 * n * (key_dim + chunk + 8) * EPS * largest


@pytest.mark.parametrize("rule", [recurrent_gated_delta_rule, chunked_gated_delta_rule])
def test_equals_the_definition(delta_rule_inputs, rule):
    n = 70
    inputs = delta_rule_inputs(n)
    outputs, state, largest = definition(**inputs)
    got_outputs, got_state = rule(**inputs)
    chunk = CHUNK_SIZE if rule is chunked_gated_delta_rule else 0
    limit = bound(n, 16, chunk, largest)
    assert np.abs(got_state - state).max() <= limit
    assert np.abs(got_outputs - outputs).max() <= limit


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 64])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_forms_agree(delta_rule_inputs, n, chunk_size):
    inputs = delta_rule_inputs(n)
    outputs, state = recurrent_gated_delta_rule(**inputs)
    chunked, chunked_state = chunked_gated_delta_rule(**inputs, chunk_size=chunk_size)
    # Corrections only interpolate between what a state returns and the values, so rows of a state
    # are no longer than the first state's and all values together.
    largest = np.linalg.norm(inputs["state"], axis=-1).max() + np.abs(inputs["value"]).sum(0).max()
    limit = bound(n, 16, chunk_size, largest)
    assert np.abs(chunked - outputs).max() <= limit
    assert np.abs(chunked_state - state).max() <= limit
    assert limit < 1e-8, "the bound would hide a real difference"


@pytest.mark.parametrize("rule", [recurrent_gated_delta_rule, chunked_gated_delta_rule])
@pytest.mark.parametrize("cut", [1, 30, 64, 99])
def test_continues_from_the_state(delta_rule_inputs, rule, cut):
    inputs = delta_rule_inputs(100)
    state = inputs.pop("state")
    outputs, last = rule(**inputs, state=state)
    head = {name: x[:cut] for name, x in inputs.items()}
    tail = {name: x[cut:] for name, x in inputs.items()}
    first_outputs, middle = rule(**head, state=state)
    second_outputs, end = rule(**tail, state=middle)
    largest = np.linalg.norm(state, axis=-1).max() + np.abs(inputs["value"]).sum(0).max()
    limit = bound(100, 16, CHUNK_SIZE, largest)
    assert np.abs(np.concatenate([first_outputs, second_outputs]) - outputs).max() <= limit
    assert np.abs(end - last).max() <= limit


def test_a_strong_decay_does_not_overflow(delta_rule_inputs):
    inputs = delta_rule_inputs(64)
    inputs["g"] = np.full_like(inputs["g"], -40.0)  # exp of the sum over a chunk underflows to 0
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        outputs, state = chunked_gated_delta_rule(**inputs)
    expected, expected_state = recurrent_gated_delta_rule(**inputs)
    assert np.abs(outputs - expected).max() <= bound(64, 16, 64, 10.0)
    assert np.abs(state - expected_state).max() <= bound(64, 16, 64, 10.0)


@pytest.mark.parametrize("rule", [recurrent_gated_delta_rule, chunked_gated_delta_rule])
def test_a_token_that_neither_fades_nor_writes_leaves_the_state(delta_rule_inputs, rule):
    inputs = delta_rule_inputs(3)
    inputs["g"][:], inputs["beta"][:] = 0.0, 0.0
    _, state = rule(**inputs)
    assert np.array_equal(state, inputs["state"])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (recurrent_gated_delta_rule, modeling_qwen3_5.torch_recurrent_gated_delta_rule),
        (chunked_gated_delta_rule, modeling_qwen3_5.torch_chunk_gated_delta_rule),
    ],
)
def test_agrees_with_transformers(delta_rule_inputs, ours, theirs):
    n = 130
    inputs = delta_rule_inputs(n)
    tensors = {name: torch.tensor(x)[None] for name, x in inputs.items() if name != "state"}
    with torch.no_grad():
        outputs, state = theirs(
            **tensors,
            initial_state=torch.tensor(inputs["state"].transpose(0, 2, 1))[None],
            output_final_state=True,
        )
    got_outputs, got_state = ours(**inputs)
    _, _, largest = definition(**inputs)
    # The same bound for float32, in which transformers computes whatever it is given.
    limit = bound(n, 16, 64, largest) / EPS * np.finfo(np.float32).eps
    assert np.abs(got_outputs - outputs[0].numpy()).max() <= limit
    assert np.abs(got_state - state[0].numpy().transpose(0, 2, 1)).max() <= limit
    assert np.abs(got_outputs - outputs[0].numpy()).max() <= 1e-4, "far inside the bound in fact"


def test_gating_by_hand():
    a = np.array([[0.0, 1.0]])
    g, beta = gating(a, np.array([[0.0, np.log(3.0)]]), np.log([1.0, 2.0]), np.array([0.0, -1.0]))
    assert g == pytest.approx(np.array([[-np.log(2.0), -2.0 * np.log(2.0)]]), rel=4 * EPS)
    assert beta == pytest.approx(np.array([[0.5, 0.75]]), rel=4 * EPS)


def test_gating_never_lets_a_state_grow(draw):
    g, beta = gating(50 * draw(100, 4), 50 * draw(100, 4), 3 * draw(4), draw(4))
    assert (g <= 0).all()
    assert ((beta >= 0) & (beta <= 1)).all()
