"""Bodies of the functions that triton-ascend's front end leaves to the device's library.

The front end writes scans, gathers, sorts and flips as calls of private functions. Here they get
plain loops, written in the dialects that the rest of the pipeline lowers.
"""

from __future__ import annotations

import re

from servespec.fast.backends.base import CompileError

__all__ = ["add_bodies"]

_DECLARATION = re.compile(
    r"^  func\.func private @(triton_\w+)\(([^)]*)\)(?: -> ([^\n]*?))?(?: attributes \{.*\})?$",
    re.MULTILINE,
)
_TENSOR = re.compile(r"tensor<((?:\d+x)+)(\w+)>")


def add_bodies(module: str) -> str:
    """Give every declared library function a body.

    Parameters
    ----------
    module : str
        MLIR text.

    Returns
    -------
    str

    Raises
    ------
    CompileError
        A function is unknown.
    """
    for declaration in list(_DECLARATION.finditer(module)):
        name, arguments, result = declaration.groups()
        types = [part.strip() for part in re.split(r",(?![^<]*>)", arguments)]
        call = re.search(rf"call @{name}\(([^)]*)\)", module)
        operands = [] if call is None else [part.strip() for part in call.group(1).split(",")]
        body = _body(name, types, result, operands, module)
        module = module.replace(declaration.group(0), body)
    return module


def _body(name: str, types: list[str], result: str | None, operands: list[str], module: str) -> str:
    if name.startswith("triton_cumsum"):
        return _cumulative(name, types[0], "add", _constant(operands[1], module))
    if name.startswith("triton_cumprod"):
        return _cumulative(name, types[0], "mul", _constant(operands[1], module))
    if name.startswith("triton_gather") and result is not None:
        return _gather(name, types, result, _constant(operands[2], module))
    if name.startswith("triton_sort"):
        return _sort(name, types[0])
    if name.startswith("triton_flip"):
        return _flip(name, types[0], _constant(operands[1], module))
    if name.startswith(("triton_print", "triton_assert")):
        parameters = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(types))
        return f"  func.func private @{name}({parameters}) {{\n    return\n  }}"
    raise CompileError(f"the front end calls {name}{types}, which has no body on a CPU")


def _constant(name: str, module: str) -> int:
    found = re.search(rf"{re.escape(name)} = arith\.constant (\S+)", module)
    if found is None:
        raise CompileError(f"a library function is called with {name}, which is no constant")
    return int(found.group(1))


def _shape(tensor: str) -> tuple[list[int], str]:
    match = _TENSOR.match(tensor)
    if match is None:
        raise CompileError(f"a library function takes {tensor}: must be a tensor of known shape")
    return [int(extent) for extent in match.group(1)[:-1].split("x")], match.group(2)


def _is_float(element: str) -> bool:
    return element.startswith(("f", "bf"))


def _loops(order: list[tuple[str, int]], start: str, tensor: str, body: list[str]) -> list[str]:
    """Nest loops that carry a tensor; `body` reads ``%carried`` and yields ``%next``."""
    lines, carried = [], start
    for depth, (variable, extent) in enumerate(order):
        lines.append(
            f"%r{depth} = scf.for %{variable} = %c0 to %c{extent} step %c1"
            f" iter_args(%t{depth} = {carried}) -> ({tensor}) {{"
        )
        carried = f"%t{depth}"
    lines += [line.replace("%carried", carried) for line in body]
    result = "%next"
    for depth in reversed(range(len(order))):
        lines += [f"scf.yield {result} : {tensor}", "}"]
        result = f"%r{depth}"
    return lines


def _function(
    name: str, parameters: str, result: str, constants: set[int], lines: list[str], value: str
) -> str:
    head = [f"%c{v} = arith.constant {v} : index" for v in sorted(constants | {0, 1})]
    body = "\n    ".join([*head, *lines, f"return {value} : {result}"])
    return f"  func.func private @{name}({parameters}) -> {result} {{\n    {body}\n  }}"


