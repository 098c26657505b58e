"""triton-ascend's front end, and the Ascend compiler's tools, without any Ascend software.

Source: ``AscendBackend`` of triton-ascend 3.2.0, whose stages these are up to the linalg dialect.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

from servespec.fast.backends.base import BackendError, CompileError

__all__ = ["Linalg", "is_a5", "to_linalg", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linalg:
    """A kernel in the linalg dialect.

    Attributes
    ----------
    module : str
        MLIR text.
    name : str
        Of its function.
    """

    module: str
    name: str


@cache
def tool(name: str) -> Path:
    """Return the path of a tool of the package ascendnpu-ir.

    Raises
    ------
    BackendError
        It is not installed.
    """
    found = util.find_spec("ascendnpuir")
    if found is None or not found.submodule_search_locations:
        raise BackendError("ascendnpu-ir is not installed: pip install 'servespec[cpu]'")
    path = Path(next(iter(found.submodule_search_locations)), "bin", name)
    if not path.is_file():
        raise BackendError(f"{path} is missing: ascendnpu-ir 1.2.0 has it")
    return path


def is_a5(target: str) -> bool:
    """Whether a chip is of the fifth generation, which has a compiler of its own."""
    return target.startswith(("Ascend950", "Ascend910_95"))


def to_linalg(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    target: str = "Ascend910B3",
) -> Linalg:
    """Run the front end.

    Parameters
    ----------
    kernel : triton.JITFunction
    signature : mapping of str to str
        Types of the parameters in order, for example ``*bf16`` or ``i32``.
    constants : mapping of str to object
        Values of the ``tl.constexpr`` parameters.
    target : str
        A chip.

    Returns
    -------
    Linalg

    Raises
    ------
    CompileError
    """
    import triton.backends.ascend.compiler as compiler
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    a5 = is_a5(target)
    backend = compiler.AscendBackend(GPUTarget("npu", target, 0))
    options = backend.parse_options(
        {
            "compile_on_910_95": a5,
            "multibuffer": not a5,
            "enable_auto_bind_sub_block": not a5,
            "enable_select_analysis": a5,
        }
    )
    source = ASTSource(fn=kernel, signature=dict(signature), constants=dict(constants))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        module = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        metadata = {"target": backend.target, **options.__dict__}
        module = compiler.make_ttir(module, metadata, options)
        linalg = compiler.ttir_to_linalg(module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or b"").decode(errors="replace")[:2000]
        raise CompileError(f"triton-adapter-opt: {reason}") from None
    except Exception as error:  # the front end raises whatever its stages raise
        reason = " ".join(str(error).split())[:2000]
        raise CompileError(f"front end: {type(error).__name__}: {reason}") from error
    text, metadata = compiler._parse_linalg_metadata(linalg, metadata)
    return Linalg(module=text, name=metadata["kernel_name"])
