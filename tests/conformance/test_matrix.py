"""A run over the matrix: what it compares, what it writes and what it says."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from servespec.conformance import matrix as matrices
from servespec.conformance.adapters.failure import CallFailed, ImplementationFailed
from servespec.conformance.adapters.reference import ReferenceImplementation, ReferenceScheduler
from servespec.conformance.cases import files
from servespec.conformance.cli import main
from servespec.conformance.matrix import record_matrix, run_matrix
from servespec.conformance.report.matrix import show_matrix
from servespec.conformance.verdicts import Verdict
from servespec.conformance.workloads.scheduling import matrix
from servespec.reference.contracts import SchedulerOutput


@pytest.fixture(autouse=True)
def _three_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (matrix()[0], matrix()[100], matrix()[-1])
    monkeypatch.setattr(matrices, "matrix", lambda: chosen)


def raising(error: Exception, step: int) -> ReferenceImplementation:
    """Return the reference as an implementation that raises in a step."""

    class Scheduler(ReferenceScheduler):
        steps = 0

        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            self.steps += 1
            if self.steps > step:
                raise error
            return super().schedule(throttle_prefills)

    class Implementation(ReferenceImplementation):
        name = "raising"

        def make_scheduler(self, *configs: Any) -> Scheduler:
            return Scheduler(*configs)

    return Implementation()


def shown(*implementations: Any, steps: int = 1, folder: Path | None = None) -> tuple[bool, str]:
    text = io.StringIO()
    console = Console(file=text, width=80)
    real, *others = implementations
    ok = show_matrix(run_matrix(real, others, steps=steps, case_folder=folder), steps, console)
    return ok, text.getvalue()


def test_rounds_go_on_until_the_steps_are_reached() -> None:
    reference = ReferenceImplementation()
    one = list(run_matrix(reference, [reference], steps=1, seed=5))
    assert [found.seed for found in one] == [5, 5, 5]
    steps = sum(found.results["reference"].steps for found in one)
    two = list(run_matrix(reference, [reference], steps=steps + 1, seed=5))
    assert [found.seed for found in two][:4] == [5, 5, 5, 6]
    assert sum(found.results["reference"].steps for found in two) > steps
    assert all(found.results["reference"].divergence is None for found in two)


def test_agreement_is_a_table_of_80_columns() -> None:
    reference = ReferenceImplementation()
    ok, text = shown(reference, reference)
    assert ok
    assert "3 of 240 combinations of switches" in text
    assert "preemptions" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_case_that_diverges_is_written_and_can_be_replayed(tmp_path: Path) -> None:
    class Scheduler(ReferenceScheduler):
        steps = 0

        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            self.steps += 1
            output = super().schedule(throttle_prefills)
            return output if self.steps < 3 else SchedulerOutput()

    class Implementation(ReferenceImplementation):
        name = "lazy"

        def make_scheduler(self, *configs: Any) -> Scheduler:
            return Scheduler(*configs)

    ok, text = shown(ReferenceImplementation(), Implementation(), folder=tmp_path)
    assert not ok
    assert "lazy" in text
    (first, *_) = sorted(tmp_path.iterdir())
    written = files.read(first)
    assert written.implementation == "lazy"
    assert written.divergence is not None
    assert written.divergence.step is not None
    assert written.case.suite == "scheduling"


def test_where_the_real_one_dies_the_others_have_to() -> None:
    dying = raising(CallFailed("schedule raised AssertionError"), 5)
    reference = ReferenceImplementation()
    results = list(run_matrix(dying, [dying, reference], steps=1))
    assert all(found.died == "schedule raised AssertionError" for found in results)
    assert [found.results["raising"].steps for found in results] == [5, 5, 5]
    assert all(found.results["raising"].divergence is None for found in results)
    for found in results:
        divergence = found.results["reference"].divergence
        assert divergence is not None
        assert divergence.step == 5
        assert divergence.expected == "an error: schedule raised AssertionError"
    ok, text = shown(dying, dying)
    assert ok
    assert "3 cases end early, where the real scheduler died by itself" in text


def test_a_real_scheduler_that_fails_ends_its_case_only() -> None:
    reference, real = ReferenceImplementation(), raising(ImplementationFailed("it hangs"), 5)
    results = list(run_matrix(real, [reference], steps=1))
    assert len(results) == 3
    assert all(found.results["raising"].verdict is Verdict.FAILED for found in results)
    ok, _ = shown(real, reference)
    assert not ok


def test_recording_writes_a_file_a_layout(tmp_path: Path) -> None:
    paths = list(record_matrix(ReferenceImplementation(), tmp_path, [0, 1]))
    assert [path.name for path in paths] == [
        "dense.jsonl.xz",
        "hybrid-none.jsonl.xz",
        "hybrid-align.jsonl.xz",
    ]


@pytest.mark.parametrize("command", [["matrix"], ["record", "folder"]])
def test_an_interpreter_that_is_not_there_is_one_line(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--python", "/no/such/python"])
    assert result.exit_code == 2
    assert result.output.splitlines() == ["servespec: --python /no/such/python: no such file"]
