"""The command ``servespec``.

Exit status: 0 all agreed, 1 a divergence was found, 2 the call or its input was wrong (one line
that says what, where, and how to mend it), 130 interrupted from the keyboard.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.output import OutputError, require_writable, write_atomically
from servespec.conformance.report.console import make_console
from servespec.conformance.threads import ONE_THREAD

__all__ = ["main"]

_PATH = click.Path(path_type=Path)
_LONGEST = 1e6
_INTERRUPTED = 130


class _Commands(click.Group):
    """Turns an error in the input into one line and exit status 2, an interrupt into 130."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("servespec: interrupted", err=True)
            raise SystemExit(_INTERRUPTED) from None
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else ctx.command_path
            text = f"{error.format_message().rstrip('.')} (see {path} --help)"
            problem: Exception = error
        except ImplementationFailed as error:
            last = f": {error.lines[-1]}" if error.lines else ""
            text, problem = f"{error.reason}{last}", error
        except MemoryError as error:
            reason = str(error) or "make the model, the cache or the limits smaller"
            text, problem = f"not enough memory: {reason}", error
        except (ValueError, KeyError, OSError) as error:
            text, problem = str(error) or type(error).__name__, error
        click.echo(f"servespec: {' '.join(text.split())}", err=True)
        raise SystemExit(2) from problem


class _Seconds(click.FloatRange):
    """A number of seconds that one can wait for: finite, and no longer than any clock counts."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return seconds


_TIME_LIMIT = _Seconds(min=0, min_open=True, max=_LONGEST)
_SPAN = _Seconds(min=0, max=_LONGEST)
_COUNT = click.IntRange(min=1)


def _interpreter(_: click.Context, __: click.Parameter, python: str | None) -> str | None:
    """Find an interpreter that is given by name on the search path."""
    return python and (shutil.which(python) or python)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="servespec")
def main() -> None:
    """Check an LLM server's scheduling and computation against an executable specification."""
    # Hypothesis keeps notes of its own in the working directory unless told where else to.
    os.environ.setdefault(
        "HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir()) / "servespec-hypothesis")
    )


def _implementation_options(command: Any) -> Any:
    command = click.option(
        "--root", type=str, help="Folder of the unpacked wheel that vllm-v0 runs."
    )(command)
    command = click.option(
        "--python",
        callback=_interpreter,
        help="Interpreter of the environment that vllm or vllm-v0 lives in.",
    )(command)
    return click.option(
        "--time-limit",
        type=_TIME_LIMIT,
        default=60.0,
        show_default=True,
        help="Seconds a case may take.",
    )(command)


def _vllm_options(command: Any) -> Any:
    return click.option(
        "--python",
        required=True,
        callback=_interpreter,
        help="Interpreter of the environment that has vLLM.",
    )(command)


def _replay_options(impl: str, python: str | None, root: str | None) -> str:
    """Return what the printed command must add to a case file, which names the rest."""
    given = [("--impl", impl if impl.startswith("process") else None), ("--python", python)]
    return shlex.join(w for o, v in [*given, ("--root", root)] if v is not None for w in (o, v))


def _write_report(file: Path | None, content: bytes) -> bool:
    """Write a report; where that fails, say so and go on to the next one."""
    if file is None:
        return True
    try:
        write_atomically(file, content)
    except OutputError as error:
        click.echo(f"servespec: {error}", err=True)
        return False
    return True


def _json(data: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(data), indent=1)


@main.command()
@click.option("--suite", "suites", multiple=True, metavar="NAME", help="Run this suite; repeat.")
@click.option(
    "--impl", default="fast", show_default=True, help="A name, module:object or 'process:COMMAND'."
)
@_implementation_options
@click.option(
    "--profile",
    type=click.Choice(["quick", "standard", "full"]),
    default="quick",
    show_default=True,
    help="How many cases.",
)
@click.option(
    "--quirks",
    type=click.Choice(["both", "vllm-0.27.1", "intended"]),
    help="What suites scheduling and cache expect; both if left out, for vllm its own.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random cases.")
