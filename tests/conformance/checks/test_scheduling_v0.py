"""Suite scheduling-v0: the fast scheduler agrees, planted faults do not, and cases shrink."""

from collections import Counter
from dataclasses import replace

import pytest

from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.adapters.v0_reference import ReferenceV0Scheduler
from servespec.conformance.cases import files
from servespec.conformance.cases.case import SPEC_VERSION, CaseFile
from servespec.conformance.cases.shrink import shrink
from servespec.conformance.checks.scheduling_v0 import SUITE, check, compare_v0, of_v0
from servespec.conformance.verdicts import Tally, Verdict, run_check
from servespec.conformance.workloads.driver_v0 import drive_v0
from servespec.conformance.workloads.scheduling_v0 import make_v0_case, v0_matrix
from servespec.fast.cache.v0_block_manager import BlockManager
from servespec.fast.scheduling.v0 import Scheduler
from servespec.fast.scheduling.v0_groups import Group
from servespec.fast.scheduling.v0_step import Step
from servespec.reference.contracts.v0 import AllocStatus


@pytest.mark.parametrize("alignment", [1, 8])
def test_the_fast_scheduler_decides_as_the_reference_does(alignment):
    tally = Tally()
    for seed in range(3):
        for combination in v0_matrix():
            case = make_v0_case(combination, seed, alignment)
            compare_v0(case, ReferenceImplementation(), FastImplementation(), tally)
    print(tally.steps, "steps", dict(tally.counts))
    assert tally.steps > 4_000
    assert {name for name in SUITE.must_reach if not tally.counts[name]} == set()


def first_finding(implementation, seeds=range(3)):
    for seed in seeds:
        for combination in v0_matrix():
            case = of_v0(make_v0_case(combination, seed))
            result = run_check(check, case, implementation)
            if result.divergence is not None:
                return case, result
    raise AssertionError("no case found the fault")


class Faulty:
    """The fast path with one method replaced."""

    name = "faulty"

    def __init__(self, monkeypatch, owner, method, fault):
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args: fault(original, *args))

    def make_v0_scheduler(self, scheduler, cache):
        return Scheduler(scheduler, cache)


def one_token_too_few(original, step, group, chunked):
    count = original(step, group, chunked)
    return count - 1 if group.prefill and chunked and count > 1 else count


def youngest_victim_first_in_line(original, scheduler, step, running, swapped):
    step.evicted.reverse()
    original(scheduler, step, running, swapped)


def swap_in_beside_preemption(original, step):
    return True


def copy_never(original, manager, seq_id, num_tokens, lookahead, copies):
    original(manager, seq_id, num_tokens, lookahead, [])


def no_watermark(original, manager, num_tokens):
    status = original(manager, num_tokens)
    return AllocStatus.OK if status is AllocStatus.LATER and manager.watermark else status


def width_of_the_living(original, group):
    return len(group.live)


def sampling_in_every_chunk(original, scheduler, entry):
    return replace(original(scheduler, entry), do_sample=True)


FAULTS = {
    "one token too few": (Step, "chunk", one_token_too_few),
    "wrong order of the preempted": (Scheduler, "_requeue", youngest_victim_first_in_line),
    "shared block written in place": (BlockManager, "append", copy_never),
    "watermark ignored": (BlockManager, "can_allocate", no_watermark),
    "samples before the last chunk": (Scheduler, "_describe", sampling_in_every_chunk),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    _, result = first_finding(Faulty(monkeypatch, *FAULTS[name]))
    assert result.verdict in (Verdict.DIVERGED, Verdict.FAILED)
    print(name, "->", result.divergence)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(Step, "calm", swap_in_beside_preemption), (Group, "width", width_of_the_living)],
)
def test_a_planted_fault_in_a_property_is_found(owner, name, fault, monkeypatch):
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, property(lambda self: fault(original, self)))
    first_finding(FastImplementation())


class Stuck(ReferenceV0Scheduler):
    """Never preempts more than it says: from the second preemption on, the count is wrong."""

    def schedule(self, now):
        output = super().schedule(now)
        return replace(output, preempted=0) if output.preempted > 1 else output


class StuckImplementation:
    name = "stuck"

    def make_v0_scheduler(self, scheduler, cache):
        return Stuck(scheduler, cache)


def test_a_failing_case_shrinks_and_is_written_and_read(tmp_path):
    implementation = StuckImplementation()
    case, result = first_finding(implementation)
    small = shrink(case, result, lambda c: run_check(check, c, implementation), seconds=10.0)
    before, after = case.v0.workload, small.case.v0.workload
    print(len(before.requests), "requests to", len(after.requests), "in", small.tried)
    assert small.result.divergence.field == "output.preempted"
    assert len(after.requests) <= min(len(before.requests), 4)
    assert sum(len(r.prompt_token_ids) for r in after.requests) < sum(
        len(r.prompt_token_ids) for r in before.requests
    )
    path = tmp_path / "case.json"
    content = CaseFile(
        spec_version=SPEC_VERSION,
        implementation="stuck",
        case=small.case,
        divergence=small.result.divergence,
    )
    files.write(path, content)
    assert files.read(path) == content


def test_a_case_that_asks_for_too_much_is_refused():
    case = of_v0(make_v0_case(v0_matrix()[0], 0))
    for change, field in (
        ({"cache": replace(case.v0.cache, num_cpu_blocks=2**30)}, "num_cpu_blocks"),
        ({"workload": replace(case.v0.workload, max_steps=10**9)}, "max_steps"),
    ):
        with pytest.raises(files.CaseError, match=field):
            files.require_sensible(replace(case, v0=replace(case.v0, **change)))
    with pytest.raises(ValueError, match="v0 is null"):
        check(replace(case, v0=None), FastImplementation(), Tally())


def test_both_schedulers_keep_the_books():
    """Free and held blocks add up, and holders are counted, but for what V0 is known to lose."""
    counts = Counter()
    cases = [make_v0_case(combination, 50) for combination in v0_matrix()[::2]]
    # Groups that shrink to one sequence and are recomputed; these seeds lose blocks that way.
    shrinking = [c for c in v0_matrix() if c.widest > 1 and c.preemption_mode is None]
    cases += [make_v0_case(combination, seed) for combination in shrinking for seed in (22, 30)]
    for case in cases:
        for implementation in (ReferenceImplementation(), FastImplementation()):
            scheduler = implementation.make_v0_scheduler(case.scheduler, case.cache)
            keep_books(scheduler, case, counts)
    print(dict(counts))
    assert counts["states"] > 2_000
    assert counts["leaks"] > 0


def keep_books(scheduler, case, counts):
    for taken in drive_v0(scheduler, case.workload):
        state = taken.after
        counts["states"] += 1
        for tables, free, holders in (
            (state.gpu_block_tables, state.free_gpu_blocks, state.gpu_ref_counts),
            (state.cpu_block_tables, state.free_cpu_blocks, state.cpu_ref_counts),
        ):
            assert len(set(free)) == len(free)
            assert all(
                (holders[block] == 0) == (block in set(free)) for block in range(len(holders))
            )
            held = Counter(block for table in tables.values() for block in table)
            short = [block for block, count in enumerate(holders) if count != held[block]]
            assert all(holders[block] > held[block] for block in short)
            counts["leaks"] += bool(short)
            # Only the first manager counts the share of finished siblings.
            assert not short or not case.scheduler.use_v2_block_manager
