"""What implementations lack, make and answer wrongly is their own failure, in every suite."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.foreign import made, require_answer
from servespec.conformance.checks.registry import SUITES
from servespec.conformance.drawing import draw_cases
from servespec.conformance.verdicts import Divergence, Verdict, run_check
from servespec.reference.contracts import SchedulerOutput, SchedulerSnapshot

MADE = {
    "scheduling": "scheduler",
    "cache": "scheduler",
    "scheduling-v0": "V0 scheduler",
    "batch": "batch",
    "attention": "attention layer",
    "engine": "engine",
    "model": "engine",
    "invariance": "engine",
}


def drawn(name: str) -> Case:
    found: list[Case] = []
    draw_cases(SUITES[name].cases(), 2, 0, lambda case: bool(found.append(case)) or True)
    return found[-1]


class Making:
    """An implementation whose every factory returns the same."""

    name = "making"

    def __init__(self, make: Callable[[], Any]) -> None:
        for factory in ("scheduler", "v0_scheduler", "batch", "attention", "engine", "kernels"):
            setattr(self, f"make_{factory}", lambda *args, make=make: make())


def failed(suite: str, implementation: object) -> Divergence:
    result = run_check(SUITES[suite].check, drawn(suite), implementation)
    assert result.divergence is not None
    assert result.verdict is Verdict.FAILED, str(result.divergence)
    assert result.divergence.field == "implementation"
    return result.divergence


@pytest.mark.parametrize("suite", MADE)
def test_a_factory_that_returns_nothing_has_failed(suite: str) -> None:
    got = failed(suite, Making(lambda: None)).got
    assert got.endswith(f" returned None in place of the {MADE[suite]}")


@pytest.mark.parametrize("suite", MADE)
def test_a_missing_method_is_named(suite: str) -> None:
    got = failed(suite, Making(object)).got
    assert got.startswith(f"the {MADE[suite]} has no '")


@pytest.mark.parametrize(
    ("suite", "method"), [("scheduling", "snapshot"), ("scheduling-v0", "schedule")]
)
def test_a_method_that_is_missing_or_none_later_is_named(suite: str, method: str) -> None:
    class Lacking:
        def __init__(self, inner: object, lacks: bool) -> None:
            self.inner, self.lacks = inner, lacks
            if not lacks:
                setattr(self, method, None)

        def __getattr__(self, name: str) -> object:
            if name == method:
                raise AttributeError(name)
            return getattr(self.inner, name)

    class Implementation(ReferenceImplementation):
        def __init__(self, lacks: bool) -> None:
            super().__init__()
            self.lacks = lacks

        def make_scheduler(self, *configs: Any) -> Any:
            return Lacking(super().make_scheduler(*configs), self.lacks)

        def make_v0_scheduler(self, *configs: Any) -> Any:
            return Lacking(super().make_v0_scheduler(*configs), self.lacks)

    for lacks in (True, False):
        assert failed(suite, Implementation(lacks)).got == f"the {MADE[suite]} has no '{method}'"


@pytest.mark.parametrize("operations", [None, 7, [print]])
def test_kernels_that_are_no_mapping_are_a_failure(operations: object) -> None:
    got = failed("kernels", Making(lambda: operations)).got
    assert got == f"make_kernels returned {operations!r}: must be a mapping of operations by name"


def test_a_lookup_that_raises_and_a_method_that_is_none_are_failures() -> None:
    class Broken:
        number = 7

        @property
        def raises(self) -> object:
            raise OSError("gone")

    thing: Any = made("thing", Broken)
    with pytest.raises(ImplementationFailed, match="raised OSError: gone"):
        thing.raises()
    with pytest.raises(ImplementationFailed, match="'number' of the thing is 7: must be a method"):
        thing.number()


class Answering(ReferenceImplementation):
    """The reference, whose scheduler answers one call with what a function makes of the answer."""

    def __init__(self, call: str, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.call, self.change = call, change

    def _changed(self, inner: Any) -> Any:
        call, change = self.call, self.change

        class Changed:
            def __getattr__(self, name: str) -> Any:
                method = getattr(inner, name)
                return (lambda *args: change(method(*args))) if name == call else method

        return Changed()

    def make_scheduler(self, *configs: Any) -> Any:
        return self._changed(super().make_scheduler(*configs))

    def make_v0_scheduler(self, *configs: Any) -> Any:
        return self._changed(super().make_v0_scheduler(*configs))

    def make_engine(self, *configs: Any) -> Any:
        return self._changed(super().make_engine(*configs))


class Unequal:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no opinion")


@pytest.mark.parametrize("answer", [None, "abc"])
@pytest.mark.parametrize(
    ("suite", "call", "kind"),
    [
        ("scheduling", "schedule", "SchedulerOutput"),
        ("scheduling", "snapshot", "SchedulerSnapshot"),
        ("scheduling", "update_from_output", "tuple"),
        ("cache", "schedule", "SchedulerOutput"),
        ("cache", "snapshot", "SchedulerSnapshot"),
        ("cache", "update_from_output", "tuple"),
        ("scheduling-v0", "schedule", "V0SchedulerOutput"),
        ("scheduling-v0", "snapshot", "V0Snapshot"),
        ("engine", "step", "StepRecord"),
        ("engine", "snapshot", "SchedulerSnapshot"),
        ("model", "step", "StepRecord"),
    ],
)
def test_an_answer_of_another_type_says_which_type_is_wanted(
    suite: str, call: str, kind: str, answer: object
) -> None:
    got = failed(suite, Answering(call, lambda real: answer)).got
    assert repr(answer) in got
    assert "must be" in got
    assert kind in got


def changing(**changes: object) -> Callable[[Any], Any]:
    return lambda real: replace(real, **changes)


@pytest.mark.parametrize(
    "change",
    [
        changing(total_num_scheduled_tokens=Unequal()),
        changing(num_scheduled_tokens={"r0": "many"}),
        changing(num_scheduled_tokens=7),
        changing(scheduled_new_reqs=(5,)),
        changing(scheduled_cached_reqs=None),
        changing(finished_req_ids={7}),
    ],
)
@pytest.mark.parametrize("suite", ["scheduling", "cache"])
def test_a_plan_with_rubbish_inside_is_a_failure(suite: str, change: Callable[[Any], Any]) -> None:
    result = run_check(SUITES[suite].check, drawn(suite), Answering("schedule", change))
    assert result.divergence is not None
    assert result.divergence.field != "check", str(result.divergence)


@pytest.mark.parametrize("name", ["batch", "sampled_token_ids", "outputs", "scheduler_output"])
@pytest.mark.parametrize("value", [7, ("r0",), {"r9": 1.5}])
@pytest.mark.parametrize("suite", ["engine", "model", "invariance"])
def test_a_record_with_rubbish_inside_is_a_failure(suite: str, name: str, value: object) -> None:
    change = partial(lambda real, **changes: replace(real, **changes), **{name: value})
    result = run_check(SUITES[suite].check, drawn(suite), Answering("step", change))
    assert result.verdict is Verdict.FAILED, str(result.divergence)


@pytest.mark.parametrize("value", [505.0, True, "7", None])
@pytest.mark.parametrize("suite", ["engine", "model"])
def test_a_token_of_another_type_is_named(suite: str, value: object) -> None:
    def change(record: Any) -> Any:
        sampled = dict.fromkeys(record.sampled_token_ids, (value,))
        return replace(record, sampled_token_ids=sampled)

    got = failed(suite, Answering("step", change)).got
    assert re.fullmatch(rf"a token of request r\d is {value!r}: must be an int", got)


def named_r9(record: Any) -> Any:
    return replace(record, outputs=tuple(replace(o, request_id="r9") for o in record.outputs))


@pytest.mark.parametrize(
    ("suite", "change"),
    [("model", changing(sampled_token_ids={"r9": (1,)})), ("invariance", named_r9)],
)
def test_a_record_of_unknown_requests_is_a_failure(
    suite: str, change: Callable[[Any], Any]
) -> None:
    assert "'r9': no such request" in failed(suite, Answering("step", change)).got


def test_lists_and_numpy_scalars_are_answers() -> None:
    plan = SchedulerOutput(
        num_scheduled_tokens={"r0": np.int64(3)},  # type: ignore[dict-item]
        num_common_prefix_blocks=[1],  # type: ignore[arg-type]
    )
    require_answer(plan, SchedulerOutput, "plan")
    with pytest.raises(
        ImplementationFailed, match="_tokens is no answer: Expected `int`, got `flo"
    ):
        require_answer(replace(plan, total_num_scheduled_tokens=1.5), SchedulerOutput, "plan")
    reason = r"plan\.num_scheduled_tokens\[\.\.\.\] is no answer: Expected `int`, got `str`"
    with pytest.raises(ImplementationFailed, match=reason):
        require_answer(replace(plan, num_scheduled_tokens={"r0": "x"}), SchedulerOutput, "plan")
    with pytest.raises(ImplementationFailed, match="must be of type SchedulerSnapshot"):
        require_answer(plan, SchedulerSnapshot, "state")
