"""What the backend for NPUs does before triton-ascend takes over; needs no device."""

from __future__ import annotations

import os

import pytest

from servespec.fast.backends import npu
from servespec.fast.backends.base import BackendError

VARIABLES = ("TRITON_ALL_BLOCKS_PARALLEL", "TRITON_CACHE_DIR")


class Kernel:
    """Notes how it is launched."""

    __name__ = "_kernel"

    def __init__(self):
        self.grids = []
        self.environments = []

    @staticmethod
    def fn(n):
        raise AssertionError("never run")

    def __getitem__(self, grid):
        def run(n):
            self.grids.append(grid)
            self.environments.append(tuple(os.environ.get(name) for name in VARIABLES))
            if n < 0:
                raise RuntimeError("the device says no")

        return run


@pytest.fixture
def backend(monkeypatch, tmp_path):
    monkeypatch.setattr(npu, "device_reason", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_ALL_BLOCKS_PARALLEL", raising=False)
    return npu.NpuBackend()


def test_a_grid_above_65535_is_launched_with_the_loop_and_a_cache_of_its_own(backend, tmp_path):
    kernel = Kernel()
    before = dict(os.environ)
    backend.launch(kernel, (8, 300, 64), 1)
    assert kernel.grids == [(8, 300, 64)]
    assert kernel.environments == [("1", str(tmp_path / "all-blocks-parallel"))]
    assert dict(os.environ) == before


def test_a_launch_that_fails_leaves_the_environment_as_it_was(backend):
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="the device says no"):
        backend.launch(Kernel(), (1,), -1)
    assert dict(os.environ) == before


def test_a_grid_that_no_index_can_count_is_refused(backend):
    kernel = Kernel()
    with pytest.raises(BackendError, match=r"_kernel has a grid of 2147483648: must be at most"):
        backend.launch(kernel, (1 << 16, 1 << 15), 1)
    assert not kernel.grids


def test_without_a_device_there_is_no_backend(monkeypatch):
    monkeypatch.setattr(npu, "device_reason", lambda: "torch_npu finds no device")
    with pytest.raises(BackendError, match="cannot run here: torch_npu finds no device"):
        npu.NpuBackend()
