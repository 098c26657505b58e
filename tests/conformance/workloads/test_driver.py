"""The pretended worker and the loop around a scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from servespec.conformance.adapters.reference import ReferenceScheduler
from servespec.conformance.workloads.driver import DrivenStep, PretendWorker, drive
from servespec.conformance.workloads.scheduling import make_case, matrix
from servespec.conformance.workloads.workload import Workload, WorkloadStep
from servespec.reference.contracts import (
    CacheConfig,
    CachedRequestData,
    EngineConfig,
    KVCacheGroup,
    NewRequestData,
    PauseState,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    SpeculativeConfig,
)

K = 3
WORKLOAD = Workload(steps=(), token_seed=5, num_token_ids=50, acceptance=0.5)
SPECULATIVE = SpeculativeConfig(method="mtp", num_speculative_tokens=K)
DENSE = (KVCacheGroup(layer_type="full_attention", layer_indices=(0,)),)


def request(name: str, prompt: int, max_tokens: int = 4) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(prompt)),
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


def config(blocks: int = 20, **scheduler: object) -> EngineConfig:
    return EngineConfig(
        scheduler=SchedulerConfig(max_model_len=32, **scheduler),  # type: ignore[arg-type]
        cache=CacheConfig(num_gpu_blocks=blocks, block_size=4, groups=DENSE),
    )


def run(workload: Workload, config: EngineConfig) -> list[DrivenStep]:
    scheduler = ReferenceScheduler(config.scheduler, config.cache, config.speculative)
    return list(drive(scheduler, workload, config))


def new(name: str, prompt: int, computed: int = 0) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=tuple(range(prompt)),
        sampling_params=SamplingParams(),
        block_ids=((1,),),
        num_computed_tokens=computed,
    )


def plan(
    counts: Mapping[str, int],
    drafts: Mapping[str, tuple[int, ...]] | None = None,
    new: tuple[NewRequestData, ...] = (),
    cached: tuple[tuple[str, int, int], ...] = (),
    resumed: frozenset[str] = frozenset(),
) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData(
            req_ids=tuple(name for name, _, _ in cached),
            num_computed_tokens=tuple(computed for _, computed, _ in cached),
            num_output_tokens=tuple(outputs for _, _, outputs in cached),
            new_block_ids=(None,) * len(cached),
            resumed_req_ids=resumed,
        ),
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens=drafts or {},
    )


def test_tokens_are_a_pure_function_of_seed_request_and_position() -> None:
    worker = PretendWorker(WORKLOAD, None)
    tokens = {(name, p): worker.token(name, p) for name in ("a", "b") for p in range(300)}
    again = PretendWorker(WORKLOAD, SPECULATIVE)
    assert all(again.token(*key) == token for key, token in reversed(tokens.items()))
    other = PretendWorker(replace(WORKLOAD, token_seed=6), None)
    assert sum(other.token(*key) == token for key, token in tokens.items()) < 60  # 1 in 50
    assert sum(tokens["a", p] == tokens["b", p] for p in range(300)) < 30
    counts = Counter(tokens.values())
    assert set(counts) == set(range(50))
    assert max(counts.values()) < 40  # 12 on average


def test_a_prompt_gives_its_token_with_its_last_chunk_only() -> None:
    worker = PretendWorker(WORKLOAD, None)
    assert worker.execute(plan({"a": 5}, new=(new("a", 12),))) == {"a": ()}
    assert worker.execute(plan({"a": 6}, cached=(("a", 5, 0),))) == {"a": ()}
    assert worker.execute(plan({"a": 1}, cached=(("a", 11, 0),))) == {"a": (worker.token("a", 12),)}
    assert worker.execute(plan({"a": 1}, cached=(("a", 12, 1),))) == {"a": (worker.token("a", 13),)}


def test_right_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    worker = PretendWorker(WORKLOAD, SPECULATIVE)
    worker.execute(plan({"a": 4}, new=(new("a", 4),)))
    truth = [worker.token("a", p) for p in range(5, 5 + K + 1)]
    wrong = (truth[1] + 1) % 50
    drafts = {"a": (truth[0], wrong, truth[2])}
    sampled = worker.execute(plan({"a": 1 + K}, drafts, cached=(("a", 4, 1),)))
    assert sampled == {"a": (truth[0], truth[1])}


def test_a_full_acceptance_gives_one_token_more() -> None:
    worker = PretendWorker(WORKLOAD, SPECULATIVE)
    worker.execute(plan({"a": 4}, new=(new("a", 4),)))
    truth = tuple(worker.token("a", p) for p in range(5, 5 + K + 1))
    sampled = worker.execute(plan({"a": 1 + K}, {"a": truth[:K]}, cached=(("a", 4, 1),)))
    assert sampled == {"a": truth}


def test_placeholders_are_accepted_by_the_workloads_share_and_never_on_admission() -> None:
    accepted: Counter[int] = Counter()
    for n in range(400):
        worker = PretendWorker(WORKLOAD, SPECULATIVE)
        name = f"r{n}"
        padded = plan({name: 1 + K}, {name: (-1,) * K}, new=(new(name, 4, computed=3),))
        assert len(worker.execute(padded)[name]) == 1
        sampled = worker.execute(plan({name: 1 + K}, {name: (-1,) * K}, cached=((name, 4, 1),)))
        accepted[len(sampled[name]) - 1] += 1
    # A geometric distribution with 1/2: 200, 100, 50, 50; five standard deviations of the first
    # are 50.
    assert accepted.keys() == {0, 1, 2, 3}
    assert 150 < accepted[0] < 250
    assert accepted[1] > accepted[2]


def test_no_more_drafts_are_accepted_than_tokens_were_scheduled_for() -> None:
    worker = PretendWorker(replace(WORKLOAD, acceptance=1.0), SPECULATIVE)
    worker.execute(plan({"a": 4}, new=(new("a", 4),)))
    sampled = worker.execute(plan({"a": 2}, {"a": (-1,) * K}, cached=(("a", 4, 1),)))
    assert len(sampled["a"]) == 2


def test_a_resumed_request_goes_on_from_the_tokens_its_scheduler_kept() -> None:
    worker = PretendWorker(WORKLOAD, None)
    worker.execute(plan({"a": 4}, new=(new("a", 4),)))
    worker.execute(plan({"a": 1}, cached=(("a", 4, 1),)))
    # The scheduler threw the second token away: the third sampling repeats it.
    sampled = worker.execute(plan({"a": 5}, cached=(("a", 0, 1),), resumed=frozenset({"a"})))
    assert sampled == {"a": (worker.token("a", 5),)}


def test_drafts_are_right_as_often_as_the_workload_says() -> None:
    right = total = 0
    for n in range(200):
        worker = PretendWorker(WORKLOAD, SPECULATIVE)
        name = f"r{n}"
        sampled = worker.execute(plan({name: 4}, new=(new(name, 4),)))
        drafts = worker.draft(sampled)[name]
        assert len(drafts) == K
        total += K
        right += sum(d == worker.token(name, 5 + i) for i, d in enumerate(drafts))
    assert 0.4 * total < right < 0.6 * total


def test_a_row_without_a_token_gets_no_drafts_and_ngram_finds_a_varying_number() -> None:
    worker = PretendWorker(WORKLOAD, SpeculativeConfig(method="ngram", num_speculative_tokens=K))
    assert worker.draft(worker.execute(plan({"a": 2}, new=(new("a", 4),)))) == {"a": ()}
    counts = Counter()
    for n in range(100):
        sampled = worker.execute(plan({f"r{n}": 4}, new=(new(f"r{n}", 4),)))
        counts[len(worker.draft(sampled)[f"r{n}"])] += 1
    assert counts.keys() == {0, 1, 2, 3}


def test_a_run_ends_when_every_request_has() -> None:
    workload = Workload(steps=(WorkloadStep(add=(request("a", 5, max_tokens=3),)),))
    steps = run(workload, config(max_num_batched_tokens=4))
    assert [dict(step.output.num_scheduled_tokens) for step in steps] == [
        {"a": 4},
        {"a": 1},
        {"a": 1},
        {"a": 1},
    ]
    worker = PretendWorker(workload, None)
    tokens = tuple(t for step in steps for result in step.outputs for t in result.new_token_ids)
    assert tokens == tuple(worker.token("a", p) for p in (5, 6, 7))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_asynchronous_steps_come_back_so_many_later(depth: int) -> None:
    workload = Workload(
        steps=(WorkloadStep(add=(request("a", 4, max_tokens=6),)),), max_concurrent_batches=depth
    )
    steps = run(workload, config(async_scheduling=True))
    plans = [step.output for step in steps if step.output.num_scheduled_tokens]
    for number, step in enumerate(steps):
        if number < depth - 1:
            assert step.updated is None
        elif step.output.num_scheduled_tokens:
            assert step.updated is plans[number - depth + 1]
    assert [s.updated for s in steps if s.updated is not None] == plans


def test_a_head_that_never_fits_ends_the_run() -> None:
    workload = Workload(
        steps=(WorkloadStep(add=(request("a", 30), request("b", 2))),), max_steps=100
    )
    steps = run(workload, config(blocks=4))
    assert len(steps) == 4
    assert not any(step.output.num_scheduled_tokens for step in steps)


def test_a_pause_without_an_end_ends_the_run_and_events_hold_it_up() -> None:
    pause = WorkloadStep(add=(request("a", 3),), pause=PauseState.PAUSED_ALL)
    assert len(run(Workload(steps=(pause,)), config())) == 4
    resume = WorkloadStep(pause=PauseState.UNPAUSED)
    workload = Workload(steps=(pause, *(WorkloadStep(),) * 10, resume))
    steps = run(workload, config())
    assert steps[11].output.num_scheduled_tokens == {"a": 3}


def test_a_run_is_never_longer_than_the_workload_allows() -> None:
    workload = Workload(steps=(WorkloadStep(add=(request("a", 3, max_tokens=20),)),), max_steps=7)
    assert len(run(workload, config())) == 7


def test_a_step_that_no_worker_could_run_is_the_last() -> None:
    class Backwards(ReferenceScheduler):
        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            return plan({"a": -1})

        def update_from_output(self, *_: object) -> None:  # type: ignore[override]
            raise AssertionError("must not be reached")

    workload = Workload(steps=(WorkloadStep(add=(request("a", 3),)),))
    made = Backwards(config().scheduler, config().cache)
    (step,) = drive(made, workload, config())
    assert step.updated is None


def test_requests_get_the_same_tokens_whatever_is_scheduled_around_them() -> None:
    compared = preempted = 0
    for combination in matrix()[::13]:
        engine, workload = make_case(combination, 11)
        if any(r.sampling_params.repetition_detection for r in workload.requests):
            continue
        roomy = replace(
            engine,
            scheduler=replace(engine.scheduler, max_num_batched_tokens=500, watermark=0.0,
                              max_num_scheduled_tokens=None, max_num_seqs=50),
            cache=replace(engine.cache, num_gpu_blocks=2000),
        )  # fmt: skip
        tight = run(workload, engine)
        tokens: list[dict[str, tuple[int, ...]]] = []
        for steps in (tight, run(workload, roomy)):
            given: dict[str, tuple[int, ...]] = {}
            for step in steps:
                for result in step.outputs:
                    name = result.request_id
                    given[name] = given.get(name, ()) + result.new_token_ids
            tokens.append(given)
        preempted += sum(len(step.output.preempted_req_ids) for step in tight)
        for name in tokens[0].keys() & tokens[1].keys():
            both = min(len(tokens[0][name]), len(tokens[1][name]))
            assert tokens[0][name][:both] == tokens[1][name][:both]
            compared += both
    print(compared, "tokens", preempted, "preemptions")
    assert compared > 300
    assert preempted > 5
