"""What the real V0 scheduler of vLLM 0.5.1 answered over the whole matrix, and the file of it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from servespec.conformance.adapters import v0_traces
from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.adapters.traces import TraceError, write_traces
from servespec.conformance.adapters.v0_traces import (
    V0TraceImplementation,
    read_v0_traces,
    record_v0_case,
    record_v0_matrix,
)
from servespec.conformance.checks.scheduling_v0 import SUITE, compare_v0
from servespec.conformance.verdicts import DivergedError, Tally
from servespec.conformance.workloads.scheduling_v0 import make_v0_case, v0_matrix

FILE = Path(__file__).parents[2] / "data" / "traces" / "vllm-0.5.1" / "scheduling-v0.jsonl.xz"
RECORDINGS = list(read_v0_traces(FILE))


@pytest.mark.parametrize("make", [ReferenceImplementation, FastImplementation])
def test_every_decision_is_the_recorded_one(make):
    tally = Tally()
    for recording in RECORDINGS:
        compare_v0(recording.case, make(), V0TraceImplementation(recording), tally)
    print(tally.steps, "steps", dict(tally.counts))
    assert tally.steps == sum(len(recording.steps) for recording in RECORDINGS)
    assert tally.steps > 4_000
    rules = {f"gave up: {rule}" for rule in ("pool_exhausted", "append_past_table")}
    assert {name for name in {*SUITE.must_reach, *rules} if not tally.counts[name]} == set()


def test_the_recordings_cover_every_combination():
    seen = Counter(
        (c.enable_chunked_prefill, c.preemption_mode, c.use_v2_block_manager)
        for c in (recording.case.scheduler for recording in RECORDINGS)
    )
    assert len(seen) == 2 * 3 * 2
    assert {recording.implementation for recording in RECORDINGS} == {"vllm 0.5.1"}
    assert len(RECORDINGS) % len(v0_matrix()) == 0


def recorded(index=0, seed=5):
    case = make_v0_case(v0_matrix()[index], seed)
    return record_v0_case(ReferenceImplementation(), case, "reference")


def altered(recording, number, **change):
    steps = list(recording.steps)
    steps[number] = msgspec.structs.replace(steps[number], **change)
    return msgspec.structs.replace(recording, steps=tuple(steps))


def test_an_altered_answer_is_found():
    recording = recorded()
    step = recording.steps[3]
    plan = msgspec.structs.replace(
        step.plan, output=replace(step.plan.output, num_batched_tokens=10_000)
    )
    for change, field in (
        ({"plan": plan}, "output.num_batched_tokens"),
        ({"planned": replace(step.planned, waiting=("x",))}, "snapshot after schedule.waiting"),
        ({"outputs": ()}, "outputs"),
        ({"after": replace(step.after, prev_time=0.0)}, "snapshot after update_from_output"),
    ):
        other = V0TraceImplementation(altered(recording, 3, **change))
        with pytest.raises(DivergedError) as found:
            compare_v0(recording.case, ReferenceImplementation(), other, Tally())
        assert found.value.divergence.field.startswith(field)
        assert found.value.divergence.step == 3


def test_a_trace_that_ends_early_or_is_of_another_configuration_is_a_failure():
    recording = recorded()
    short = msgspec.structs.replace(recording, steps=recording.steps[:4])
    with pytest.raises(ImplementationFailed, match="no step"):
        compare_v0(recording.case, ReferenceImplementation(), V0TraceImplementation(short), Tally())
    other = make_v0_case(v0_matrix()[1], 5)
    with pytest.raises(ImplementationFailed, match="other configurations"):
        compare_v0(other, ReferenceImplementation(), V0TraceImplementation(recording), Tally())


def test_a_file_is_read_as_it_was_written(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl.xz"
    monkeypatch.setattr(v0_traces, "v0_matrix", lambda: v0_matrix()[::12])
    steps = record_v0_matrix(FastImplementation(), path, [7, 8], "fast")
    recordings = list(read_v0_traces(path))
    assert len(recordings) == 6
    assert steps == sum(len(recording.steps) for recording in recordings)
    assert recordings[0] == record_v0_case(
        FastImplementation(), make_v0_case(v0_matrix()[0], 7), "fast"
    )


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "t.jsonl.xz"
    with pytest.raises(TraceError, match="No such file"):
        list(read_v0_traces(path))
    write_traces(path, [recorded()])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TraceError, match=r"t\.jsonl\.xz"):
        list(read_v0_traces(path))
