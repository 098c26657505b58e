"""A run as a whole: what it must have seen, when it ends, and how it looks while it goes on."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from servespec.conformance import session
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.registry import SUITES
from servespec.conformance.checks.suite import Suite
from servespec.conformance.drawing import draw_cases
from servespec.conformance.report.result import Failure, SuiteReport
from servespec.conformance.report.terminal import TerminalListener
from servespec.conformance.session import Options, run
from servespec.reference.contracts import Quirks


class Silent:
    def suite_started(self, suite: Suite, cases: int) -> None: ...

    def case_done(self, report: SuiteReport) -> None: ...

    def shrinking(self, tried: int) -> None: ...

    def failed(self, failure: Failure) -> None: ...

    def suite_done(self, report: SuiteReport) -> None: ...


def options(folder: Path, **changes: object) -> Options:
    base = Options(
        implementation="reference",
        suites=("batch",),
        cases=4,
        case_folder=folder / "cases",
        jobs=1,
        shrink_seconds=0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def with_suite(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    monkeypatch.setitem(SUITES, "batch", replace(SUITES["batch"], **changes))  # type: ignore[arg-type]


def test_a_suite_that_never_reached_what_it_must_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_suite(monkeypatch, must_reach=("batches", "unicorns"), sizes={"quick": 4})
    report = run(options(tmp_path), Silent())
    assert not report.ok
    (failure,) = report.failures
    assert (failure.field, failure.expected, failure.got) == ("counts.unicorns", "at least 1", "0")
    assert failure.case_file is None
    # Fewer cases than the quick profile's promise nothing.
    assert run(options(tmp_path, cases=3), Silent()).ok


def test_too_many_ties_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = SuiteReport(name="batch", tokens=20_000, ties=2)
    suite = replace(SUITES["batch"], must_reach=())
    assert not session._shortcomings(suite, sums, 1)
    sums.ties = 3
    (failure,) = session._shortcomings(suite, sums, 1)
    assert (failure.field, failure.expected, failure.got) == ("ties", "at most 2", "3")


def test_a_suite_ends_after_a_handful_of_failures(tmp_path: Path) -> None:
    impl = "servespec.conformance.faults:one_label"
    report = run(options(tmp_path, implementation=impl, cases=40), Silent())
    assert len(report.failures) == Options().max_failures
    assert report.suites[0].cases < 40
    assert len(list((tmp_path / "cases").glob("batch-*.json"))) == Options().max_failures
    # A second run keeps what the first has found.
    run(options(tmp_path, implementation=impl, cases=1), Silent())
    assert len(list((tmp_path / "cases").glob("batch-*.json"))) == Options().max_failures + 1


def test_results_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    reports = [run(options(tmp_path, cases=12, jobs=jobs), Silent()) for jobs in (1, 2)]
    one, two = ([replace(suite, seconds=0) for suite in report.suites] for report in reports)
    assert one == two


def test_drawing_ends_when_told_to() -> None:
    taken: list[object] = []

    def take(case: object) -> bool:
        taken.append(case)
        return len(taken) < 3

    draw_cases(SUITES["batch"].cases(), 50, 0, take)
    assert len(taken) == 3


@pytest.mark.parametrize("live", [True, False])
def test_a_run_is_shown_within_80_columns(live: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=live)
    sums = SuiteReport(name="invariance", cases=1234, tokens=123_456_789, steps=12_345_678)
    failure = Failure(
        suite="engine", verdict="diverged", field="logits[3]", expected="1", got="2", step=3,
        request="r0", case_file="servespec-cases/engine-000.json", last_lines=("a",),
    )  # fmt: skip
    with TerminalListener(console) as listener:
        listener.suite_started(SUITES["invariance"], 2000)
        listener.case_done(sums)
        listener.shrinking(12_345)
        listener.failed(failure)
        listener.suite_done(sums)
    text = file.getvalue()
    assert "step 3, request r0, logits[3]" in text
    if live:
        assert "1234/2000" in text
    else:
        assert "invariance: 1234 cases" in text
        assert max(map(len, text.splitlines())) <= 80


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`, from /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def test_an_interrupt_reports_what_was_found_and_leaves_no_process(tmp_path: Path) -> None:
    # A shell lets what it starts in the background ignore interrupts, and so all that this starts.
    command = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from servespec.conformance.cli import main; main(["
        "'check', '--impl', 'servespec.conformance.faults:hangs', '--suite', 'batch', '--suite',"
        "'engine', '--cases', '2', '--jobs', '2', '--json', 'report.json'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("batch: 2 cases"):
            break
    children = children_of(process.pid)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted" in output
    assert '"interrupted": true' in (tmp_path / "report.json").read_text()
    assert children
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.parametrize("name", ["scheduling", "cache"])
@pytest.mark.parametrize("quirks", ["vllm-0.27.1", "intended"])
def test_a_run_of_one_profile_draws_no_other(name: str, quirks: session.QuirksName) -> None:
    def drawn(quirks: session.QuirksName) -> set[Quirks]:
        cases: list[Case] = []
        draw_cases(
            session._cases(SUITES[name], quirks), 20, 0, lambda case: cases.append(case) or True
        )
        assert len(cases) == 20
        return {case.config.scheduler.quirks for case in cases}

    assert len(drawn("both")) == 2
    assert drawn(quirks) == {session.PROFILES[quirks]}


@pytest.mark.parametrize(
    ("implementation", "asked", "quirks"),
    [("vllm", None, "vllm-0.27.1"), ("fast", None, "both"), ("vllm", "both", "both")],
)
def test_vllm_is_asked_for_its_own_decisions(
    implementation: str, asked: session.QuirksName | None, quirks: str, tmp_path: Path
) -> None:
    assert session._quirks(options(tmp_path, implementation=implementation, quirks=asked)) == quirks
