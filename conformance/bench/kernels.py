"""Each kernel beside torch, in turns, so that a busy machine slows both.

Seconds are of CPU time on one thread where the device is a CPU, of the wall clock with the device
waited for elsewhere. The stream limit is the time in which the same run reads and writes as many
bytes in place as the recurrent step must.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from servespec.conformance.bench.kernel_races import Runner, races
from servespec.fast.backends.base import Backend, BackendError
from servespec.fast.backends.registry import choose
from servespec.fast.kernels.operations import operations

__all__ = ["KernelBench", "Race", "backend_of", "bench_kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One operation, done in several ways.

    Attributes
    ----------
    name : str
    milliseconds : dict of str to float
        Median of each way; the first is a kernel.
    bytes_moved : int
        What the operation must read and write; 0 if it isn't bound by that.
    """

    name: str
    milliseconds: dict[str, float]
    bytes_moved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """What a run measured.

    Attributes
    ----------
    backend, processor : str
    rounds : int
    load : float
        The machine's load average at the end.
    races : list of Race
    """

    backend: str
    processor: str
    rounds: int
    load: float
    races: list[Race] = field(default_factory=list)


def backend_of(device: str) -> Backend:
    """Return the backend whose kernels are measured on a device.

    Raises
    ------
    BackendError
        No backend runs kernels on the device, or there is no such kind of device.
    """
    try:
        torch.device(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise BackendError(f"device {device!r}: {reason}") from error
    backend = choose(device)
    if backend is None:
        raise BackendError(f"no backend runs kernels on {device}: see servespec implementations")
    return backend


def bench_kernels(
    *,
    rounds: int = 15,
    device: str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> KernelBench:
    """Measure every operation.

    Parameters
    ----------
    rounds : int
    device : str
    progress : callable, optional
        Told the number of races done and of all.

    Raises
    ------
    BackendError
        As `backend_of`.
    """
    backend = backend_of(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        makers = races(operations(backend), torch.device(device))
        run = []
        for number, make in enumerate(makers):
            name, runners, moved = make()
            run.append(
                Race(name=name, milliseconds=_race(runners, rounds, device), bytes_moved=moved)
            )
            if progress is not None:
                progress(number + 1, len(makers))
    finally:
        torch.set_num_threads(threads)
    cuda = torch.cuda.get_device_name() if device == "cuda" else ""
    return KernelBench(
        backend=backend.name,
        processor=cuda or _processor(),
        rounds=rounds,
        load=os.getloadavg()[0],
        races=run,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _race(runners: dict[str, Runner], rounds: int, device: str) -> dict[str, float]:
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 2):
        for name, run in runners.items():
            start = clock()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            # The first rounds compile and warm up.
            if number >= 2:
                seconds[name].append(clock() - start)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
