"""What a person sees of a run over the matrix: a bar, then a table by layout and the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from servespec.conformance.matrix import MatrixResult
from servespec.conformance.report.console import make_console
from servespec.conformance.report.result import Failure
from servespec.conformance.report.terminal import FailureText
from servespec.conformance.verdicts import CaseResult
from servespec.conformance.workloads.scheduling import LAYOUTS, Layout, matrix

__all__ = ["show_matrix"]


@dataclass(slots=True)
class _Sum:
    cases: int = 0
    steps: int = 0
    tokens: int = 0
    diverged: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, result: CaseResult) -> None:
        self.cases += 1
        self.steps += result.steps
        self.tokens += result.tokens
        self.diverged += result.divergence is not None
        self.counts.update(result.counts)


def show_matrix(results: Iterable[MatrixResult], steps: int, console: Console) -> bool:
    """Run over the matrix and print what it shows.

    Parameters
    ----------
    results : iterable of MatrixResult
        As `run_matrix` yields them.
    steps : int
        Steps asked for, for the bar.
    console : Console

    Returns
    -------
    bool
        Whether everything agreed.
    """
    sums: dict[tuple[Layout, str], _Sum] = {}
    combinations = set()
    deaths = 0
    live = make_console(stderr=True)
    progress = Progress(
        TextColumn("matrix"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,} of {task.total:,} steps"),
        TimeElapsedColumn(),
        console=live,
        disable=not live.is_terminal,
    )
    try:
        with progress:
            bar = progress.add_task("", total=steps)
            for found in results:
                combinations.add(found.combination)
                if found.died is not None:
                    deaths += 1
                    progress.console.print(
                        f"died by itself: {found.combination}, seed {found.seed}: {found.died}"
                    )
                for name, result in found.results.items():
                    sums.setdefault((found.combination.layout, name), _Sum()).add(result)
                    if result.divergence is not None:
                        failure = Failure.of(
                            "scheduling",
                            result,
                            found.cases.get(name),
                            found.not_written.get(name),
                        )
                        progress.console.print(f"{name}: {found.combination}, seed {found.seed}")
                        progress.console.print(FailureText(failure))
                progress.advance(bar, max((r.steps for r in found.results.values()), default=0))
    finally:
        # What was seen until an interrupt is not lost.
        _print_tables(sums, len(combinations), console)
    if deaths:
        console.print(f"{deaths} cases end early, where the real scheduler died by itself")
    return not any(total.diverged for total in sums.values())


def _print_tables(
    sums: dict[tuple[Layout, str], _Sum], combinations: int, console: Console
) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("layout", "implementation"):
        table.add_column(column)
    for column in ("cases", "steps", "tokens", "diverged"):
        table.add_column(column, justify="right")
    for (layout, name), total in sorted(sums.items(), key=lambda item: LAYOUTS.index(item[0][0])):
        numbers = (total.cases, total.steps, total.tokens, total.diverged)
        table.add_row(layout, name, *(f"{number:,}" for number in numbers))
    console.print(table)
    console.print(f"{combinations} of {len(matrix())} combinations of switches")
    names = sorted({name for _, name in sums})
    if not names:
        return
    by_layout = {layout: sums.get((layout, names[0]), _Sum()).counts for layout in LAYOUTS}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("how often")
    for layout in LAYOUTS:
        table.add_column(layout, justify="right")
    for what in sorted({what for counts in by_layout.values() for what in counts}):
        table.add_row(
            what.replace("_", " "), *(f"{counts[what]:,}" for counts in by_layout.values())
        )
    console.print(table)
