"""Suite ``batch`` on plans that no scheduler made: what happens in them, and what is noticed."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import pytest

from servespec.conformance import faults
from servespec.conformance.adapters.base import StateSaving
from servespec.conformance.adapters.fast import FastBatch, FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.cases import files
from servespec.conformance.cases.case import Case
from servespec.conformance.cases.shrink import shrink
from servespec.conformance.checks.batch import SUITE, check, planned_cases
from servespec.conformance.faults.fault import Fault
from servespec.conformance.verdicts import CHECK_FIELD, Verdict, run_check
from servespec.fast.batch import InputBatch
from servespec.reference.contracts import BatchRecord, EngineConfig, StateMove


@pytest.fixture(scope="module")
def cases(drawn: Callable[..., list[Case]]) -> list[Case]:
    return drawn(planned_cases(), 120)


def test_everything_happens_and_both_sides_agree(cases: list[Case]) -> None:
    counts: Counter[str] = Counter()
    for case in cases:
        result = run_check(check, case, FastImplementation())
        assert result.divergence is None, result
        assert case.plans is not None
        assert result.steps == len(case.plans)
        counts.update(result.counts, steps=result.steps)
    print(dict(counts))
    assert counts["steps"] > 1000
    for happened in SUITE.must_reach:
        # What takes a scheduler to decide is left to the cases of one.
        if happened != "preemptions":
            assert counts[happened] >= 10, happened


@pytest.mark.parametrize("name", [field.name for field in fields(BatchRecord)])
def test_every_field_is_compared(name: str, cases: list[Case], first_failure) -> None:
    broken = Fault(
        name="broken",
        what="",
        source="",
        suites=(),
        record=lambda record: replace(record, **{name: None}),
    )
    # A graph and its absence are both None in an engine that knows no graphs.
    case = next(case for case in cases if case.config.graph is not None)
    _, result = first_failure(check, broken, [case])
    assert result.divergence is not None
    assert result.divergence.place == f"batch.{name}"


class ForgetfulBatch(FastBatch):
    def state_saves(
        self, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[StateMove, ...], ...]:
        return tuple(() for _ in super().state_saves(sampled))


class Forgetful(FastImplementation):
    def make_batch(self, config: EngineConfig) -> FastBatch:
        return ForgetfulBatch(InputBatch(config))


def test_states_that_are_not_saved_are_noticed(cases: list[Case], first_failure) -> None:
    _, result = first_failure(check, Forgetful(), cases)
    assert result.divergence is not None
    assert result.divergence.place == "state_saves"


class Plain:
    """A batch that offers no more than it must."""

    name = "plain"

    def make_batch(self, config: EngineConfig) -> object:
        batch = ReferenceImplementation().make_batch(config)

        class Batch:
            prepare = staticmethod(batch.prepare)
            append_sampled = staticmethod(batch.append_sampled)

        return Batch()


def test_saving_states_is_optional(cases: list[Case]) -> None:
    assert not isinstance(Plain().make_batch(cases[0].config), StateSaving)
    for case in cases[:10]:
        assert run_check(check, case, Plain()).verdict is Verdict.EQUAL


def test_a_stale_tail_shows_without_poison_too(
    cases: list[Case],
    monkeypatch: pytest.MonkeyPatch,
    first_failure,
) -> None:
    monkeypatch.setattr(InputBatch, "poison", lambda self: None)
    for name in ("stale_padding", "stale_table_tail"):
        _, result = first_failure(check, getattr(faults, name), cases)
        assert result.divergence is not None
        assert not result.divergence.failed


def test_any_request_and_any_group_can_be_taken_out(cases: list[Case]) -> None:
    from servespec.conformance.cases.shrink import simpler

    tried = 0
    for case in cases[:24]:
        result = run_check(check, case, ReferenceImplementation())
        for candidate in simpler(case, result):
            if candidate.config != case.config and candidate.plans == case.plans:
                continue  # a plan can be at odds with another configuration
            outcome = run_check(check, candidate, ReferenceImplementation())
            assert outcome.divergence is None, outcome
            tried += 1
    assert tried > 120


def test_a_failure_shrinks_to_few_plans(cases: list[Case], first_failure) -> None:
    fault = faults.stale_table_tail
    case, result = first_failure(check, fault, cases)
    small = shrink(case, result, lambda c: run_check(check, c, fault), seconds=20)
    assert small.case.plans is not None
    assert case.plans is not None
    assert len(small.case.plans) <= len(case.plans)
    assert small.case.num_requests <= 3
    assert len(small.case.config.cache.groups) == 1
    assert small.result.divergence is not None
    assert small.result.divergence.field != CHECK_FIELD


def test_a_stale_tail_is_found_written_and_replayed(found_and_replayed) -> None:
    content, said = found_and_replayed("batch", "stale_table_tail", 8)
    assert content.divergence is not None
    assert content.divergence.place == "batch.attention"
    assert "batch.attention" in said
    assert run_check(check, content.case, FastImplementation()).verdict is Verdict.EQUAL


def test_a_plan_with_too_many_tokens_is_refused(cases: list[Case]) -> None:
    case = max(cases, key=lambda c: c.config.scheduler.max_num_batched_tokens)
    scheduler = replace(
        case.config.scheduler, max_num_batched_tokens=case.config.scheduler.max_model_len
    )
    small = replace(case, config=replace(case.config, scheduler=scheduler))
    assert small.plans is not None
    crowded = replace(
        small.plans[0],
        output=replace(small.plans[0].output, num_scheduled_tokens={"a": 10**9}),
    )
    with pytest.raises(files.CaseError, match="tokens of plan 0 is 1000000000: must be at most"):
        files.require_sensible(replace(small, plans=(crowded,)))
