from __future__ import annotations

import math

import pytest
import torch

from servespec.fast.kernels import linear


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_product(monkeypatch, tokens, dtype, packed):
    if not packed:
        # As where torch lacks the operators.
        monkeypatch.setattr(linear, "_packed", lambda weight: None)
    torch.manual_seed(tokens)
    weight, x = torch.randn(50, 96).to(dtype), torch.randn(tokens, 96).to(dtype)
    got = linear.Linear(weight)(x)
    assert got.dtype is dtype
    terms = x.double()[:, None] * weight.double()
    # 96 products accumulated in float32, independent roundings, 6 standard deviations; bfloat16
    # rounds the result once more.
    bound = 6 * math.sqrt(96) * 2.0**-24 * terms.abs().sum(-1)
    if dtype is torch.bfloat16:
        bound = bound + 2.0**-8 * terms.sum(-1).abs()
    assert bool(((got.double() - terms.sum(-1)).abs() <= bound).all())


def test_packing_fails_softly(monkeypatch):
    weight = torch.randn(4, 3)

    def missing(*args: object) -> None:
        raise AttributeError

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing)
    x = torch.randn(2, 3)
    assert torch.equal(linear.Linear(weight)(x), torch.nn.functional.linear(x, weight))
