"""How fast kernels were, as a table."""

from __future__ import annotations

from rich.console import Console

from servespec.conformance.bench.kernels import KernelBench

__all__ = ["show_bench"]


def show_bench(figures: KernelBench, console: Console) -> None:
    """Print each race: median milliseconds, and how many times as long as the first way took.

    Parameters
    ----------
    figures : KernelBench
    console : Console
    """

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    line(
        f"backend {figures.backend} on {figures.processor}, median of {figures.rounds} rounds,"
        f" load average {figures.load:.1f}"
    )
    for race in figures.races:
        kernel = next(iter(race.milliseconds.values()))
        rate = f", {race.bytes_moved / kernel / 1e6:.1f} GB/s" if race.bytes_moved else ""
        line(f"{race.name}{rate}")
        for way, milliseconds in race.milliseconds.items():
            line(f"  {way:<18}{milliseconds:>10.3f} ms{milliseconds / kernel:>8.2f}")
