"""Every planted fault is found by every suite named for it; the negative control by none."""

import pytest

from servespec.conformance import faults
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.registry import SUITES
from servespec.conformance.drawing import draw_cases
from servespec.conformance.faults.catalogue import FAILURES, FAULTS
from servespec.conformance.faults.fault import Fault
from servespec.conformance.faults.self_test import try_suite
from servespec.conformance.verdicts import Verdict, run_check

PAIRS = [(fault, name) for fault in FAULTS for name in fault.suites]


@pytest.mark.parametrize(("fault", "suite"), PAIRS, ids=[f"{f.name}-{s}" for f, s in PAIRS])
def test_a_fault_is_found(fault: Fault, suite: str) -> None:
    finding = try_suite(fault, SUITES[suite], 100 * fault.rarity)
    assert finding.ok, f"{finding.cases} cases agreed"
    assert finding.divergence is not None
    assert not finding.divergence.failed, finding.divergence
    assert finding.divergence.field != "check", finding.divergence


def test_a_numeric_fault_shows_in_the_numbers_first() -> None:
    for name in ("state_of_another_request", "one_key_too_many"):
        finding = try_suite(getattr(faults, name), SUITES["engine"], 100)
        assert finding.divergence is not None
        assert finding.divergence.place == "logits"
        assert finding.divergence.request is not None


def test_rounding_is_not_reported() -> None:
    control = faults.rounded_otherwise
    assert not control.suites
    for suite in ("model", "engine"):
        finding = try_suite(control, SUITES[suite], 4)
        assert finding.divergence is None
        assert finding.cases == 4


def test_names_are_importable_and_differ() -> None:
    names = [fault.name for fault in FAULTS + FAILURES]
    assert len(names) == len(set(names))
    assert all(getattr(faults, name).name == name for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'none_such'"):
        _ = faults.none_such


def test_an_exception_is_a_failure_with_its_last_lines() -> None:
    cases: list[Case] = []
    draw_cases(SUITES["engine"].cases(), 1, 0, lambda case: bool(cases.append(case)))
    result = run_check(SUITES["engine"].check, cases[0], faults.raises)
    assert result.verdict is Verdict.FAILED
    assert result.divergence is not None
    assert "RuntimeError: planted: the device is lost" in result.divergence.got
    assert "planted" in result.last_lines[-1]
