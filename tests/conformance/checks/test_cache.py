"""The invariants of blocks and steps: kept by both schedulers, and each of them broken once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from servespec.conformance import faults
from servespec.conformance.adapters.base import SchedulerFactory
from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation, ReferenceScheduler
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.cache import SUITE, WatchedScheduler, check
from servespec.conformance.faults.self_test import try_suite
from servespec.conformance.verdicts import CaseResult, Verdict, run_check
from servespec.conformance.workloads.scheduling import make_case, matrix
from servespec.reference.contracts import (
    Quirks,
    SchedulerOutput,
    SchedulerSnapshot,
)

Alteration = Callable[[Any], Any]


@pytest.mark.parametrize("make", [ReferenceImplementation, FastImplementation])
@pytest.mark.parametrize("quirks", [Quirks(), Quirks.vllm_0_27_1()], ids=["intended", "exact"])
def test_both_schedulers_keep_every_invariant(
    make: Callable[[], SchedulerFactory], quirks: Quirks
) -> None:
    counts: Counter[str] = Counter()
    steps = 0
    for combination in matrix()[::6]:
        config, workload = make_case(combination, 21, quirks)
        case = Case(suite="cache", config=config, workload=workload)
        result = run_check(check, case, make())
        assert result.divergence is None, f"{combination}: {result.divergence}"
        counts.update(result.counts)
        steps += result.steps
    print(steps, "steps", dict(counts))
    assert {what for what in SUITE.must_reach if counts[what] == 0} == set()


class Altered(ReferenceScheduler):
    """The reference with an alteration of its plans or its states from the third step on."""

    def __init__(self, alter: dict[str, Alteration], *configs: Any) -> None:
        super().__init__(*configs)
        self.alter = alter
        self.steps = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        self.steps += 1
        return self._altered("schedule", output)

    def snapshot(self) -> SchedulerSnapshot:
        return self._altered("snapshot", super().snapshot())

    def _altered(self, call: str, answer: Any) -> Any:
        return self.alter[call](answer) if call in self.alter and self.steps > 2 else answer


def held(**alter: Alteration) -> CaseResult:
    """Run cases on an altered reference until one breaks an invariant."""

    class Implementation(ReferenceImplementation):
        def make_scheduler(self, *configs: Any) -> Altered:  # type: ignore[override]
            return Altered(alter, *configs)

    for seed in range(3, 9):
        for combination in matrix()[::5]:
            config, workload = make_case(combination, seed)
            case = Case(suite="cache", config=config, workload=workload)
            result = run_check(check, case, Implementation())
            if result.divergence is not None:
                return result
    raise AssertionError("no case showed the alteration")


def bumped(values: tuple[int, ...], index: int, by: int) -> tuple[int, ...]:
    return (*values[:index], values[index] + by, *values[index + 1 :])


def share_a_block(state: SchedulerSnapshot) -> SchedulerSnapshot:
    """Let two requests hold one block at different places, counts and queue in order."""
    names = [name for name, table in state.block_tables.items() if table[-1][1:]]
    if len(names) < 2:
        return state
    ours, theirs = names[0], names[1]
    block = state.block_tables[ours][-1][0]
    table = state.block_tables[theirs]
    lost = table[-1][1]
    if block not in state.cached_blocks or lost == 0 or state.ref_counts[lost] != 1:
        return state
    changed = (*table[:-1], (table[-1][0], block, *table[-1][2:]))
    counts = bumped(bumped(state.ref_counts, lost, -1), block, 1)
    return replace(
        state,
        block_tables={**state.block_tables, theirs: changed},
        ref_counts=counts,
        free_blocks=(*state.free_blocks, lost),
    )


STATES: dict[str, tuple[Alteration, str]] = {
    "a block leaks": (lambda s: replace(s, free_blocks=s.free_blocks[1:]), "free_blocks"),
    "a block is free twice": (
        lambda s: replace(s, free_blocks=(*s.free_blocks, *s.free_blocks[:1])),
        "free_blocks",
    ),
    "the null block is free": (
        lambda s: replace(s, free_blocks=(0, *s.free_blocks)),
        "free_blocks",
    ),
    "a count is too high": (
        lambda s: replace(s, ref_counts=bumped(s.ref_counts, 1, 1)),
        "ref_counts",
    ),
    "a count is missing": (lambda s: replace(s, ref_counts=s.ref_counts[:-1]), "ref_counts"),
    "a held block is free too": (
        lambda s: replace(
            s, free_blocks=(*s.free_blocks, *(b for b, n in enumerate(s.ref_counts) if n))
        ),
        "free_blocks",
    ),
    "an unknown block is cached": (
        lambda s: replace(s, cached_blocks=s.cached_blocks | {10**6}),
        "cached_blocks",
    ),
    "the null block is cached": (
        lambda s: replace(s, cached_blocks=s.cached_blocks | {0}),
        "cached_blocks",
    ),
    "a request is lost": (lambda s: replace(s, waiting=s.waiting[1:]), "running, waiting and"),
    "a request runs twice": (
        lambda s: replace(s, running=s.running + s.running[:1]),
        "running, waiting and",
    ),
    "a stranger waits": (
        lambda s: replace(s, waiting=(*s.waiting, "stranger")),
        "running, waiting and",
    ),
    "a stranger is counted": (
        lambda s: replace(s, num_computed_tokens={**s.num_computed_tokens, "stranger": 0}),
        "num_computed_tokens",
    ),
    "a count is negative": (
        lambda s: replace(s, num_output_placeholders=dict.fromkeys(s.num_output_placeholders, -1)),
        "num_output_placeholders",
    ),
    "a count is missing for a request": (
        lambda s: replace(s, num_computed_tokens={}),
        "num_computed_tokens",
    ),
    "two requests share a block at different places": (share_a_block, "block_tables"),
}


@pytest.mark.parametrize("fault", STATES)
def test_a_state_that_breaks_an_invariant_is_found(fault: str) -> None:
    alter, place = STATES[fault]
    divergence = held(snapshot=alter).divergence
    assert divergence is not None
    assert divergence.field.startswith(place)
    assert not divergence.failed


def with_cached(output: SchedulerOutput, **changes: object) -> SchedulerOutput:
    cached = replace(output.scheduled_cached_reqs, **changes)  # type: ignore[arg-type]
    return replace(output, scheduled_cached_reqs=cached)


def other_blocks(output: SchedulerOutput) -> SchedulerOutput:
    changed = tuple(
        blocks and tuple(tuple(b + 1 for b in group) for group in blocks)
        for blocks in output.scheduled_cached_reqs.new_block_ids
    )
    return with_cached(output, new_block_ids=changed)


def one_less_each(output: SchedulerOutput) -> SchedulerOutput:
    counts = {name: max(n - 1, 1) for name, n in output.num_scheduled_tokens.items()}
    total = sum(counts.values())
    return replace(output, num_scheduled_tokens=counts, total_num_scheduled_tokens=total)


PLANS: dict[str, tuple[Alteration, str]] = {
    "the total is wrong": (
        lambda o: replace(o, total_num_scheduled_tokens=o.total_num_scheduled_tokens + 1),
        "total_num_scheduled_tokens",
    ),
    "the budget is overrun": (
        lambda o: replace(
            o,
            num_scheduled_tokens=dict.fromkeys(o.num_scheduled_tokens, 1000),
            total_num_scheduled_tokens=1000 * len(o.num_scheduled_tokens),
        ),
        "total_num_scheduled_tokens",
    ),
    "a row has no tokens": (
        lambda o: replace(o, num_scheduled_tokens={}, total_num_scheduled_tokens=0),
        "num_scheduled_tokens",
    ),
    "a row says other counts": (
        lambda o: with_cached(
            o,
            num_computed_tokens=tuple(n + 1 for n in o.scheduled_cached_reqs.num_computed_tokens),
        ),
        "num_computed_tokens",
    ),
    "tokens are counted that were not planned": (one_less_each, "num_computed_tokens"),
    "a worker is told of other blocks": (other_blocks, "block_tables"),
}


@pytest.mark.parametrize("fault", PLANS)
def test_a_plan_that_breaks_an_invariant_is_found(fault: str) -> None:
    alter, place = PLANS[fault]
    divergence = held(schedule=alter).divergence
    assert divergence is not None
    assert divergence.field.startswith(place)
    assert divergence.step is not None


def held_all(kind: type[ReferenceScheduler]) -> list[CaseResult]:
    class Implementation(ReferenceImplementation):
        def make_scheduler(self, *configs: Any) -> ReferenceScheduler:
            return kind(*configs)

    results = []
    for combination in matrix()[4::24]:
        config, workload = make_case(combination, 3)
        case = Case(suite="cache", config=config, workload=workload)
        results.append(run_check(check, case, Implementation()))
    return results


def expectations(results: list[CaseResult]) -> set[str]:
    found = {r.divergence.expected for r in results if r.divergence is not None}
    return {text.partition(":")[0] for text in found}


def test_blocks_shared_by_different_prefixes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(parent: bytes, token_ids: object, extra: object = ()) -> bytes:
        return hashlib.sha256(parent).digest()

    monkeypatch.setattr("servespec.reference.cache.prefix.hash_tokens", forgetful)
    found = expectations(held_all(ReferenceScheduler))
    assert found == {"a block of its own or one of a common prefix"}


def test_a_scheduler_that_does_nothing_makes_no_progress() -> None:
    class Lazy(ReferenceScheduler):
        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            return SchedulerOutput()

    results = held_all(Lazy)
    assert expectations(results) == {"an admission"}
    assert sum(result.divergence is not None for result in results) > len(results) // 2


def test_a_scheduler_that_stops_serving_a_running_request_makes_no_progress() -> None:
    class Tired(ReferenceScheduler):
        steps = 0

        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            self.steps += 1
            return super().schedule() if self.steps < 8 else SchedulerOutput()

    assert "a token for some running request" in expectations(held_all(Tired))


def test_one_table_shown_for_all_requests_is_found() -> None:
    class Overlapping(ReferenceScheduler):
        """Every request is shown the table of the first one."""

        def snapshot(self) -> SchedulerSnapshot:
            state = super().snapshot()
            tables = list(state.block_tables.values())
            if len(tables) < 2:
                return state
            shown = dict.fromkeys(state.block_tables, tables[0])
            counts = [0] * len(state.ref_counts)
            for table in shown.values():
                for block in (b for group in table for b in group if b):
                    counts[block] += 1
            return replace(
                state,
                block_tables=shown,
                ref_counts=tuple(counts),
                free_blocks=tuple(b for b, n in enumerate(counts) if b and not n),
                cached_blocks=frozenset(b for b, n in enumerate(counts) if n),
            )

    found = expectations(held_all(Overlapping))
    assert found & {"a block of its own or one of a common prefix", "none without prefix caching"}


# With a seed that finds it soon.
ALONE = {
    "_check_writes": (faults.recomputed_in_place, 3, "a block of its own to write to"),
    "_check_hits": (faults.hashed_a_token_early, 9, "a hit of a block that was computed"),
}


@pytest.mark.parametrize("name", ALONE)
def test_only_this_check_finds_this_fault(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, seed, expected = ALONE[name]
    finding = try_suite(fault, SUITE, 100 * fault.rarity, seed)
    assert finding.divergence is not None
    assert finding.divergence.expected == expected
    monkeypatch.setattr(WatchedScheduler, name, lambda self, output: None)
    assert try_suite(fault, SUITE, finding.cases + 20, seed).divergence is None


def test_rubbish_is_a_failure() -> None:
    assert held(snapshot=lambda s: "busy").verdict is Verdict.FAILED
    assert held(schedule=lambda o: None).verdict is Verdict.FAILED
