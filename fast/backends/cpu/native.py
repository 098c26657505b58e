"""From LLVM IR to machine code in this process, kept on disk for the next one.

A cached file is the machine code behind a line of JSON with its length and digest. It is loaded
only from a folder that belongs to the user and that nobody else may write to, and only if the
digest is right; any other file is compiled again and replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

__all__ = ["Code", "cache_folder", "compile_ir", "host", "load", "read", "write"]

# Cephes' polynomial: within 2 units in the last place, and unlike a call it can be vectorised.
_EXP = """
define internal float @servespec.exp(float %x) alwaysinline {
  %high = fcmp ogt float %x, 8.900000e+01
  %a = select i1 %high, float 8.900000e+01, float %x
  %low = fcmp olt float %a, -1.040000e+02
  %b = select i1 %low, float -1.040000e+02, float %a
  %s = fmul float %b, 0x3FF7154760000000
  %n = call float @llvm.rint.f32(float %s)
  %m = fneg float %n
  %r0 = call float @llvm.fmuladd.f32(float %m, float 0x3FE6300000000000, float %b)
  %r = call float @llvm.fmuladd.f32(float %m, float 0xBF2BD01060000000, float %r0)
  %p0 = call float @llvm.fmuladd.f32(float %r, float 0x3F2A0D2CE0000000, float 0x3F56E879C0000000)
  %p1 = call float @llvm.fmuladd.f32(float %p0, float %r, float 0x3F81112100000000)
  %p2 = call float @llvm.fmuladd.f32(float %p1, float %r, float 0x3FA5553820000000)
  %p3 = call float @llvm.fmuladd.f32(float %p2, float %r, float 0x3FC5555540000000)
  %p4 = call float @llvm.fmuladd.f32(float %p3, float %r, float 0x3FE0000000000000)
  %r2 = fmul float %r, %r
  %p5 = call float @llvm.fmuladd.f32(float %p4, float %r2, float %r)
  %y = fadd float %p5, 1.000000e+00
  %i = call i32 @llvm.fptosi.sat.i32.f32(float %n)
  %i1 = ashr i32 %i, 1
  %i2 = sub i32 %i, %i1
  %e1 = add i32 %i1, 127
  %e2 = add i32 %i2, 127
  %b1 = shl i32 %e1, 23
  %b2 = shl i32 %e2, 23
  %f1 = bitcast i32 %b1 to float
  %f2 = bitcast i32 %b2 to float
  %y1 = fmul float %y, %f1
  %y2 = fmul float %y1, %f2
  ret float %y2
}
declare float @llvm.rint.f32(float)
declare float @llvm.fmuladd.f32(float, float, float)
declare i32 @llvm.fptosi.sat.i32.f32(float)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A compiled kernel.

    Attributes
    ----------
    object_file : bytes
    entry : str
        Name of its launch function.
    is_parallel : bool
        Whether program instances may run at the same time.
    """

    object_file: bytes
    entry: str
    is_parallel: bool


@cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )


@cache
def _engine() -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())


def host() -> str:
    """Return what machine code depends on: the compiler and the processor."""
    features = llvm.get_host_cpu_features().flatten()
    return f"llvmlite {llvmlite.__version__} {llvm.get_host_cpu_name()} {features}"


def compile_ir(module: str, entry: str, *, is_parallel: bool) -> Code:
    """Compile LLVM IR.

    Parameters
    ----------
    module : str
        With a function `entry`.
    entry : str
    is_parallel : bool
        As for `Code`.
    """
    if "@llvm.exp.f32" in module:
        module = re.sub(r"^declare float @llvm\.exp\.f32\(.*$", "", module, flags=re.MULTILINE)
        for line in filter(None, _EXP.split("\n")):
            if line.startswith("declare") and line.split("(")[0] in module:
                module = re.sub(
                    rf"^{re.escape(line.split('(')[0])}\(.*$", "", module, flags=re.MULTILINE
                )
        module = module.replace("@llvm.exp.f32", "@servespec.exp") + _EXP
    # Processors that would rather use half of their vectors do so for fear of a lower clock.
    module = re.sub(
        r"^(define [^{]*?) \{$", r'\1 "prefer-vector-width"="512" {', module, flags=re.MULTILINE
    )
    parsed = llvm.parse_assembly(module)
    parsed.verify()
    machine = _machine()
    parsed.triple = machine.triple
    parsed.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.slp_vectorization = True
    # Tiles have fixed sizes: unrolling them multiplies the code by ten and gains nothing.
    options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return Code(object_file=machine.emit_object(parsed), entry=entry, is_parallel=is_parallel)


def load(code: Code) -> int:
    """Return the address of a kernel's launch function."""
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code.object_file))
    engine.finalize_object()
    return int(engine.get_function_address(code.entry))


def cache_folder() -> Path | None:
    """Return the folder of cached code; None if there is none that can be trusted.

    ``SERVESPEC_CACHE`` names it, else it is ``servespec`` in the user's cache folder.
    """
    named = os.environ.get("SERVESPEC_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(named) if named else base / "servespec"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return None if shared or status.st_uid != os.getuid() else folder


def read(key: str) -> Code | None:
    """Return cached code, or None if there is none or it is damaged."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        head, _, body = (folder / f"{key}.kernel").read_bytes().partition(b"\n")
        fields = json.loads(head)
        digest, entry, is_parallel = fields["digest"], fields["entry"], fields["is_parallel"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if digest != _digest(body, entry, is_parallel):
        return None
    return Code(object_file=body, entry=entry, is_parallel=is_parallel)


def write(key: str, code: Code) -> None:
    """Keep code; where that is not possible the next process compiles it again."""
    folder = cache_folder()
    if folder is None:
        return
    head = json.dumps(
        {
            "entry": code.entry,
            "is_parallel": code.is_parallel,
            "digest": _digest(code.object_file, code.entry, code.is_parallel),
        }
    )
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(head.encode() + b"\n" + code.object_file)
        Path(file.name).replace(folder / f"{key}.kernel")


def _digest(body: bytes, entry: str, is_parallel: bool) -> str:
    return hashlib.sha256(f"{entry} {is_parallel} ".encode() + body).hexdigest()
