"""Taking every kernel through the Ascend compiler, on a machine without Ascend software.

The compiler of the package ascendnpu-ir plans a kernel's on-chip memory and then hands it to the
vendor's code generator ``hivmc``, which no package has. So every run of it ends in an error, and
its exit status says nothing: a kernel has passed if the module with planned memory was written and
nothing but the missing code generator was complained of. A kernel that fails leaves no such module,
and the compiler names the cause.

A kernel is compiled as the backend ``npu`` runs it: with a loop over what a grid has more than the
chip has cores (`servespec.fast.backends.npu`).

On-chip memory used is, on A5, what the compiler prints; for A2 and A3, whose compiler prints
nothing, the highest end of a buffer in the planned module.

Source: ``bishengir-compile --help`` of ascendnpu-ir 1.2.0; capacities as its overflow errors name
them.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from servespec.conformance.launches import Configuration, Launch, configurations
from servespec.conformance.report.console import make_console
from servespec.fast.backends.ascend import is_a5, to_linalg, tool
from servespec.fast.backends.base import CompileError
from servespec.fast.backends.registry import statuses

__all__ = [
    "TARGETS",
    "Compilation",
    "Memory",
    "compile_all",
    "compile_kernels",
    "compile_launch",
]

TARGETS = ("Ascend910B3", "Ascend910_9391", "Ascend950PR_9589")
"""Chips that kernels are compiled for: A2, A3, A5."""

_TIMEOUT = 300.0
# Triton's front end keeps its state in the process; the compiler behind it is one of its own.
_FRONT_END = threading.Lock()
_KIB = 1024
_CAPACITY = {
    False: {"ub": 192 * _KIB, "cbuf": 512 * _KIB, "cc": 128 * _KIB},
    True: {"ub": 248 * _KIB, "cbuf": 512 * _KIB, "cc": 256 * _KIB},
}
_BITS = {"f64": 64, "i64": 64, "index": 64, "f32": 32, "i32": 32, "f16": 16, "bf16": 16, "i16": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one on-chip memory that a core of a kernel uses, of those there are."""

    used: int
    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What became of one kernel on one target.

    Attributes
    ----------
    kernel, configuration, target : str
    ok : bool
    seconds : float
    memory : dict of str to Memory
        ``ub``: vector cores' buffer; ``cbuf`` and ``cc``: a cube core's operands and results.
    reason : str or None
        The compiler's, if it failed.
    """

    kernel: str
    configuration: str
    target: str
    ok: bool
    seconds: float
    memory: dict[str, Memory] = field(default_factory=dict)
    reason: str | None = None


def compile_kernels(targets: Sequence[str], kernels: Sequence[str]) -> list[Compilation]:
    """Compile what the models need, showing a progress bar.

    Parameters
    ----------
    targets : sequence of str
        None of them means all.
    kernels : sequence of str
        Parts of names of operations; none of them means all.

    Raises
    ------
    ValueError
        A target is unknown, no operation has such a name, or the compiler is not installed.
    """
    reason = next(status.reason for status in statuses() if status.name == "cpu")
    if reason is not None:
        raise ValueError(f"the Ascend compiler is not here: {reason}")
    chosen = [
        configuration
        for configuration in configurations()
        if not kernels or any(part in configuration.operation for part in kernels)
    ]
    if not chosen:
        raise ValueError(f"no operation has {' or '.join(kernels)} in its name")
    results = compile_all(chosen, targets or TARGETS)
    return list(_track(results, "compiling", len(chosen) * len(targets or TARGETS)))


def _track(results: Iterator[Compilation], what: str, expected: int) -> Iterator[Compilation]:
    """Show a bar on the error stream; some configurations have more kernels than one."""
    with Progress(console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=expected)
        for result in results:
            progress.update(task, advance=1, description=result.kernel.split(":")[-1])
            yield result


def compile_all(
    chosen: Iterable[Configuration],
    targets: Sequence[str] = TARGETS,
) -> Iterator[Compilation]:
    """Compile configurations.

    Parameters
    ----------
    chosen : iterable of Configuration
    targets : sequence of str

    Raises
    ------
    ValueError
        A target is unknown.
    """
    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"unknown target {target!r}: must be one of {', '.join(TARGETS)}")
    calls = [
        (
            launch,
            target,
            f"{configuration.operation}:{launch.kernel.__name__.lstrip('_')}",
            configuration.name,
        )
        for configuration in chosen
        for launch in configuration.launches()
        for target in targets
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda call: compile_launch(*call), calls)


def compile_launch(launch: Launch, target: str, name: str, configuration: str) -> Compilation:
    """Compile one kernel for one target.

    Parameters
    ----------
    launch : Launch
    target : str
    name, configuration : str
        For the result.
    """
    start = time.perf_counter()
    memory: dict[str, Memory] = {}
    reason = None
    try:
        with _FRONT_END:
            linalg = to_linalg(launch.kernel, launch.types, launch.constants, target)
        memory = _plan(linalg.module, target)
    except CompileError as error:
        reason = str(error)
    return Compilation(
        kernel=name,
        configuration=configuration,
        target=target,
        ok=reason is None,
        seconds=time.perf_counter() - start,
        memory=memory,
        reason=reason,
    )


def _plan(linalg: str, target: str) -> dict[str, Memory]:
    """Run the compiler and return the memory it planned."""
    a5 = is_a5(target)
    with tempfile.TemporaryDirectory() as folder:
        source, kept = Path(folder, "kernel.mlir"), Path(folder, "kept")
        source.write_text(linalg)
        kept.mkdir()
        command = [
            str(tool("bishengir-compile-a5" if a5 else "bishengir-compile")),
            str(source),
            f"--target={target}",
            "--enable-hfusion-compile=true",
            "--enable-triton-kernel-compile=true",
            "--enable-hivm-compile=true",
            f"--enable-auto-multi-buffer={not a5}",
            f"--enable-auto-bind-sub-block={not a5}",
            "--enable-auto-blockify-loop",
            *(["--enable-print-memory-allocated-size"] if a5 else []),
            f"--save-temps={kept}",
            "-o",
            str(Path(folder, "kernel")),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"the compiler took more than {_TIMEOUT:.0f} s") from None
        output = done.stdout + done.stderr
        modules = [path.read_text(errors="replace") for path in kept.rglob("module.hivm.opt.mlir")]
    if not modules:
        raise CompileError(
            _reason(output) or f"the compiler wrote nothing (exit {done.returncode})"
        )
    if done.returncode and "hivmc" not in output:
        raise CompileError(_reason(output) or f"the compiler ended with {done.returncode}")
    used = _used(modules[0])
    printed = re.search(r"(?i)\bub\b[^\n]*?(\d+)\s*bits", output)
    if printed is not None:
        used["ub"] = int(printed.group(1)) // 8
    return {
        name: Memory(used=used[name], available=size)
        for name, size in _CAPACITY[a5].items()
        if name in used
    }


def _reason(output: str) -> str:
    """Return the lines of a compiler's output that say why it failed."""
    telling = re.compile(r"error|overflow|assert|fail|signal|stack dump", re.IGNORECASE)
    lines = [
        re.sub(r"^loc\(.*?\): ", "", line.strip())
        for line in output.splitlines()
        if not any(word in line for word in ("hivmc", "warning:", "[NOTE]"))
    ]
    found = list(dict.fromkeys(line for line in lines if telling.search(line)))
    return " | ".join(found)[:1000]


def _used(module: str) -> dict[str, int]:
    """Return the highest end of the buffers in each memory."""
    constants = dict(re.findall(r"(%[\w#]+) = arith\.constant (\d+) : i64", module))
    peak: dict[str, int] = {}
    for offsets, shape, element, space in re.findall(
        r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:\n]*: memref<([^,>]*?)x?([a-z]+\d+|index)"
        r"(?:,[^\n]*?)?#hivm\.address_space<(\w+)>",
        module,
    ):
        elements = 1
        for extent in shape.split("x"):
            if extent.isdigit():
                elements *= int(extent)
        size = (elements * _BITS.get(element, 8) + 7) // 8
        for offset in re.findall(r"%[\w#]+", offsets):
            if offset in constants:
                peak[space] = max(peak.get(space, 0), int(constants[offset]) + size)
    return peak
