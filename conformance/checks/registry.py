"""All suites, in the order in which they run: what others build on comes first."""

from __future__ import annotations

from servespec.conformance.checks import (
    batch,
    cache,
    engine,
    invariance,
    model,
    scheduling,
    scheduling_v0,
)
from servespec.conformance.checks.suite import Suite

__all__ = ["SUITES", "UnknownSuiteError", "suite"]

SUITES: dict[str, Suite] = {
    module.SUITE.name: module.SUITE
    for module in (scheduling, scheduling_v0, cache, batch, model, engine, invariance)
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