@click.option("--cases", type=click.IntRange(min=1), help="Cases of each suite.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; one a core if left out.")
@click.option(
    "--out",
    type=_PATH,
    default=Path("servespec-cases"),
    show_default=True,
    help="Folder for failing cases.",
)
@click.option(
    "--shrink-seconds",
    type=_SPAN,
    default=20.0,
    show_default=True,
    help="Time for making a case smaller.",
)
@click.option(
    "--max-failures",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Failing cases that end a suite.",
)
@click.option("--json", "json_file", type=_PATH, help="Write the report as JSON.")
@click.option("--junit", "junit_file", type=_PATH, help="Write the report as JUnit XML.")
def check(
    suites: tuple[str, ...],
    impl: str,
    python: str | None,
    root: str | None,
    time_limit: float,
    profile: Any,
    quirks: Any,
    seed: int,
    cases: int | None,
    jobs: int | None,
    out: Path,
    shrink_seconds: float,
    max_failures: int,
    json_file: Path | None,
    junit_file: Path | None,
) -> None:
    """Compare an implementation with the reference on random cases."""
    from servespec.conformance import session
    from servespec.conformance.pool import default_jobs
    from servespec.conformance.report.junit import junit
    from servespec.conformance.report.terminal import TerminalListener, print_report

    for file in (json_file, junit_file, out / "case"):
        if file is not None:
            require_writable(file)
    if json_file is not None and json_file == junit_file:
        raise OutputError(f"--json and --junit both name {json_file}")
    options = session.Options(
        implementation=impl,
        python=python,
        root=root,
        suites=suites,
        profile=profile,
        quirks=quirks,
        seed=seed,
        cases=cases,
        case_folder=out,
        jobs=jobs or default_jobs(),
        time_limit=time_limit,
        shrink_seconds=shrink_seconds,
        max_failures=max_failures,
    )
    replay_options = _replay_options(impl, python, root)
    with TerminalListener(make_console(stderr=True), replay_options) as listener:
        report = session.run(options, listener)
    print_report(report, make_console())
    written = [_write_report(json_file, _json(report)), _write_report(junit_file, junit(report))]
    if report.interrupted:
        raise SystemExit(_INTERRUPTED)
    raise SystemExit(1 if not report.ok else 0 if all(written) else 2)


@main.command()
@click.argument("case", type=_PATH)
@click.option("--impl", help="As for check; the one in the file if left out.")
@_implementation_options
def replay(
    case: Path, impl: str | None, python: str | None, root: str | None, time_limit: float
) -> None:
    """Run the case of a file again."""
    from servespec.conformance.cases.replay import replay as run_again
    from servespec.conformance.report.result import Failure
    from servespec.conformance.report.terminal import FailureText

    seen = run_again(case, impl, python, root, time_limit=time_limit)
    console = make_console()
    for note in seen.notes:
        console.print(note, markup=False, highlight=False)
    result = seen.result
    if result.divergence is None:
        console.print(
            f"{seen.implementation} agrees: {result.steps} steps, {result.tokens} tokens"
            + (f", {result.ties} ties" if result.ties else ""),
            markup=False,
            highlight=False,
        )
        return
    console.print(FailureText(Failure.of(seen.suite, result, None)))
    raise SystemExit(1)


@main.command()
@click.argument("case", type=_PATH)
@click.option("--impl", help="As for check; the one in the file if left out.")
@_implementation_options
@click.option("--seconds", type=_SPAN, default=60.0, show_default=True, help="Time to spend.")
@click.option("--out", type=_PATH, help="Where to write; over the case itself if left out.")
def shrink(
    case: Path,
    impl: str | None,
    python: str | None,
    root: str | None,
    time_limit: float,
    seconds: float,
    out: Path | None,
) -> None:
    """Make the case of a file smaller while it still fails at the same field."""
    from servespec.conformance.cases.replay import shrink_file

    require_writable(out or case)
    with make_console(stderr=True).status("shrinking") as status:
        text = shrink_file(
            case,
            out or case,
            impl,
            python,
            root,
            time_limit=time_limit,
            seconds=seconds,
            progress=lambda tried: status.update(f"shrinking: {tried} tried"),
        )
    make_console().print(text, markup=False, highlight=False)


