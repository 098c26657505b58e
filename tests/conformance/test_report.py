"""What a person reads: 80 columns, values under their labels, no styles where none are wanted."""

import io
from collections import Counter

import pytest
from rich.console import Console

from servespec.conformance.report import console as consoles
from servespec.conformance.report.result import Failure, Report, SuiteReport
from servespec.conformance.report.terminal import FailureText, print_report

LONG = Failure(
    suite="engine",
    verdict="diverged",
    field="scheduler_output.scheduled_new_reqs[0].sampling_params.repetition_detection.window",
    expected=" ".join(str(n) for n in range(60)),
    got="x" * 200,
    step=3,
    request="r0",
    case_file="servespec-cases/engine-000.json",
    not_written="cannot write servespec-cases/engine-000.json: No space left on device",
    last_lines=("y" * 100,),
)


def shown(failure: Failure, replay_options: str = "") -> list[str]:
    file = io.StringIO()
    Console(file=file, width=80).print(FailureText(failure, replay_options))
    return file.getvalue().splitlines()


def test_long_values_stay_under_their_labels() -> None:
    title, *lines = shown(LONG)
    assert title == "engine: diverged"
    assert max(map(len, lines)) <= 80
    assert {line[:12].strip() for line in lines if not line.startswith("  | ")} == {
        "", "at", "expected", "got", "case", "replay",
    }  # fmt: skip
    assert all(line.startswith(("  | ", " " * 12)) or line[2] != " " for line in lines)
    assert all(line == line.rstrip() for line in lines)
    # Nothing is cut.
    assert "".join(line[12:] for line in lines).count("x") == 200
    assert "".join(line[4:] for line in lines if line.startswith("  | ")) == "y" * 100
    text = " ".join(line[12:] for line in lines)
    assert LONG.expected in text
    assert "not written: cannot write servespec-cases/engine-000.json: No space" in text


def test_what_replay_needs_is_in_its_command() -> None:
    lines = shown(LONG, "--python python3.11")
    assert lines[-1] == (
        "  replay    servespec replay servespec-cases/engine-000.json --python python3.11"
    )


def report(**changes: object) -> Report:
    suite = SuiteReport(name="engine", cases=1, counts=Counter(preemptions=1))
    return Report(
        spec_version="0.1", implementation="mine", profile="quick", seed=0, machine={},
        suites=[suite, suite], ok=False, **changes,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("plain", [True, False])
def test_no_color_means_no_styles_at_all(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1" if plain else "")
    console = consoles.make_console()
    console.file = io.StringIO()
    assert console.is_terminal
    print_report(report(failures=[LONG]), console)
    console.print(FailureText(LONG))
    assert ("\x1b" in console.file.getvalue()) is not plain


def test_an_interrupted_run_with_failures_says_both() -> None:
    file = io.StringIO()
    print_report(report(failures=[LONG], interrupted=True), Console(file=file, width=200))
    assert "interrupted; until then mine does not agree: 1 failure" in file.getvalue()
