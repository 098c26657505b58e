"""From the linalg dialect to LLVM IR.

bishengir-opt does the work (it carries the upstream passes); between its runs the text is edited
where no pass of it does what a CPU needs:

* Reductions may be reassociated. Without leave to, LLVM keeps them scalar; what the order of a
  sum may change is inside every bound of the conformance suite, which holds for any order.
* Broadcasts and fills are cloned for each use and made generic, so that fusion takes them in and
  no tile of copies of one value is ever stored. Matrix products stay named, because whatever is
  fused into them would be computed once for each row of the other operand.
* A product with a transposed right operand reads it where it lies, and products become loops over
  registers (`products`).

Buffers of known size are moved to the stack frame's entry, so that a loop allocates nothing.

Source: the passes' own documentation, mlir.llvm.org/docs/Passes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile

from servespec.fast.backends.ascend import tool
from servespec.fast.backends.base import CompileError
from servespec.fast.backends.cpu.library import add_bodies
from servespec.fast.backends.cpu.products import spell_out

__all__ = ["lower"]

_MAX_STACK_BUFFER = 1 << 16
_TIMEOUT = 300.0

_TO_BUFFERS = (
    "builtin.module(inline,execution-engine-convert-hfusion-to-upstream,"
    "convert-elementwise-to-linalg,linalg-fuse-elementwise-ops,canonicalize,cse,"
    "eliminate-empty-tensors,empty-tensor-to-alloc-tensor,"
    "one-shot-bufferize{allow-return-allocs-from-loops=true},canonicalize,cse,"
    "func.func(buffer-loop-hoisting,"
    f"promote-buffers-to-stack{{max-alloc-size-in-bytes={_MAX_STACK_BUFFER}}}),"
    "expand-realloc{emit-deallocs=false},ownership-based-buffer-deallocation,canonicalize,"
    "buffer-deallocation-simplification,bufferization-lower-deallocations,cse,canonicalize,"
    "convert-bufferization-to-memref)"
)
_TO_LLVM = (
    "builtin.module(func.func(convert-linalg-to-loops),arith-expand{include-bf16=true},"
    "memref-expand,expand-strided-metadata,lower-affine,convert-scf-to-cf,"
    "convert-vector-to-llvm{reassociate-fp-reductions=true},convert-math-to-llvm,"
    "convert-math-to-libm,convert-arith-to-llvm,convert-index-to-llvm,finalize-memref-to-llvm,"
    "convert-func-to-llvm,convert-cf-to-llvm,reconcile-unrealized-casts)"
)

_VALUE = r"%[\w#]+"
_MEMREF = r"memref<[^>]*?(?:strided<[^>]*>[^>]*)?>"


def lower(linalg: str) -> str:
    """Compile a module.

    Parameters
    ----------
    linalg : str
        MLIR text of the front end.

    Returns
    -------
    str
        LLVM IR.

    Raises
    ------
    CompileError
    """
    module = add_bodies(linalg)
    module = _generalize(_transposed_products(_clone_broadcasts(module)))
    module = _optimise(module, _TO_BUFFERS)
    module = _optimise(spell_out(_copy_in_loops(module)), _TO_LLVM)
    return _allocate_at_entry(_translate(module))


def _optimise(module: str, pipeline: str) -> str:
    command = [str(tool("bishengir-opt")), "-", f"--pass-pipeline={pipeline}", "-o", "-"]
    try:
        done = subprocess.run(
            command, input=module, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"bishengir-opt took more than {_TIMEOUT:.0f} s") from None
    if done.returncode:
        raise CompileError(f"bishengir-opt: {done.stderr[:2000]}")
    return done.stdout


def _translate(module: str) -> str:
    """LLVM dialect to LLVM IR, with the translator inside triton-ascend."""
    from triton._C.libtriton import ir, llvm

    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(module)
        file.flush()
        context = ir.context()
        ir.load_dialects(context)
        return str(llvm.to_module(ir.parse_mlir_module(file.name, context), llvm.context()))


def _clone_broadcasts(module: str) -> str:
    """Repeat each broadcast and fill in front of every operation that uses it."""
    lines: list[str] = []
    sources: dict[str, str] = {}
    for line in module.split("\n"):
        head, equals, body = line.partition(" = ")
        defines = re.match(rf"\s*({_VALUE})$", head) if equals else None
        text = body if defines else line
        indent = line[: len(line) - len(line.lstrip())]
        for name in dict.fromkeys(re.findall(r"%\w+", text)):
            # A loop carries its initial value away, and a reduction overwrites its own.
            if name not in sources or "iter_args" in text or "scf.yield" in text:
                continue
            clone = f"%clone{len(lines)}"
            lines.append(f"{indent}{clone} = {sources[name]}")
            text = re.sub(rf"{name}(?!\w)", clone, text)
        lines.append(f"{head} = {text}" if defines else text)
        if defines:
            # Names are only unique within nested regions; this may be another value of that name.
            sources.pop(defines.group(1), None)
            if re.match(r"linalg\.(broadcast|fill) ", body):
                sources[defines.group(1)] = text
    return "\n".join(lines)


def _map(rank: int, used: list[int]) -> str:
    dims = ", ".join(f"d{d}" for d in range(rank))
    return f"affine_map<({dims}) -> ({', '.join(f'd{d}' for d in used)})>"


def _rank(tensor: str) -> int:
    return tensor.split("<")[1].count("x")


def _kinds(rank: int, reduced: list[int]) -> str:
    names = ('"reduction"' if d in reduced else '"parallel"' for d in range(rank))
    return f"[{', '.join(names)}]"


def _generalize(module: str) -> str:
    """Turn broadcasts, fills and reductions into generic operations, which fusion works on."""

    def broadcast(match: re.Match[str]) -> str:
        value, kind, out, result, dimensions = match.groups()
        added = [int(d) for d in dimensions.split(",")]
        rank = _rank(result)
        return _spread(value, kind, out, result, [d for d in range(rank) if d not in added])

    def fill(match: re.Match[str]) -> str:
        value, kind, out, result = match.groups()
        return _spread(value, kind, out, result, [])

    def reduce(match: re.Match[str]) -> str:
        values, kind, out, result, dimensions, parameters, body = match.groups()
        reduced = [int(d) for d in dimensions.split(",")]
        rank = _rank(kind)
        kept = [d for d in range(rank) if d not in reduced]
        relaxed = re.sub(
            rf"(arith\.(?:addf|mulf) {_VALUE}, {_VALUE}) :",
            r"\1 fastmath<reassoc,contract> :",
            body,
        )
        # Unlike in a sum, a NaN that this maximum overlooks shows in whatever it is compared with.
        relaxed = re.sub(
            rf"(arith\.(?:max|min)(?:num|imum)f {_VALUE}, {_VALUE}) :",
            r"\1 fastmath<nnan,nsz> :",
            relaxed,
        )
        return (
            f"linalg.generic {{indexing_maps = [{_map(rank, list(range(rank)))},"
            f" {_map(rank, kept)}], iterator_types = {_kinds(rank, reduced)}}}"
            f" ins({values} : {kind}) outs({out} : {result}) {{\n^bb0({parameters}):"
            f"{relaxed}}} -> {result}\n"
        )

    module = re.sub(
        rf"linalg\.broadcast ins\(({_VALUE}) : (tensor<[^>]*>)\)"
        rf" outs\(({_VALUE}) : (tensor<[^>]*>)\) dimensions = \[([\d, ]+)\]",
        broadcast,
        module,
    )
    module = re.sub(
        rf"linalg\.fill ins\(({_VALUE}) : (\w+)\)"
        rf" outs\(({_VALUE}) : (tensor<\d[^>]*>)\) -> tensor<[^>]*>",
        fill,
        module,
    )
    return re.sub(
        rf"linalg\.reduce ins\(({_VALUE}) : (tensor<[^>]*>)\) outs\(({_VALUE}) : (tensor<[^>]*>)\)"
        r" dimensions = \[([\d, ]+)\]\s*\n\s*\(([^)]*)\) \{\n(.*?)\n\s*\}\n",
        reduce,
        module,
        flags=re.DOTALL,
    )


def _spread(value: str, kind: str, out: str, result: str, used: list[int]) -> str:
    rank = _rank(result)
    element = result[7:-1].split("x")[-1]
    return (
        f"linalg.generic {{indexing_maps = [{_map(rank, used)}, {_map(rank, list(range(rank)))}],"
        f" iterator_types = {_kinds(rank, [])}}} ins({value} : {kind}) outs({out} : {result}) {{\n"
        f"^bb0(%in: {element}, %out: {element}):\nlinalg.yield %in : {element}\n}} -> {result}"
    )


def _transposed_products(module: str) -> str:
    """Let a product read its transposed right operand where it lies."""
    transposes = {
        match.group(1): (match.group(2), match.group(3))
        for match in re.finditer(
            rf"({_VALUE}) = linalg\.transpose ins\(({_VALUE}) : (tensor<[^>]*>)\)"
            r" outs\([^)]*\) permutation = \[1, 0\]",
            module,
        )
    }

    def product(match: re.Match[str]) -> str:
        left, right, left_type, _ = match.groups()
        if right not in transposes:
            return match.group(0)
        source, kind = transposes[right]
        return f"linalg.matmul_transpose_b ins({left}, {source} : {left_type}, {kind})"

    return re.sub(
        rf"linalg\.matmul (?:\{{[^}}]*\}} )?ins\(({_VALUE}), ({_VALUE}) : (tensor<[^>]*>),"
        r" (tensor<[^>]*>)\)",
        product,
        module,
    )


def _copy_in_loops(module: str) -> str:
    """Make copies of strided memory loops; the runtime function for them is not there."""

    def copy(match: re.Match[str]) -> str:
        source, target, source_type, target_type = match.groups()
        if "strided" not in source_type + target_type:
            return match.group(0)
        return f"linalg.copy ins({source} : {source_type}) outs({target} : {target_type})"

    return re.sub(
        rf"memref\.copy ({_VALUE}), ({_VALUE}) : ({_MEMREF}) to ({_MEMREF})", copy, module
    )


def _allocate_at_entry(module: str) -> str:
    """Move stack buffers of known size to the entry of their function.

    No such buffer outlives the block it is made in, so that a loop can use the same one again.
    """
    alloca = re.compile(r"^  %(\d+) = (alloca \w+, i64 \d+(?:, align \d+)?)$", re.MULTILINE)

    def function(match: re.Match[str]) -> str:
        head, body = match.groups()
        # Numbers must ascend, so what moves up is named.
        names = {number for number, _ in alloca.findall(body)}
        buffers = "".join(f"  %buffer{number} = {what}\n" for number, what in alloca.findall(body))
        body = alloca.sub("", body)
        body = re.sub(
            r"%(\d+)\b",
            lambda use: f"%buffer{use.group(1)}" if use.group(1) in names else use.group(0),
            body,
        )
        return f"{head}{buffers}{body}"

    return re.sub(r"^(define [^\n]*\n)(.*?^\}$)", function, module, flags=re.MULTILINE | re.DOTALL)
