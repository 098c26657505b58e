"""The lockstep comparison: equal where it should be, and blind to nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings

from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation, ReferenceScheduler
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.scheduling import SUITE, check, compare
from servespec.conformance.verdicts import CaseResult, Tally, Verdict, run_check
from servespec.conformance.workloads.scheduling import make_case, matrix
from servespec.reference.contracts import (
    EngineCoreOutput,
    Quirks,
    SchedulerOutput,
    SchedulerSnapshot,
)

QUIRKS = [entry.name for entry in fields(Quirks)]


def profile(name: str, seed: int) -> Quirks:
    if name == "mixed":
        rng = random.Random(seed)
        return Quirks(**{quirk: rng.random() < 0.5 for quirk in QUIRKS})
    return Quirks() if name == "intended" else Quirks.vllm_0_27_1()


@pytest.mark.parametrize("name", ["intended", "mixed"])
def test_fast_decides_as_the_reference_does(name: str) -> None:
    # The exact profile is compared through the recorded traces. Mixed quirks are drawn per case.
    tally = Tally()
    for number, combination in enumerate(matrix()[::4]):
        config, workload = make_case(combination, 7, profile(name, number))
        compare(
            config, workload, ReferenceImplementation(), FastImplementation(), tally, keep=False
        )
    print(name, tally.steps, "steps", dict(tally.counts))
    assert {what for what in SUITE.must_reach if tally.counts[what] == 0} == set()
    if name == "intended":
        assert tally.counts["negative_schedules"] == 0


@pytest.mark.parametrize(
    ("combination", "seed", "quirks"),
    [
        # A block that a step in flight fills was taken back with those of the victim's own step.
        (
            "hybrid align, async, 0 drafts, priority, prefix caching, threshold, watermark 0.05",
            20,
            Quirks(aligned_split_starves=True, overwritten_tail_published=True),
        ),
        # A state was published when its tokens came back, though drafts had overwritten it.
        (
            "hybrid align, async, 1 drafts, priority, prefix caching, threshold, watermark 0",
            23,
            Quirks(padded_admission_cut_late=True, aligned_split_starves=True,
                   skipped_states_leak=True),
        ),
    ],
)  # fmt: skip
def test_what_differed_once_does_so_no_more(combination: str, seed: int, quirks: Quirks) -> None:
    chosen = {str(c): c for c in matrix()}[combination]
    case = make_case(chosen, seed, quirks)
    compare(*case, ReferenceImplementation(), FastImplementation(), Tally(), keep=False)


def test_quick_profile_reaches_what_it_must() -> None:
    counts: Counter[str] = Counter()

    # A third of the quick profile's size, so that the profile itself is not a matter of luck.
    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(SUITE.cases())
    def run(case: Case) -> None:
        result = run_check(check, case, ReferenceImplementation())
        assert result.divergence is None
        counts.update(result.counts)

    run()
    assert {what for what in SUITE.must_reach if counts[what] == 0} == set()


class Altered(ReferenceScheduler):
    """The reference, with one answer changed by a test from a certain call on."""

    def __init__(self, *configs: Any) -> None:
        super().__init__(*configs)
        self.alter: dict[str, Callable[[Any], Any]] = {}
        self.steps = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        self.steps += 1
        return self._altered("schedule", output)

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        return self._altered("update", super().update_from_output(output, sampled))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self._altered("reset", super().reset_prefix_cache(reset_running_requests))

    def snapshot(self) -> SchedulerSnapshot:
        return self._altered("snapshot", super().snapshot())

    def _altered(self, call: str, answer: Any) -> Any:
        return self.alter[call](answer) if call in self.alter and self.steps > 2 else answer


def held(call: str, alter: Callable[[Any], Any]) -> CaseResult:
    """Run cases against an altered reference until one shows it."""

    class Implementation(ReferenceImplementation):
        def make_scheduler(self, *configs: Any) -> Altered:  # type: ignore[override]
            scheduler = Altered(*configs)
            scheduler.alter[call] = alter
            return scheduler

    for seed in range(3, 9):
        for combination in matrix()[1::7]:
            config, workload = make_case(combination, seed)
            case = Case(suite="scheduling", config=config, workload=workload)
            result = run_check(check, case, Implementation())
            if result.divergence is not None:
                return result
    raise AssertionError("no case showed the alteration")


def reversed_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return dict(reversed(mapping.items()))


def with_cached(output: SchedulerOutput, **changes: object) -> SchedulerOutput:
    cached = replace(output.scheduled_cached_reqs, **changes)  # type: ignore[arg-type]
    return replace(output, scheduled_cached_reqs=cached)


PLANS: dict[str, Callable[[SchedulerOutput], SchedulerOutput]] = {
    "scheduled_new_reqs": lambda o: replace(o, scheduled_new_reqs=o.scheduled_new_reqs[:-1]),
    "scheduled_cached_reqs.req_ids": lambda o: with_cached(
        o, req_ids=o.scheduled_cached_reqs.req_ids[::-1]
    ),
    "scheduled_cached_reqs.resumed_req_ids": lambda o: with_cached(o, resumed_req_ids=frozenset()),
    "scheduled_cached_reqs.new_block_ids": lambda o: with_cached(
        o, new_block_ids=(None,) * len(o.scheduled_cached_reqs.req_ids)
    ),
    "scheduled_cached_reqs.num_computed_tokens": lambda o: with_cached(
        o, num_computed_tokens=tuple(n + 1 for n in o.scheduled_cached_reqs.num_computed_tokens)
    ),
    "scheduled_cached_reqs.num_output_tokens": lambda o: with_cached(
        o, num_output_tokens=tuple(n + 1 for n in o.scheduled_cached_reqs.num_output_tokens)
    ),
    "scheduled_cached_reqs.all_token_ids": lambda o: with_cached(o, all_token_ids={}),
    "num_scheduled_tokens.order": lambda o: replace(
        o, num_scheduled_tokens=reversed_mapping(o.num_scheduled_tokens)
    ),
    "num_scheduled_tokens": lambda o: replace(
        o, num_scheduled_tokens={k: n + 1 for k, n in o.num_scheduled_tokens.items()}
    ),
    "total_num_scheduled_tokens": lambda o: replace(
        o, total_num_scheduled_tokens=o.total_num_scheduled_tokens + 1
    ),
    "scheduled_spec_decode_tokens": lambda o: replace(o, scheduled_spec_decode_tokens={}),
    "num_common_prefix_blocks": lambda o: replace(
        o, num_common_prefix_blocks=tuple(n + 1 for n in o.num_common_prefix_blocks)
    ),
    "finished_req_ids": lambda o: replace(o, finished_req_ids=frozenset()),
    "preempted_req_ids": lambda o: replace(o, preempted_req_ids=frozenset()),
    "new_block_ids_to_zero": lambda o: replace(o, new_block_ids_to_zero=(1,)),
    "kv_cache_block_copies": lambda o: replace(o, kv_cache_block_copies=()),
    "num_spec_tokens_to_schedule": lambda o: replace(o, num_spec_tokens_to_schedule=9),
}


@pytest.mark.parametrize("field", PLANS)
def test_every_field_of_a_plan_is_compared(field: str) -> None:
    divergence = held("schedule", PLANS[field]).divergence
    assert divergence is not None
    assert divergence.place == f"scheduler_output.{field}"
    assert divergence.step is not None
    assert divergence.step >= 2


STATES: dict[str, Callable[[SchedulerSnapshot], SchedulerSnapshot]] = {
    "free_blocks": lambda s: replace(s, free_blocks=s.free_blocks[::-1]),
    "ref_counts": lambda s: replace(s, ref_counts=tuple(n + 1 for n in s.ref_counts)),
    "cached_blocks": lambda s: replace(s, cached_blocks=s.cached_blocks | {1, 2, 3}),
    "block_tables": lambda s: replace(
        s, block_tables={k: tuple(g[::-1] for g in t) for k, t in s.block_tables.items()}
    ),
    "running": lambda s: replace(s, running=s.running[::-1]),
    "waiting": lambda s: replace(s, waiting=s.waiting[1:]),
    "skipped_waiting": lambda s: replace(s, skipped_waiting=()),
    "num_computed_tokens": lambda s: replace(s, num_computed_tokens={}),
    "num_output_placeholders": lambda s: replace(
        s, num_output_placeholders={k: n + 1 for k, n in s.num_output_placeholders.items()}
    ),
    "pause_state": lambda s: replace(s, pause_state=type(s.pause_state).PAUSED_ALL),
}


@pytest.mark.parametrize("field", STATES)
def test_every_field_of_a_state_is_compared(field: str) -> None:
    divergence = held("snapshot", STATES[field]).divergence
    assert divergence is not None
    assert divergence.place.startswith("snapshot after ")
    assert divergence.place.endswith(field)


def test_what_requests_are_given_is_compared() -> None:
    divergence = held("update", lambda outputs: outputs[:-1]).divergence
    assert divergence is not None
    assert divergence.place == "outputs"


def test_the_answer_to_a_reset_is_compared() -> None:
    divergence = held("reset", lambda done: not done).divergence
    assert divergence is not None
    assert divergence.place == "reset_prefix_cache"


def test_an_implementation_that_raises_has_failed_and_is_not_wrong() -> None:
    def boom(output: SchedulerOutput) -> SchedulerOutput:
        raise IndexError("pop from an empty queue")

    result = held("schedule", boom)
    assert result.verdict is Verdict.FAILED
    assert result.divergence is not None
    assert result.divergence.got == "schedule raised IndexError: pop from an empty queue"
    assert result.divergence.step == 2
    assert result.last_lines[-1] == "IndexError: pop from an empty queue"


def test_rubbish_is_a_failure() -> None:
    result = held("schedule", lambda output: {"num_scheduled_tokens": 5})
    assert result.verdict is Verdict.FAILED


@settings(max_examples=20, deadline=None)
@given(SUITE.cases())
def test_the_steps_kept_for_a_case_file_are_those_compared(case: Case) -> None:
    result = run_check(check, case, ReferenceImplementation(), keep_expected=True)
    assert len(result.expected) == result.steps
    assert (
        sum(len(output.new_token_ids) for step in result.expected for output in step.outputs)
        == result.tokens
    )
    assert all(step.snapshot is not None for step in result.expected)