def _cumulative(name: str, tensor: str, operation: str, axis: int) -> str:
    extents, element = _shape(tensor)
    rank = len(extents)
    axis %= rank
    combine = f"arith.{operation}{'f' if _is_float(element) else 'i'}"
    index = [f"%i{d}" for d in range(rank)]
    place = ", ".join("%p" if d == axis else i for d, i in enumerate(index))
    previous = ", ".join("%q" if d == axis else i for d, i in enumerate(index))
    order = [d for d in range(rank) if d != axis] + [axis]
    body = [
        f"%last = arith.subi %c{extents[axis]}, %c1 : index",
        f"%mirror = arith.subi %last, %i{axis} : index",
        f"%p = arith.select %reverse, %mirror, %i{axis} : index",
        "%below = arith.subi %p, %c1 : index",
        "%above = arith.addi %p, %c1 : index",
        "%q = arith.select %reverse, %above, %below : index",
        f"%x = tensor.extract %a[{place}] : {tensor}",
        f"%first = arith.cmpi eq, %i{axis}, %c0 : index",
        f"%y = scf.if %first -> ({element}) {{",
        f"  scf.yield %x : {element}",
        "} else {",
        f"  %before = tensor.extract %carried[{previous}] : {tensor}",
        f"  %sum = {combine} %before, %x : {element}",
        f"  scf.yield %sum : {element}",
        "}",
        f"%next = tensor.insert %y into %carried[{place}] : {tensor}",
    ]
    lines = [f"%e = tensor.empty() : {tensor}"]
    lines += _loops([(f"i{d}", extents[d]) for d in order], "%e", tensor, body)
    parameters = f"%a: {tensor}, %axis: i32, %reverse: i1"
    return _function(name, parameters, tensor, set(extents), lines, "%r0")


def _gather(name: str, types: list[str], result: str, axis: int) -> str:
    extents, _ = _shape(result)
    _, index_type = _shape(types[1])
    rank = len(extents)
    place = ", ".join(f"%i{d}" for d in range(rank))
    source = ", ".join("%j" if d == axis % rank else f"%i{d}" for d in range(rank))
    body = [
        f"%g = tensor.extract %ix[{place}] : {types[1]}",
        f"%j = arith.index_cast %g : {index_type} to index",
        f"%v = tensor.extract %a[{source}] : {types[0]}",
        f"%next = tensor.insert %v into %carried[{place}] : {result}",
    ]
    lines = [f"%e = tensor.empty() : {result}"]
    lines += _loops([(f"i{d}", extents[d]) for d in range(rank)], "%e", result, body)
    parameters = f"%a: {types[0]}, %ix: {types[1]}, %axis: i32"
    return _function(name, parameters, result, set(extents), lines, "%r0")


def _flip(name: str, tensor: str, axis: int) -> str:
    extents, _ = _shape(tensor)
    rank = len(extents)
    axis %= rank
    place = ", ".join(f"%i{d}" for d in range(rank))
    source = ", ".join("%j" if d == axis else f"%i{d}" for d in range(rank))
    body = [
        f"%last = arith.subi %c{extents[axis]}, %c1 : index",
        f"%j = arith.subi %last, %i{axis} : index",
        f"%v = tensor.extract %a[{source}] : {tensor}",
        f"%next = tensor.insert %v into %carried[{place}] : {tensor}",
    ]
    lines = [f"%e = tensor.empty() : {tensor}"]
    lines += _loops([(f"i{d}", extents[d]) for d in range(rank)], "%e", tensor, body)
    return _function(name, f"%a: {tensor}, %axis: i64", tensor, set(extents), lines, "%r0")


def _sort(name: str, tensor: str) -> str:
    """Bubble sort along the last axis: it is stable and its tensors are small."""
    extents, element = _shape(tensor)
    lead = "".join(f"%i{d}, " for d in range(len(extents) - 1))
    count = extents[-1]
    greater = "arith.cmpf ogt" if _is_float(element) else "arith.cmpi sgt"
    body = [
        "%j1 = arith.addi %j, %c1 : index",
        f"%x = tensor.extract %carried[{lead}%j] : {tensor}",
        f"%y = tensor.extract %carried[{lead}%j1] : {tensor}",
        f"%above = {greater}, %x, %y : {element}",
        f"%below = {greater}, %y, %x : {element}",
        "%swap = arith.select %descending, %below, %above : i1",
        f"%low = arith.select %swap, %y, %x : {element}",
        f"%high = arith.select %swap, %x, %y : {element}",
        f"%half = tensor.insert %low into %carried[{lead}%j] : {tensor}",
        f"%next = tensor.insert %high into %half[{lead}%j1] : {tensor}",
    ]
    order = [(f"i{d}", extent) for d, extent in enumerate(extents[:-1])]
    order += [("pass", count), ("j", count - 1)]
    lines = _loops(order, "%a", tensor, body)
    parameters = f"%a: {tensor}, %axis: i64, %descending: i1"
    return _function(name, parameters, tensor, {*extents, count - 1}, lines, "%r0")
