"""Which backend is chosen, and what is said of the others."""

from __future__ import annotations

import pytest

from servespec.fast.backends import registry
from servespec.fast.backends.base import BackendError


@pytest.fixture
def installed(monkeypatch):
    """Pretend that distributions are installed."""

    def pretend(*names):
        monkeypatch.setattr(registry, "_has", lambda name: name in names)
        monkeypatch.delenv(registry.VARIABLE, raising=False)
        registry.backend.cache_clear()

    yield pretend
    registry.backend.cache_clear()


def test_without_triton_every_backend_has_a_reason_and_torch_serves(installed):
    installed()
    statuses = registry.statuses()
    assert [status.name for status in statuses] == list(registry.BACKENDS)
    assert all("not installed" in status.reason for status in statuses)
    assert registry.choose("cpu") is None
    assert registry.choose("meta") is None


def test_both_tritons_are_refused(installed):
    installed("triton", "triton-ascend")
    for call in (registry.statuses, registry.choose, lambda: registry.backend("cpu")):
        with pytest.raises(BackendError, match="both installed"):
            call()


def test_upstream_triton_runs_the_interpreter_but_never_by_itself(installed):
    installed("triton")
    reasons = {status.name: status.reason for status in registry.statuses()}
    assert reasons["interpreter"] is None
    assert "triton-ascend" in reasons["cpu"]
    assert registry.choose("cpu") is None


def test_a_backend_asked_for_by_name_must_run_here(installed, monkeypatch):
    installed()
    monkeypatch.setenv(registry.VARIABLE, "torch")
    assert registry.choose("cpu") is None
    monkeypatch.setenv(registry.VARIABLE, "interpreter")
    with pytest.raises(BackendError, match="interpreter cannot run here: triton is not installed"):
        registry.choose("cpu")
    monkeypatch.setenv(registry.VARIABLE, "abacus")
    with pytest.raises(BackendError, match="unknown backend 'abacus': must be one of npu, cuda"):
        registry.choose("cpu")


def test_a_broken_torch_npu_is_a_reason_not_a_crash(installed, monkeypatch):
    installed("triton-ascend")

    def broken(name):
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(registry.util, "find_spec", lambda name: object())
    monkeypatch.setattr("importlib.import_module", broken)
    reason = next(s.reason for s in registry.statuses() if s.name == "npu")
    assert "torch_npu does not load: libhccl.so" in reason


def test_cuda_without_a_device_raises(monkeypatch):
    pytest.importorskip("triton", reason="needs upstream Triton")
    cuda = pytest.importorskip("servespec.fast.backends.cuda")
    monkeypatch.setattr(cuda.torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="no CUDA device"):
        cuda.CudaBackend()