@main.command()
@_vllm_options
@click.option("--impl", "names", multiple=True, help="Held against it; repeat. Both if left out.")
@click.option(
    "--steps", type=_COUNT, default=200_000, show_default=True, help="Steps to compare at least."
)
@click.option("--seed", default=0, show_default=True, help="Of the first round.")
@click.option(
    "--out",
    type=_PATH,
    default=Path("servespec-cases"),
    show_default=True,
    help="Folder for failing cases.",
)
def matrix(python: str, names: tuple[str, ...], steps: int, seed: int, out: Path) -> None:
    """Hold schedulers against the real vLLM over every combination of switches."""
    from servespec.conformance.adapters.loading import load, load_vllm, start
    from servespec.conformance.matrix import run_matrix
    from servespec.conformance.report.matrix import show_matrix

    require_writable(out / "case")
    chosen = tuple(dict.fromkeys(names or ("reference", "fast")))
    loaded: list[Any] = [load(name) for name in chosen]
    with load_vllm(python) as vllm:
        for implementation, name in zip((vllm, *loaded), ("vllm", *chosen), strict=True):
            start(implementation, name)
        results = run_matrix(vllm, loaded, steps=steps, seed=seed, case_folder=out)
        ok = show_matrix(results, steps, make_console())
    raise SystemExit(0 if ok else 1)


@main.command()
@_vllm_options
@click.option(
    "--seeds", type=_COUNT, default=2, show_default=True, help="Cases of each combination."
)
@click.argument("folder", type=_PATH)
def record(python: str, seeds: int, folder: Path) -> None:
    """Record the real vLLM over every combination of switches into trace files."""
    from servespec.conformance.adapters.loading import load_vllm, start
    from servespec.conformance.matrix import record_matrix

    require_writable(folder / "traces")
    with load_vllm(python) as vllm, make_console(stderr=True).status("recording"):
        start(vllm, "vllm")
        for path in record_matrix(vllm, folder, range(seeds)):
            click.echo(f"{path}  {path.stat().st_size:,} bytes")


@main.command("record-v0")
@click.option(
    "--python",
    required=True,
    callback=_interpreter,
    help="Interpreter that runs vLLM 0.5.1's scheduler.",
)
@click.option("--root", required=True, help="Folder of the unpacked wheel of vLLM 0.5.1.")
@click.option(
    "--seeds", type=_COUNT, default=3, show_default=True, help="Cases of each combination."
)
@click.argument("path", type=_PATH)
def record_v0(python: str, root: str, seeds: int, path: Path) -> None:
    """Record the real V0 scheduler over every combination of switches into a trace file."""
    from servespec.conformance.adapters.loading import load_vllm_v0, start
    from servespec.conformance.adapters.v0_traces import record_v0_matrix

    require_writable(path)
    with load_vllm_v0(python, root) as vllm, make_console(stderr=True).status("recording"):
        start(vllm, "vllm-v0")
        steps = record_v0_matrix(vllm, path, range(seeds))
    click.echo(f"{path}  {steps:,} steps  {path.stat().st_size:,} bytes")


@main.command()
def implementations() -> None:
    """List the implementations known by name."""
    from servespec.conformance.adapters.loading import BUILT_IN

    for name, what in BUILT_IN.items():
        click.echo(f"{name:<16}{what}")
    click.echo(f"{'module:object':<16}your own: any object that offers a factory, see README.md")
    click.echo(
        f"{'process:COMMAND':<16}a program that speaks the line protocol (process-v0: for V0)"
    )
    from servespec.fast.backends.registry import statuses

    click.echo("backends of the kernels of fast (without any, plain torch operations serve)")
    for status in statuses():
        click.echo(f"{status.name:<16}{status.reason or 'runs here'}")


@main.command("compile")
@click.option("--target", "targets", multiple=True, help="A chip; repeat. All three if left out.")
@click.option("--kernel", "kernels", multiple=True, help="Operations whose name has this; repeat.")
@click.option("--json", "json_file", type=_PATH, help="Write the results as JSON.")
def compile_kernels(
    targets: tuple[str, ...], kernels: tuple[str, ...], json_file: Path | None
) -> None:
    """Take every kernel through the Ascend compiler, up to planned on-chip memory."""
    from servespec.conformance.compile import compile_kernels as run_compiler
    from servespec.conformance.report.compile import show_compilations

    if json_file is not None:
        require_writable(json_file)
    results = run_compiler(targets, kernels)
    show_compilations(results, make_console())
    if json_file is not None:
        write_atomically(json_file, _json(results))
    raise SystemExit(0 if all(result.ok for result in results) else 1)


