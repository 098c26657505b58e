"""What the tests of several suites need: cases drawn, and found to fail by call or command."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis.strategies import SearchStrategy

from servespec.conformance.cases import files
from servespec.conformance.cases.case import Case, CaseFile
from servespec.conformance.cli import main
from servespec.conformance.drawing import draw_cases
from servespec.conformance.verdicts import CaseResult, Check, run_check


@pytest.fixture(scope="session")
def drawn() -> Callable[[SearchStrategy[Case], int], list[Case]]:
    """A number of cases of a strategy."""

    def draw(strategy: SearchStrategy[Case], count: int) -> list[Case]:
        found: list[Case] = []
        draw_cases(strategy, count, 0, lambda case: bool(found.append(case)) or True)
        return found

    return draw


@pytest.fixture(scope="session")
def first_failure() -> Callable[[Check, object, Iterable[Case]], tuple[Case, CaseResult]]:
    """The first case in which an implementation diverges or fails, and how."""

    def find(
        check: Check, implementation: object, cases: Iterable[Case]
    ) -> tuple[Case, CaseResult]:
        for case in cases:
            result = run_check(check, case, implementation)
            if result.divergence is not None:
                return case, result
        raise AssertionError("nothing was found")

    return find


@pytest.fixture
def found_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str, int], tuple[CaseFile, str]]:
    """The case file of a planted fault, and what its replay says."""

    def run(suite: str, fault: str, cases: int) -> tuple[CaseFile, str]:
        monkeypatch.chdir(tmp_path)
        command = CliRunner().invoke
        impl = f"servespec.conformance.faults:{fault}"
        arguments = ["--suite", suite, "--impl", impl, "--jobs", "1", "--cases", str(cases)]
        found = command(main, ["check", *arguments, "--shrink-seconds", "0.5"])
        assert found.exit_code == 1, found.output
        path = Path("servespec-cases", f"{suite}-000.json")
        again = command(main, ["replay", str(path)])
        assert again.exit_code == 1, again.output
        return files.read(path), again.output

    return run
