"""Arguments of a launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from servespec.fast.backends.base import BackendError
from servespec.fast.backends.binding import argument_type, signature


def _kernel(X, n, scale, BLOCK: tl.constexpr):  # noqa: F821
    raise AssertionError("never run")


KERNEL = SimpleNamespace(fn=_kernel, __name__="_kernel")


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def test_types_by_name_without_constants():
    kernel = Hashable(**vars(KERNEL))
    types = signature(kernel, (torch.ones(1, dtype=torch.bfloat16), 3, 0.5), {"BLOCK": 4})
    assert types == {"X": "*bf16", "n": "i32", "scale": "fp32"}


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [((), {"BLOCK": 4}), ((torch.ones(1), 3, 0.5), {}), ((torch.ones(1), 3, 0.5), {"BLOK": 4})],
)
def test_missing_or_unknown_parameters(arguments, constants):
    with pytest.raises(BackendError, match="kernel _kernel takes"):
        signature(Hashable(**vars(KERNEL)), arguments, constants)


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1])
def test_integers_that_do_not_fit_are_refused(value):
    with pytest.raises(BackendError, match="out of range"):
        argument_type(value)


@pytest.mark.parametrize("value", ["x", None, torch.ones(1, dtype=torch.complex64)])
def test_other_things_are_refused(value):
    with pytest.raises(BackendError, match="cannot be given"):
        argument_type(value)
