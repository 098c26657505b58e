"""Norms, gates and rotary against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from servespec.fast.kernels.activations import sigmoid_gate, silu_and_mul
from servespec.fast.kernels.norms import gated_rms_norm, l2_norm, rms_norm
from servespec.fast.kernels.rotary import apply_rotary, cos_sin_table

U = 2.0**-24
N = 96


def close(got: torch.Tensor, expected: torch.Tensor, relative: float) -> bool:
    return bool(((got.double() - expected).abs() <= relative * expected.abs() + 1e-30).all())


# A mean of n squares is off by n u, its root by half of that; a few roundings more.
NORM_BOUND = (N / 2 + 8) * U


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    torch.manual_seed(0)
    x = (torch.randn(7, 3, N) * 10).to(dtype)
    weight = 1.0 + torch.randn(3, N)
    mean = x.double().square().mean(-1, keepdim=True)
    got = rms_norm(x, weight, 1e-3)
    assert got.dtype is torch.float32
    assert close(got, x.double() / (mean + 1e-3).sqrt() * weight.double(), NORM_BOUND)
    # The epsilon matters for a row that is nearly zero.
    tiny = torch.full((1, N), 1e-4)
    assert close(rms_norm(tiny, torch.ones(N), 1e-6), tiny.double() / (1e-8 + 1e-6) ** 0.5, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rms_norm(dtype):
    torch.manual_seed(1)
    x, gate, weight = torch.randn(5, 4, N), torch.randn(5, 4, N).to(dtype), torch.randn(N)
    mean = x.double().square().mean(-1, keepdim=True)
    z = gate.double()
    expected = x.double() / (mean + 1e-6).sqrt() * weight.double() * z * z.sigmoid()
    assert close(gated_rms_norm(x, gate, weight, 1e-6), expected, NORM_BOUND + 8 * U)


def test_l2_norm():
    torch.manual_seed(2)
    x = torch.randn(9, N)
    x[0] = 0
    expected = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert close(l2_norm(x), expected, NORM_BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates(dtype):
    torch.manual_seed(3)
    x = torch.randn(6, 2 * N).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    # silu or sigmoid and the product round once each.
    relative = 2.1 * 2.0**-8 if dtype is torch.bfloat16 else 10 * U
    assert close(silu_and_mul(x), gate * gate.sigmoid() * up, relative)
    assert close(sigmoid_gate(x[:, N:], x[:, :N]), up * gate.sigmoid(), relative)
    assert silu_and_mul(x).dtype is dtype


@pytest.mark.parametrize("rotary_dim", [2, 8, 16])
def test_rotary(rotary_dim):
    torch.manual_seed(4)
    theta, dim = 1e4, 16
    positions = torch.tensor([0, 1, 2, 17, 255, 1023])
    x = torch.randn(len(positions), 3, dim)
    got = apply_rotary(x.clone(), cos_sin_table(1024, rotary_dim, theta)[positions])
    half = rotary_dim // 2
    expected = x.double()
    bound = torch.zeros(dim, dtype=torch.float64).expand(expected.shape).clone()
    for j in range(half):
        frequency = theta ** (-2 * j / rotary_dim)
        angle = positions.double() * frequency
        first, second = x[:, :, j].double(), x[:, :, half + j].double()
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        expected[:, :, j] = first * cos - second * sin
        expected[:, :, half + j] = second * cos + first * sin
        # The float32 angle is off by the frequency's error (a power: 8 u) times the position.
        error = (10 * angle + 6)[:, None] * U * (first.abs() + second.abs())
        bound[:, :, j] = bound[:, :, half + j] = error
    assert bool(((got.double() - expected).abs() <= bound).all())
    assert torch.equal(got[:, :, rotary_dim:], x[:, :, rotary_dim:])
    assert torch.equal(got[0], x[0])
