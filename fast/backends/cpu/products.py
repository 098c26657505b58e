"""Matrix products as loops over registers.

A product is cut into blocks whose running sums fit the vector registers, and each block goes over
the summed dimension once. With a transposed right operand both operands are walked along memory,
and each result is one reduction of a vector. Sums may be reassociated, as in every reduction here.
"""

from __future__ import annotations

import re

from servespec.fast.backends.base import CompileError

__all__ = ["spell_out"]

_VALUE = r"%[\w#]+"
_MEMREF = r"memref<[^>]*?(?:strided<[^>]*>[^>]*)?>"
_PRODUCT = re.compile(
    rf"linalg\.matmul(_transpose_b)? (?:\{{[^}}]*\}} )?"
    rf"ins\(({_VALUE}), ({_VALUE}) : ({_MEMREF}), ({_MEMREF})\) outs\(({_VALUE}) : ({_MEMREF})\)"
)
_ROWS = 4
_COLUMNS = 64
_LANES = 16
_REGISTERS = 16


def spell_out(module: str) -> str:
    """Replace the matrix products of a module.

    Parameters
    ----------
    module : str
        MLIR text on buffers of known shape.

    Raises
    ------
    CompileError
        A product is of another kind.
    """
    count = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        transposed, left, right, left_type, right_type, out, out_type = match.groups()
        product = _Product(f"p{count}", (left, right, out), (left_type, right_type, out_type))
        return product.transposed() if transposed else product.plain()

    return _PRODUCT.sub(replace, module)


def _shape(memref: str) -> tuple[int, int, str]:
    match = re.match(r"memref<(\d+)x(\d+)x(\w+)", memref)
    if match is None:
        raise CompileError(f"a matrix product takes {memref}: must be a matrix of known shape")
    return int(match.group(1)), int(match.group(2)), match.group(3)


class _Product:
    def __init__(
        self, name: str, operands: tuple[str, str, str], types: tuple[str, str, str]
    ) -> None:
        self.name = name
        self.left, self.right, self.out = operands
        self.left_type, self.right_type, self.out_type = types
        self.rows, self.inner, self.left_element = _shape(self.left_type)
        _, _, self.right_element = _shape(self.right_type)
        _, self.columns, self.element = _shape(self.out_type)
        self.is_float = self.element.startswith(("f", "bf"))
        self.lines: list[str] = []

    def plain(self) -> str:
        """``out[rows, columns] += left[rows, inner] @ right[inner, columns]``."""
        width = min(self.columns, _COLUMNS)
        rows = self._block(max(1, _REGISTERS * _LANES // width))
        vector = f"vector<{width}x{self.element}>"
        places = self._rows_of_block(rows)
        self._loop("j", self.columns, width)
        for r, place in enumerate(places):
            self._add(f"%s{r} = vector.load {self.out}[{place}, %j] : {self.out_type}, {vector}")
        sums = ", ".join(f"%t{r} = %s{r}" for r in range(rows))
        kinds = ", ".join([vector] * rows)
        self._add(
            f"%sum:{rows} = scf.for %k = %zero to %inner step %one iter_args({sums})"
            f" -> ({kinds}) {{"
        )
        narrow = f"vector<{width}x{self.right_element}>"
        self._add(f"%b = vector.load {self.right}[%k, %j] : {self.right_type}, {narrow}")
        right = self._widen("%b", narrow, vector)
        for r, place in enumerate(places):
            self._add(f"%a{r} = memref.load {self.left}[{place}, %k] : {self.left_type}")
            left = self._widen(f"%a{r}", self.left_element, self.element)
            self._add(f"%v{r} = vector.broadcast {left} : {self.element} to {vector}")
            self._accumulate(f"%u{r}", f"%v{r}", right, f"%t{r}", vector)
        self._add(f"scf.yield {', '.join(f'%u{r}' for r in range(rows))} : {kinds}\n}}")
        for r, place in enumerate(places):
            self._add(f"vector.store %sum#{r}, {self.out}[{place}, %j] : {self.out_type}, {vector}")
        return self._finish(loops=2, constants={"inner": self.inner})

    def transposed(self) -> str:
        """``out[rows, columns] += left[rows, inner] @ right[columns, inner].T``."""
        rows = self._block(_ROWS)
        vector = f"vector<{self.inner}x{self.element}>"
        narrow_left = f"vector<{self.inner}x{self.left_element}>"
        narrow_right = f"vector<{self.inner}x{self.right_element}>"
        places = self._rows_of_block(rows)
        self._loop("j", self.columns, 1)
        self._add(f"%b = vector.load {self.right}[%j, %zero] : {self.right_type}, {narrow_right}")
        right = self._widen("%b", narrow_right, vector)
        for r, place in enumerate(places):
            self._add(
                f"%a{r} = vector.load {self.left}[{place}, %zero] : {self.left_type}, {narrow_left}"
            )
            left = self._widen(f"%a{r}", narrow_left, vector)
            suffix, flags = ("f", " fastmath<reassoc,contract>") if self.is_float else ("i", "")
            self._add(f"%m{r} = arith.mul{suffix} {left}, {right}{flags} : {vector}")
            self._add(f"%s{r} = memref.load {self.out}[{place}, %j] : {self.out_type}")
            self._add(
                f"%t{r} = vector.reduction <add>, %m{r}, %s{r}{flags} :"
                f" {vector} into {self.element}"
            )
            self._add(f"memref.store %t{r}, {self.out}[{place}, %j] : {self.out_type}")
        return self._finish(loops=2, constants={})

    def _block(self, limit: int) -> int:
        rows = min(limit, _ROWS)
        while self.rows % rows:
            rows -= 1
        return rows

    def _rows_of_block(self, rows: int) -> list[str]:
        """Open the loop over blocks of rows and name the rows of one."""
        self._loop("i", self.rows, rows)
        for r in range(1, rows):
            self._add(f"%o{r} = arith.constant {r} : index")
            self._add(f"%i{r} = arith.addi %i, %o{r} : index")
        return ["%i", *(f"%i{r}" for r in range(1, rows))]

    def _loop(self, variable: str, extent: int, step: int) -> None:
        self._add(f"%{variable}to = arith.constant {extent} : index")
        self._add(f"%{variable}by = arith.constant {step} : index")
        self._add(f"scf.for %{variable} = %zero to %{variable}to step %{variable}by {{")

    def _widen(self, value: str, narrow: str, wide: str) -> str:
        if narrow == wide:
            return value
        operation = "extf" if self.is_float else "extsi"
        self._add(f"{value}w = arith.{operation} {value} : {narrow} to {wide}")
        return f"{value}w"

    def _accumulate(self, name: str, left: str, right: str, total: str, vector: str) -> None:
        if self.is_float:
            self._add(f"{name} = vector.fma {left}, {right}, {total} : {vector}")
        else:
            self._add(f"{name}m = arith.muli {left}, {right} : {vector}")
            self._add(f"{name} = arith.addi {name}m, {total} : {vector}")

    def _add(self, line: str) -> None:
        self.lines.append(line)

    def _finish(self, loops: int, constants: dict[str, int]) -> str:
        head = [
            f"%{name} = arith.constant {value} : index"
            for name, value in {"zero": 0, "one": 1, **constants}.items()
        ]
        text = "\n".join([*head, *self.lines, *["}"] * loops])
        operands = {name.split("#")[0] for name in (self.left, self.right, self.out)}
        return re.sub(
            r"%(\w+)",
            lambda m: m.group(0) if m.group(0) in operands else f"%{self.name}{m.group(1)}",
            text,
        )
