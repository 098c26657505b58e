"""Compiled kernels and their cache; needs the extra cpu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("llvmlite", reason="needs the extra cpu")
pytest.importorskip("triton.backends.ascend", reason="needs the extra cpu")

from servespec.fast.backends.cpu import native
from servespec.fast.backends.cpu.backend import CpuBackend
from servespec.fast.kernels.triton import gated_delta_rule


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVESPEC_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def gate():
    """Run a small kernel in a backend that remembers nothing but what is on disk."""
    a = torch.linspace(-30, 30, 12).view(3, 4)
    g, beta = gated_delta_rule.gating(CpuBackend(), a, a, -torch.ones(4), torch.zeros(4))
    torch.testing.assert_close(g, -torch.nn.functional.softplus(a), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(beta, a.sigmoid(), rtol=1e-6, atol=1e-6)


def test_code_is_found_again_and_damaged_code_replaced(cache, monkeypatch):
    gate()
    (file,) = cache.iterdir()
    good = file.read_bytes()
    compiled = []
    monkeypatch.setattr(
        native,
        "compile_ir",
        lambda *a, real=native.compile_ir, **k: compiled.append(1) or real(*a, **k),
    )
    gate()
    assert not compiled
    for bad in (b"", good[: len(good) // 2], good[:-1] + bytes([good[-1] ^ 1]), b"{}\nxxxx"):
        file.write_bytes(bad)
        gate()
        assert len(compiled) == 1, bad[:20]
        compiled.clear()
        assert native.read(file.stem) is not None


def test_a_folder_that_others_can_write_to_is_not_trusted(cache):
    cache.mkdir(mode=0o700)
    assert native.cache_folder() == cache
    cache.chmod(0o777)
    assert native.cache_folder() is None
    gate()
    assert not list(cache.iterdir())


def test_threads_give_the_same_numbers():
    heads, rows = 4, 5
    q, k, v = (torch.randn(rows, heads, 32) for _ in range(3))
    g, beta = -torch.rand(rows, heads), torch.rand(rows, heads)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            states = torch.ones(rows + 1, heads, 32, 32)
            out = gated_delta_rule.gated_delta_rule_decode(
                CpuBackend(), q, k, v, g, beta, states, torch.arange(1, rows + 1)
            )
            results.append((out, states))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("x", [0.0, 1.0, -1.0, 88.0, 89.5, -87.0, -103.0, -200.0, float("-inf")])
def test_the_exponential(x):
    # beta = 1 / (1 + exp(-b)) passes any argument through the exponential.
    b = torch.full((1, 4), -x)
    _, beta = gated_delta_rule.gating(CpuBackend(), b, b, torch.ones(4), torch.zeros(4))
    torch.testing.assert_close(beta.double(), b.double().sigmoid(), rtol=4 * 2.0**-24, atol=1e-38)


def test_nan_shows():
    b = torch.full((1, 4), float("nan"))
    _, beta = gated_delta_rule.gating(CpuBackend(), b, b, torch.ones(4), torch.zeros(4))
    assert beta.isnan().all()
