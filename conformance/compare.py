"""Exact comparison of records, and the first place where they differ."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import reprlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import cache

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.verdicts import DivergedError, Divergence
from servespec.reference.contracts import BatchRecord, SchedulerOutput

__all__ = ["Difference", "expect_equal", "first_difference", "shown"]

_ORDERED = frozenset({"num_scheduled_tokens"})
"""Mappings whose order is a decision: rows reach the worker in it."""

_ROW_FIELDS = frozenset(
    {
        "req_ids",
        "num_scheduled_tokens",
        "num_computed_tokens",
        "seq_lens",
        "block_tables",
        "logits_indices",
        "sampled",
        "new_block_ids",
        "num_output_tokens",
    }
)
_TOKEN_FIELDS = frozenset({"token_ids", "positions", "slot_mapping"})

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxtuple = _REPR.maxlist = _REPR.maxset = _REPR.maxfrozenset = _REPR.maxdict = 12


def shown(value: object) -> str:
    """Return a short text for a value, even for one whose ``repr`` raises."""
    return _REPR.repr(value)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two records differ first.

    Attributes
    ----------
    path : tuple of str and int
        Field names, mapping keys (as ``"['key']"``) and indices.
    expected, got : str
    request : str or None
        The mapping key or row on the path.
    """

    path: tuple[str | int, ...]
    expected: str
    got: str
    request: str | None = None

    @property
    def field(self) -> str:
        """The path as a person writes it."""
        parts = [
            f"[{part}]" if isinstance(part, int) else part if part[0] == "[" else f".{part}"
            for part in self.path
        ]
        return "".join(parts).removeprefix(".")


def first_difference(
    expected: object, got: object, path: tuple[str | int, ...] = ()
) -> Difference | None:
    """Return the first place where `got` differs from `expected`, or None.

    Lists pass for tuples and NumPy scalars for numbers, since JSON and arrays know no better;
    anything else of another type is rubbish rather than a difference.

    Parameters
    ----------
    expected : object
        Dataclasses, enums, numbers, strings, tuples, mappings, sets and None, nested.
    got : object
    path : tuple of str and int
        Prefix of the path in the answer.

    Raises
    ------
    ImplementationFailed
        If a value of `got` has a type that its field cannot have.
    """
    if expected is None or got is None:
        return None if expected is got else Difference(path, shown(expected), shown(got))
    if isinstance(expected, Enum | bool | str):
        _require_type(got, type(expected), path)
        return None if expected == got else Difference(path, _text(expected), _text(got))
    if isinstance(expected, numbers.Real):
        kind = numbers.Integral if isinstance(expected, int) else numbers.Real
        _require_type(got, kind, path)
        return None if expected == got else Difference(path, shown(expected), shown(got))
    if dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        _require_type(got, type(expected), path)
        for name in _fields(type(expected)):
            a, b = getattr(expected, name), getattr(got, name)
            if (found := first_difference(a, b, (*path, name))) is not None:
                return found
        return None
    if isinstance(expected, Mapping):
        return _mapping_difference(expected, got, path)
    if isinstance(expected, Set):
        _require_type(got, Set, path)
        assert isinstance(got, Set)
        return None if expected == got else Difference(path, _listed(expected), _listed(got))
    if isinstance(expected, Sequence):
        return _sequence_difference(expected, got, path)
    raise TypeError(f"cannot compare a {type(expected).__name__}")


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return a dataclass's fields, causes before what follows from them."""
    names = [entry.name for entry in dataclasses.fields(kind)]
    if kind is SchedulerOutput:
        # Blocks follow from how many tokens they are for.
        names.sort(key=lambda name: name != "num_scheduled_tokens")
    return tuple(names)


def _mapping_difference(
    expected: Mapping[object, object], got: object, path: tuple[str | int, ...]
) -> Difference | None:
    _require_type(got, Mapping, path)
    assert isinstance(got, Mapping)
    ordered = bool(path) and path[-1] in _ORDERED
    for key, value in expected.items():
        here = (*path, f"[{key!r}]")
        request = key if isinstance(key, str) else None
        if key not in got:
            return Difference(here, shown(value), "no entry", request)
        if (found := first_difference(value, got[key], here)) is not None:
            return dataclasses.replace(found, request=found.request or request)
    for key in got:
        if key not in expected:
            request = key if isinstance(key, str) else None
            return Difference((*path, f"[{key!r}]"), "no entry", shown(got[key]), request)
    if ordered and list(expected) != list(got):
        return Difference((*path, "order"), shown(list(expected)), shown(list(got)))
    return None


def _sequence_difference(
    expected: Sequence[object], got: object, path: tuple[str | int, ...]
) -> Difference | None:
    _require_type(got, (tuple, list), path)
    assert isinstance(got, tuple | list)
    if _plainly_equal(expected, got):
        return None
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if (found := first_difference(a, b, (*path, index))) is not None:
            return found
    if len(expected) != len(got):
        return Difference(path, shown(tuple(expected)), shown(tuple(got)))
    return None


def _plainly_equal(expected: Sequence[object], got: object) -> bool:
    """Whether Python calls two sequences equal: much faster than looking at every element."""
    try:
        return type(expected) is type(got) and bool(expected == got)
    except Exception:  # an array, or whatever a foreign type does
        return False


def _require_type(got: object, kind: type | tuple[type, ...], path: tuple[str | int, ...]) -> None:
    if not isinstance(got, kind) or (isinstance(got, bool) and kind is numbers.Integral):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        where = Difference(path, "", "").field or "the record"
        raise ImplementationFailed(f"{where} is {shown(got)}: must be of type {wanted}")


def _text(value: object) -> str:
    return value.name if isinstance(value, Enum) else shown(value)


def _listed(values: Set[object]) -> str:
    return "{" + ", ".join(sorted(map(shown, values))) + "}"


def expect_equal(
    expected: object,
    got: object,
    field: str,
    *,
    step: int | None = None,
    batch: BatchRecord | None = None,
) -> None:
    """Compare exactly.

    Parameters
    ----------
    expected, got : object
        As for `first_difference`.
    field : str
        Name of what is compared: the head of the path in the divergence.
    step : int or None
    batch : BatchRecord or None
        The reference's batch: tells which request a row or a token belongs to.

    Raises
    ------
    DivergedError
    ImplementationFailed
    """
    found = first_difference(expected, got, (field,) if field else ())
    if found is not None:
        raise DivergedError(
            Divergence(
                field=found.field,
                expected=found.expected,
                got=found.got,
                step=step,
                request=found.request or _owner(found.path, batch),
            )
        )


def _owner(path: tuple[str | int, ...], batch: BatchRecord | None) -> str | None:
    """Return the request of the first row or token subscript on a path."""
    if batch is None:
        return None
    for name, index in itertools.pairwise(path):
        if not isinstance(index, int):
            continue
        row = index
        if name in _TOKEN_FIELDS:
            row = sum(start <= index for start in batch.query_start_loc[1:])
        elif name not in _ROW_FIELDS:
            continue
        return batch.req_ids[row] if row < len(batch.req_ids) else None
    return None
