"""Faults planted on purpose, which the checks must find.

Each is an implementation: ``servespec check --impl servespec.conformance.faults:one_key_too_many``
must end with exit status 1. `servespec faults` tries them all.
"""

from servespec.conformance.faults.catalogue import FAILURES, FAULTS
from servespec.conformance.faults.fault import Fault

__all__ = ["FAILURES", "FAULTS", "Fault"]


def __getattr__(name: str) -> Fault:
    for fault in FAULTS + FAILURES:
        if fault.name == name:
            return fault
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
