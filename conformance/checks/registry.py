"""All suites, in the order in which they run: what others build on comes first."""

from __future__ import annotations

from servespec.conformance.checks import (
    attention,
    batch,
    cache,
    engine,
    invariance,
    kernels,
    model,
    scheduling,
    scheduling_v0,
)
from servespec.conformance.checks.suite import Suite

__all__ = ["SUITES", "UnknownSuiteError", "suite"]

SUITES: dict[str, Suite] = {
    each.name: each
    for each in (
        scheduling.SUITE,
        scheduling_v0.SUITE,
        kernels.SUITE,
        cache.SUITE,
        batch.SUITE,
        attention.SUITE,
        model.SUITE,
        engine.SUITE,
        engine.BFLOAT16_SUITE,
        invariance.SUITE,
    )
}


class UnknownSuiteError(ValueError):
    """There is no suite of this name."""


def suite(name: str) -> Suite:
    """Return a suite.

    Parameters
    ----------
    name : str

    Raises
    ------
    UnknownSuiteError
    """
    if name not in SUITES:
        raise UnknownSuiteError(f"unknown suite {name!r}: must be one of {', '.join(SUITES)}")
    return SUITES[name]
