"""What the compiler made of the kernels, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from servespec.conformance.compile import Compilation

__all__ = ["show_compilations"]

_KIB = 1024


def show_compilations(results: Sequence[Compilation], console: Console) -> None:
    """Print one line a kernel and target, then what failed and why.

    Memory is in KiB, used of available: the vector cores' buffer, a cube core's operands and its
    results.

    Parameters
    ----------
    results : sequence of Compilation
    console : Console
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("kernel", "configuration", "chip", "", "s", "ub", "cbuf", "cc"):
        table.add_column(column, justify="right" if column in ("s", "ub", "cbuf", "cc") else "left")
    for result in results:
        memory = [result.memory.get(name) for name in ("ub", "cbuf", "cc")]
        table.add_row(
            result.kernel.split(":")[-1],
            result.configuration,
            result.target.removeprefix("Ascend"),
            "ok" if result.ok else "FAILED",
            f"{result.seconds:.1f}",
            *(f"{m.used / _KIB:.0f}/{m.available // _KIB}" if m else "" for m in memory),
        )
    console.print(table)
    failed = [result for result in results if not result.ok]
    for result in failed:
        text = f"{result.kernel} {result.configuration} {result.target}: {result.reason}"
        console.print(text, markup=False, highlight=False)
    console.print(
        f"{len(results) - len(failed)} of {len(results)} compiled;"
        " the vendor's code generator behind memory planning was not run"
    )
