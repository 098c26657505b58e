"""What a person sees: a live bar, a table, and the first divergence of each failing case.

Everything fits 80 columns and says the same without colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from servespec.conformance.checks.suite import Suite
from servespec.conformance.report.result import Failure, Report, SuiteReport

__all__ = ["FailureText", "TerminalListener", "print_report"]

_LABEL_WIDTH = 12


class TerminalListener:
    """Shows a run as it goes: a live bar on a terminal, a line for each suite elsewhere.

    Parameters
    ----------
    console : Console
        Of standard error, so that standard output holds the result alone.
    replay_options : str
        Options that ``servespec replay`` needs to find the implementation again.
    """

    def __init__(self, console: Console, replay_options: str = "") -> None:
        self._console = console
        self._replay_options = replay_options
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]:<18.18}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> TerminalListener:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def suite_started(self, suite: Suite, cases: int) -> None:
        """Add a bar."""
        self._task = self._progress.add_task(suite.name, total=cases, note="")

    def case_done(self, report: SuiteReport) -> None:
        """Move the bar."""
        if self._task is not None:
            note = f"{report.tokens:,} tokens"
            self._progress.update(self._task, completed=report.cases, note=note)

    def shrinking(self, tried: int) -> None:
        """Say that a case is being made smaller."""
        if self._task is not None:
            self._progress.update(self._task, note=f"shrinking: {tried}")

    def failed(self, failure: Failure) -> None:
        """Print where it parts."""
        self._console.print(FailureText(failure, self._replay_options))

    def suite_done(self, report: SuiteReport) -> None:
        """End the bar, or print a line."""
        if not self._live:
            self._console.print(
                Text(
                    f"{report.name}: {report.cases} cases, {report.steps:,} steps,"
                    f" {report.tokens:,} tokens, {report.seconds:.1f} s"
                )
            )


class FailureText:
    """A failure as a person reads it: a label a line, long values folded beside their labels.

    Parameters
    ----------
    failure : Failure
    replay_options : str
        As for `TerminalListener`.
    """

    def __init__(self, failure: Failure, replay_options: str = "") -> None:
        where = [] if failure.step is None else [f"step {failure.step}"]
        where += [] if failure.request is None else [f"request {failure.request}"]
        self._title = f"{failure.suite}: {failure.verdict}"
        self._lines = [
            ("at", ", ".join([*where, failure.field]), ""),
            ("expected", failure.expected, ""),
            ("got", failure.got, ""),
            *(("|", line, "dim") for line in failure.last_lines[-6:]),
        ]
        if failure.not_written is not None:
            self._lines.append(("case", f"not written: {failure.not_written}", ""))
        if failure.case_file is not None:
            command = f"servespec replay {failure.case_file} {replay_options}".rstrip()
            self._lines.append(("replay", command, ""))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        yield Text(self._title, "bold red")
        for label, value, style in self._lines:
            start = "  | " if label == "|" else f"  {label}".ljust(_LABEL_WIDTH)
            room = max(1, options.max_width - len(start))
            for line in Text(value).wrap(console, room, overflow="fold") or [Text()]:
                line.rstrip()
                yield Text.assemble(start, line, style=style)
                start = start if label == "|" else " " * _LABEL_WIDTH


def print_report(report: Report, console: Console) -> None:
    """Print the table of a run and its verdict.

    Parameters
    ----------
    report : Report
    console : Console
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("suite")
    for name in ("cases", "steps", "tokens", "equal", "ties", "diverged", "seconds"):
        table.add_column(name, justify="right")
    for suite in report.suites:
        table.add_row(
            suite.name,
            *(f"{n:,}" for n in (suite.cases, suite.steps, suite.tokens, suite.equal, suite.ties)),
            f"{suite.diverged + suite.failed:,}",
            f"{suite.seconds:.1f}",
        )
    if len(report.suites) > 1:
        table.add_section()
        table.add_row("all", *_totals(report.suites), style="bold")
    console.print(table)
    for name, why in report.skipped.items():
        console.print(Text(f"{name} left out: the implementation has {why}"))
    console.print()
    for suite in report.suites:
        seen = [f"{name} {count:,}" for name, count in sorted(suite.counts.items()) if count]
        if seen:
            console.print(Text(f"{suite.name} saw: " + ", ".join(seen), "dim"))
    console.print()
    console.print(_verdict(report))


def _totals(suites: Iterable[SuiteReport]) -> list[str]:
    rows = [(s.cases, s.steps, s.tokens, s.equal, s.ties, s.diverged + s.failed) for s in suites]
    seconds = sum(s.seconds for s in suites)
    return [f"{sum(column):,}" for column in zip(*rows, strict=True)] + [f"{seconds:.1f}"]


def _verdict(report: Report) -> Text:
    if report.ok:
        return Text(f"{report.implementation} agrees with the reference", "bold green")
    if not report.failures:
        return Text("interrupted: no divergence until then", "bold yellow")
    places = len(report.failures)
    text = f"{report.implementation} does not agree: {places} failure{'s' * (places > 1)}"
    if report.interrupted:
        text = f"interrupted; until then {text}"
    first = report.failures[0]
    return Text(f"{text}; the first: {first.suite}, {first}", "bold red")