@main.command()
@click.option("--seed", default=0, show_default=True, help="Of the random cases.")
def faults(seed: int) -> None:
    """Plant faults that real engines had and require that the suites find them."""
    from rich.table import Table

    from servespec.conformance.faults.catalogue import FAULTS
    from servespec.conformance.faults.self_test import self_test

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("fault", "suite", "cases", "found at"):
        table.add_column(column, justify="right" if column == "cases" else "left", overflow="fold")
    missed = 0
    with click.progressbar(length=sum(len(f.suites) or 2 for f in FAULTS), file=sys.stderr) as bar:
        for finding in self_test(FAULTS, seed):
            bar.update(1)
            missed += not finding.ok
            place = "nothing" if finding.divergence is None else finding.divergence.place
            mark = "" if finding.ok else "  WRONG"
            table.add_row(finding.fault.name, finding.suite, str(finding.cases), place + mark)
    make_console().print(table)
    raise SystemExit(1 if missed else 0)


@main.command()
@click.argument("name", type=click.Choice(["engine", "kernels"]), default="engine")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Where kernels are measured.")
@click.option("--json", "json_file", type=_PATH, help="Write the figures as JSON.")
def bench(name: str, rounds: int, device: str, json_file: Path | None) -> None:
    """Measure the fast engine beside the reference, or each kernel beside torch."""
    if name == "kernels":
        _bench_kernels(rounds, device, json_file)
        return
    os.environ.update(ONE_THREAD)
    from servespec.conformance.bench.engine import bench_engine

    if json_file is not None:
        require_writable(json_file)
    with click.progressbar(length=rounds, file=sys.stderr) as bar:
        figures = bench_engine(rounds=rounds, progress=lambda _: bar.update(1))
    if not figures.equal:
        raise click.ClickException("the engines gave different tokens, so figures mean nothing")
    click.echo(
        f"{figures.requests} requests, {figures.prompt_tokens} prompt tokens,"
        f" {figures.output_tokens} new tokens each; one thread, median of {rounds}"
    )
    for side, seconds in (("reference", figures.reference), ("fast", figures.fast)):
        click.echo(f"{side:<11}{figures.tokens_per_second(seconds):>10,.0f} tokens/s")
    click.echo(f"{'ratio':<11}{figures.ratio:>10.1f}")
    if json_file is not None:
        write_atomically(json_file, _json(figures))


def _bench_kernels(rounds: int, device: str, json_file: Path | None) -> None:
    from servespec.conformance.bench.kernels import backend_of, bench_kernels
    from servespec.conformance.report.kernels import show_bench

    if json_file is not None:
        require_writable(json_file)
    backend_of(device)
    with click.progressbar(length=1, file=sys.stderr) as bar:

        def advance(_: int, count: int) -> None:
            bar.length = count
            bar.update(1)

        figures = bench_kernels(rounds=rounds, device=device, progress=advance)
    show_bench(figures, make_console())
    if json_file is not None:
        write_atomically(json_file, _json(figures))


@main.command()
@click.option("--model", required=True, help="A checkpoint folder, or tiny.")
@click.option("--engine", type=click.Choice(["fast", "reference"]), default="fast")
@click.option("--prompts", type=_PATH, required=True, help="Token ids, a prompt a line.")
@click.option("--max-tokens", default=16, show_default=True, help="New tokens of a prompt.")
@click.option("--block-size", default=16, show_default=True, help="Tokens in a cache block.")
@click.option("--blocks", type=int, help="Blocks in the cache; enough for all if left out.")
@click.option(
    "--max-num-batched-tokens", default=2048, show_default=True, help="Most tokens in a step."
)
@click.option("--max-num-seqs", default=128, show_default=True, help="Most running requests.")
@click.option("--max-model-len", type=int, help="Most tokens of a request.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the fast engine; float32 if left out.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the tiny model's weights.",
)
def generate(model: str, engine: Any, prompts: Path, **options: Any) -> None:
    """Print the new tokens of each prompt, a JSON list a line."""
    from servespec.conformance.generate import generate as run_engine

    for tokens in run_engine(model, engine, prompts, **options):
        click.echo(msgspec.json.encode(tokens).decode())
