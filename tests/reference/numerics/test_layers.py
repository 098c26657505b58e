"""Norms, rotary, convolution, MLP, activations and sampling against torch and transformers."""

import numpy as np
import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from servespec.reference.numerics.activations import sigmoid, silu, softplus
from servespec.reference.numerics.convolution import causal_convolution
from servespec.reference.numerics.mlp import mlp
from servespec.reference.numerics.norms import gated_rms_norm, l2_norm, rms_norm
from servespec.reference.numerics.rotary import apply_rotary, rotary_angles
from servespec.reference.numerics.sampling import greedy

EPS = np.finfo(np.float64).eps
EPS32 = np.finfo(np.float32).eps
functional = torch.nn.functional


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (sigmoid, torch.sigmoid),
        (silu, functional.silu),
        (softplus, lambda x: functional.softplus(x, threshold=800.0)),
    ],
)
def test_activations(ours, torchs):
    x = np.concatenate([np.linspace(-40, 40, 4001), [-745.0, -700.0, 0.0, 700.0]])
    with np.errstate(over="raise", invalid="raise"):
        got = ours(x)
    # A handful of correctly rounded operations and one exponential within 1 ulp each.
    assert got == pytest.approx(torchs(torch.tensor(x)).numpy(), rel=16 * EPS, abs=1e-300)


def test_softplus_beyond_torchs_threshold():
    x = np.linspace(20.0, 60.0, 401)
    default = functional.softplus(torch.tensor(x)).numpy()
    assert np.abs(softplus(x) - default).max() <= np.exp(-20.0) * (1 + 16 * EPS)


def test_rms_norm_adds_one_to_its_weight(draw):
    x, weight = draw(5, 3, 64), draw(64)
    module = theirs.Qwen3_5RMSNorm(64, eps=1e-6)
    module.weight.data = torch.tensor(weight, dtype=torch.float32)
    with torch.no_grad():
        expected = module(torch.tensor(x, dtype=torch.float32)).numpy()
    # 64 additions for the mean, then a few roundings of values around 10.
    assert np.abs(rms_norm(x, weight, 1e-6) - expected).max() <= (64 / 2 + 8) * EPS32 * 10
    assert rms_norm(np.array([3.0, 4.0]), np.array([0.0, 1.0]), 0.0) == pytest.approx(
        np.array([3.0, 8.0]) / np.sqrt(12.5), rel=4 * EPS
    )


def test_gated_rms_norm_norms_before_it_gates(draw):
    x, gate, weight = draw(5, 4, 24), draw(5, 4, 24), draw(24)
    module = theirs.Qwen3_5RMSNormGated(24, eps=1e-6)
    module.weight.data = torch.tensor(weight, dtype=torch.float32)
    with torch.no_grad():
        expected = module(
            torch.tensor(x, dtype=torch.float32), torch.tensor(gate, dtype=torch.float32)
        ).numpy()
    assert np.abs(gated_rms_norm(x, gate, weight, 1e-6) - expected).max() <= 20 * EPS32 * 20


def test_l2_norm(draw):
    x = draw(7, 2, 16)
    x[0] = 0.0
    got = l2_norm(x)
    assert np.array_equal(got[0], np.zeros((2, 16)))
    assert (np.linalg.norm(got, axis=-1) <= 1.0).all()
    expected = theirs.l2norm(torch.tensor(x)).numpy()
    assert np.abs(got - expected).max() <= (16 + 4) * EPS


