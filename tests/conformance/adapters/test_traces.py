"""What the real vLLM scheduler answered over the whole matrix, and the files that keep it."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from servespec.conformance.adapters.base import SchedulerFactory
from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.adapters.traces import (
    Recording,
    Schedule,
    Snapshot,
    TraceError,
    TraceImplementation,
    Update,
    read_traces,
    write_traces,
)
from servespec.conformance.cases.case import Case
from servespec.conformance.matrix import against, record_case, record_matrix
from servespec.conformance.verdicts import CaseResult, run_check
from servespec.conformance.workloads.scheduling import LAYOUTS, matrix
from servespec.reference.contracts import EngineConfig, Quirks

FOLDER = Path(__file__).parents[2] / "data" / "traces" / "vllm-0.27.1"
HAPPENED = {
    "dense": {"prefix_hits", "evictions", "common_prefixes"},
    "hybrid-none": {"zeroed_blocks"},
    "hybrid-align": {"prefix_hits", "evictions", "zeroed_blocks", "null_blocks", "block_copies"},
}
ALWAYS = {
    "preemptions",
    "resumptions",
    "split_prompts",
    "padded_admissions",
    "drafts",
    "rejected_drafts",
    "blocked_heads",
    "stale_outputs",
    "skipped_waiting",
    "aborts",
    "pauses",
    "resets",
    "ended_by_stop",
    "ended_by_length",
}


class Heading(msgspec.Struct):
    """A recording without its answers, which are quick to skip."""

    implementation: str
    config: EngineConfig


def held_against(recording: Recording, implementation: SchedulerFactory) -> CaseResult:
    case = Case(suite="scheduling", config=recording.config, workload=recording.workload)
    return run_check(against(recording), case, implementation)


@pytest.mark.parametrize("layout", HAPPENED)
@pytest.mark.parametrize(
    ("make", "every"),
    # The live run holds both against far more; here the slower one sees every fourth.
    [(ReferenceImplementation, 1), (FastImplementation, 4)],
)
def test_every_recorded_decision_is_made_again(
    layout: str, make: Callable[[], SchedulerFactory], every: int
) -> None:
    implementation = make()
    counts: Counter[str] = Counter()
    cases = steps = 0
    for number, recording in enumerate(read_traces(FOLDER / f"{layout}.jsonl.xz")):
        if number % every:
            continue
        result = held_against(recording, implementation)
        assert result.divergence is None, f"recording {number + 1}: {result.divergence}"
        counts.update(result.counts)
        cases += 1
        steps += result.steps
    print(layout, implementation.name, cases, "cases", steps, "steps", dict(counts))
    if every == 1:
        assert {what for what in ALWAYS | HAPPENED[layout] if counts[what] == 0} == set()
    assert cases * every >= 2 * sum(c.layout.replace(" ", "-") == layout for c in matrix())


def test_the_recordings_cover_every_combination_and_stay_small() -> None:
    seen: Counter[tuple[object, ...]] = Counter()
    for layout in LAYOUTS:
        text = lzma.decompress((FOLDER / f"{layout.replace(' ', '-')}.jsonl.xz").read_bytes())
        for line in text.splitlines():
            recording = msgspec.json.decode(line, type=Heading)
            scheduler, cache = recording.config.scheduler, recording.config.cache
            speculative = recording.config.speculative
            seen[
                layout,
                scheduler.async_scheduling,
                speculative.num_speculative_tokens if speculative else 0,
                scheduler.policy,
                cache.enable_prefix_caching,
                scheduler.long_prefill_token_threshold > 0,
                scheduler.watermark,
            ] += 1
            assert recording.implementation == "vllm 0.27.1"
    wanted = {
        (
            c.layout,
            c.async_scheduling,
            c.num_speculative_tokens,
            c.policy,
            c.enable_prefix_caching,
            c.threshold,
            c.watermark,
        )
        for c in matrix()
    }
    assert seen.keys() == wanted
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 5 * 10**6


@cache
def recorded() -> Recording:
    return record_case(ReferenceImplementation(), matrix()[-1], 1)[1]


def altered(number: int, **changes: object) -> Recording:
    answers = list(recorded().answers)
    answer = answers[number]
    assert isinstance(answer, Schedule | Snapshot)
    answers[number] = type(answer)(replace(answer.result, **changes))  # type: ignore[arg-type,type-var]
    return msgspec.structs.replace(recorded(), answers=tuple(answers))


def test_one_wrong_answer_among_all_is_found() -> None:
    reference = ReferenceImplementation()
    assert held_against(recorded(), reference).divergence is None
    plans = [n for n, a in enumerate(recorded().answers) if isinstance(a, Schedule)]
    for step in (0, len(plans) // 2, len(plans) - 1):
        result = held_against(altered(plans[step], total_num_scheduled_tokens=-5), reference)
        assert result.divergence is not None
        assert result.divergence.step == step
        assert result.divergence.field == "scheduler_output.total_num_scheduled_tokens"
        assert result.divergence.expected == "-5"
        state = recorded().answers[plans[step] + 1]
        assert isinstance(state, Snapshot)
        result = held_against(
            altered(plans[step] + 1, free_blocks=(*state.result.free_blocks, 1)), reference
        )
        assert result.divergence is not None
        assert result.divergence.step == step
        assert result.divergence.place == "snapshot after schedule.free_blocks"


def test_calls_other_than_the_recorded_ones_are_a_failure() -> None:
    recording = recorded()
    config = recording.config
    implementation = TraceImplementation(recording)
    scheduler = implementation.make_scheduler(config.scheduler, config.cache, config.speculative)
    with pytest.raises(ImplementationFailed, match="the trace has snapshot where schedule was"):
        scheduler.schedule()
    ended = msgspec.structs.replace(recording, answers=recording.answers[:3])
    scheduler = TraceImplementation(ended).make_scheduler(
        config.scheduler, config.cache, config.speculative
    )
    scheduler.snapshot()
    scheduler.schedule()
    scheduler.snapshot()
    with pytest.raises(ImplementationFailed, match="the trace has its end where schedule was"):
        scheduler.schedule()
    with pytest.raises(ImplementationFailed, match="recorded with other configurations"):
        implementation.make_scheduler(config.scheduler, config.cache, None)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.jsonl.xz"
    write_traces(path, [recorded(), recorded()])
    assert list(read_traces(path)) == [recorded(), recorded()]
    assert any(isinstance(answer, Update) for answer in recorded().answers)


def test_quirks_are_those_of_the_profile_not_of_the_file(tmp_path: Path) -> None:
    config = recorded().config
    older = replace(config, scheduler=replace(config.scheduler, quirks=Quirks()))
    write_traces(tmp_path / "t.xz", [msgspec.structs.replace(recorded(), config=older)])
    (read,) = read_traces(tmp_path / "t.xz")
    assert read.config.scheduler.quirks == Quirks.vllm_0_27_1()


def test_files_that_are_no_traces_are_named(tmp_path: Path) -> None:
    good = tmp_path / "good.xz"
    write_traces(good, [recorded()])
    data = good.read_bytes()
    text = lzma.decompress(data)
    broken = {
        "missing.xz": None,
        "cut.xz": data[: len(data) // 2],
        "text.xz": b"not compressed",
        "half.xz": lzma.compress(text[: len(text) // 2]),
        "other.xz": lzma.compress(b'{"a": 1}\n'),
        "unknown.xz": lzma.compress(text.replace(b'"vllm-0.27.1"', b'"vllm-9"')),
    }
    for name, content in broken.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=name):
            list(read_traces(tmp_path / name))


def test_a_failed_recording_leaves_the_old_file(tmp_path: Path) -> None:
    class Dying(ReferenceImplementation):
        def make_scheduler(self, *configs: object) -> object:  # type: ignore[override]
            raise ImplementationFailed("the process ended")

    path = tmp_path / "dense.jsonl.xz"
    path.write_bytes(b"old")
    with pytest.raises(ImplementationFailed):
        list(record_matrix(Dying(), tmp_path, [0]))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["dense.jsonl.xz"]
