"""Suite scheduling-v0: the fast scheduler agrees, and cases of one that does not shrink."""

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
from servespec.conformance.verdicts import Tally, run_check
from servespec.conformance.workloads.driver_v0 import drive_v0
from servespec.conformance.workloads.scheduling_v0 import make_v0_case, v0_matrix


def made_cases(seeds, alignment=1):
    return (make_v0_case(combo, seed, alignment) for seed in seeds for combo in v0_matrix())


@pytest.mark.parametrize("alignment", [1, 8])
def test_the_fast_scheduler_decides_as_the_reference_does(alignment):
    tally = Tally()
    for case in made_cases(range(3), alignment):
        compare_v0(case, ReferenceImplementation(), FastImplementation(), tally)
    print(tally.steps, "steps", dict(tally.counts))
    assert tally.steps > 4_000
    assert {name for name in SUITE.must_reach if not tally.counts[name]} == set()


class Stuck(ReferenceV0Scheduler):
    """Never preempts more than it says: from the second preemption on, the count is wrong."""

    def schedule(self, now):
        output = super().schedule(now)
        return replace(output, preempted=0) if output.preempted > 1 else output


class StuckImplementation:
    name = "stuck"

    def make_v0_scheduler(self, scheduler, cache):
        return Stuck(scheduler, cache)


def test_a_failing_case_shrinks_and_is_written_and_read(tmp_path, first_failure):
    implementation = StuckImplementation()
    case, result = first_failure(check, implementation, map(of_v0, made_cases(range(3))))
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