@pytest.mark.parametrize("section", [(11, 11, 10), (2, 1, 1), (4, 0, 0)])
def test_rotary_deals_frequencies_to_three_positions(draw, section):
    dim = 2 * sum(section)
    config = Qwen3_5TextConfig(
        head_dim=dim * 2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": list(section),
        },
    )
    positions = np.array([[0, 5, 17, 3], [0, 7, 2, 30], [0, 1, 40, 9]])
    x = draw(4, 3, dim * 2)
    cos, sin = theirs.Qwen3_5TextRotaryEmbedding(config)(
        torch.zeros(1, dtype=torch.float64), torch.tensor(positions)[:, None]
    )
    # transformers rotates [batch, heads, tokens, head_dim].
    expected, _ = theirs.apply_rotary_pos_emb(
        *(torch.tensor(x).transpose(0, 1)[None] for _ in "qk"), cos, sin
    )
    got = apply_rotary(x, rotary_angles(positions, dim, 1e4, section))
    # Angles up to 40 are rounded to float32 there.
    limit = 4 * 40 * EPS32 * np.abs(x).max()
    assert np.abs(got - expected[0].transpose(0, 1).numpy()).max() <= limit


def test_text_positions_make_sections_a_no_op():
    text = np.arange(50)
    plain = rotary_angles(text, 8, 1e4)
    assert np.array_equal(plain, rotary_angles(np.stack([text] * 3), 8, 1e4, (2, 1, 1)))


def test_rotary_keeps_the_rest_and_depends_on_distance_only(draw):
    q, k = draw(1, 1, 32), draw(1, 1, 32)

    def product(at_q: int, at_k: int) -> float:
        turned = [
            apply_rotary(x, rotary_angles(np.array([p]), 8, 1e4)) for x, p in ((q, at_q), (k, at_k))
        ]
        assert np.array_equal(turned[0][..., 8:], q[..., 8:])
        return float((turned[0] * turned[1]).sum())

    # Two rotations and 32 products of values below 4, with angles up to 100.
    assert product(100, 93) == pytest.approx(product(7, 0), abs=(100 + 32) * EPS * 16 * 32)


def test_convolution_is_torchs(draw):
    inputs, weight = draw(11, 6), draw(6, 4)
    expected = functional.silu(
        functional.conv1d(
            torch.tensor(inputs.T)[None], torch.tensor(weight)[:, None], padding=3, groups=6
        )[..., :11]
    )[0].T.numpy()
    got, state = causal_convolution(inputs, weight, np.zeros((3, 6)))
    # silu has slope below 1.1 and four products are summed.
    assert np.abs(got - expected).max() <= 8 * EPS * np.abs(inputs).max() * np.abs(weight).max() * 4
    assert np.array_equal(state, inputs[-3:])


@pytest.mark.parametrize("cuts", [(1, 2, 3), (4,), (5, 6), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)])
def test_convolution_goes_on_from_its_state(draw, cuts):
    inputs, weight, state = draw(11, 6), draw(6, 4), draw(3, 6)
    whole, last = causal_convolution(inputs, weight, state)
    outputs = []
    for start, end in zip((0, *cuts), (*cuts, 11), strict=True):
        part, state = causal_convolution(inputs[start:end], weight, state)
        outputs.append(part)
    assert np.array_equal(np.concatenate(outputs), whole)  # the same operations on each token
    assert np.array_equal(state, last)


def test_mlp(draw):
    x, gate, up, down = draw(3, 8), draw(12, 8), draw(12, 8), draw(8, 12)
    x_, gate_, up_, down_ = (torch.tensor(value) for value in (x, gate, up, down))
    expected = functional.linear(
        functional.silu(functional.linear(x_, gate_)) * functional.linear(x_, up_), down_
    ).numpy()
    # Products of three sums, of 8, 8 and 12 terms.
    size = np.abs(x).max() ** 2 * np.abs(gate).max() * np.abs(up).max() * np.abs(down).max()
    assert np.abs(mlp(x, gate, up, down) - expected).max() <= 8 * 8 * 12 * (8 + 12) * EPS * size


def test_greedy_takes_the_lowest_of_equal_maxima():
    logits = np.array([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-5.0, -4.0, -4.0, -3.0]])
    assert greedy(logits) == (1, 0, 3)
    assert greedy(np.zeros((0, 4))) == ()


def test_greedy_refuses_nan():
    with pytest.raises(ValueError, match="logits of row 1 contain NaN"):
        greedy(np.array([[0.0, 1.0], [np.nan, 1.0]]))
