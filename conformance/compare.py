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
from typing import Any

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.verdicts import DivergedError, Divergence
from servespec.reference.contracts import BatchRecord, SchedulerOutput

__all__ = ["Difference", "expect_equal", "first_difference", "plainly_equal", "shown"]

_ORDERED = frozenset({"num_scheduled_tokens"})
"""Mappings whose order is a decision: rows reach the worker in it."""

_ROW_FIELDS = frozenset(
    {
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
_REPR.maxlong = 120
_REPR.maxtuple = _REPR.maxlist = _REPR.maxset = _REPR.maxfrozenset = _REPR.maxdict = 12


class _UnknownTypeError(TypeError):
    """The reference gave something that no comparison is defined for."""


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
        The request that the place belongs to: a mapping's key, or whose row or entry it is.
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
    if isinstance(expected, Enum | bool):
        _require_type(got, type(expected), path)
        return None if expected == got else Difference(path, _text(expected), _text(got))
    if isinstance(expected, str):
        _require_type(got, str, path)
        assert isinstance(got, str)
        return None if expected == got else Difference(path, *_texts(expected, got))
    if isinstance(expected, numbers.Real):
        kind = numbers.Integral if isinstance(expected, int) else numbers.Real
        _require_type(got, kind, path)
        return None if expected == got else Difference(path, shown(expected), shown(got))
    if dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        _require_type(got, type(expected), path)
        for name in _fields(type(expected)):
            a, b = getattr(expected, name), getattr(got, name)
            if (found := first_difference(a, b, (*path, name))) is not None:
                request = found.request or _owner(expected, name, found.path[len(path) + 1 :])
                return dataclasses.replace(found, request=request)
        return None
    if isinstance(expected, Mapping):
        return _mapping_difference(expected, got, path)
    if isinstance(expected, Set):
        _require_type(got, Set, path)
        assert isinstance(got, Set)
        return None if expected == got else _set_difference(expected, got, path)
    if isinstance(expected, Sequence):
        return _sequence_difference(expected, got, path)
    raise _UnknownTypeError(f"cannot compare a {type(expected).__name__}")


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
    return first_difference([*expected], [*got], (*path, "order")) if ordered else None


def _sequence_difference(
    expected: Sequence[object], got: object, path: tuple[str | int, ...]
) -> Difference | None:
    _require_type(got, (tuple, list), path)
    assert isinstance(got, tuple | list)
    if plainly_equal(expected, got):
        return None
    found = None
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if (found := first_difference(a, b, (*path, index))) is not None:
            break
    if len(expected) == len(got):
        return found
    end = min(len(expected), len(got))
    first, other = (shown(x[end]) if len(x) > end else "nothing" for x in (expected, got))
    found = found or Difference((*path, end), first, other, _named(expected[end:]))
    if len(found.path) > len(path) + 1:
        return found
    return dataclasses.replace(
        found,
        expected=f"{found.expected} (length {len(expected)})",
        got=f"{found.got} (length {len(got)})",
    )


def _set_difference(
    expected: Set[object], got: Set[object], path: tuple[str | int, ...]
) -> Difference:
    missing, extra = _listed(expected - got), _listed(got - expected)
    ours = [f"with {missing}"] * bool(missing) + [f"without {extra}"] * bool(extra)
    theirs = [f"without {missing}"] * bool(missing) + [f"with {extra}"] * bool(extra)
    return Difference(
        path,
        f"{' and '.join(ours)} ({len(expected)} in all)",
        f"{' and '.join(theirs)} ({len(got)} in all)",
    )


def plainly_equal(expected: object, got: object) -> bool:
    """Whether Python calls two values equal: much faster than looking at every element.

    Parameters
    ----------
    expected, got : object
    """
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


def _texts(expected: str, got: str) -> tuple[str, str]:
    """Return texts for two strings that differ, cut to where they do if they are long."""
    if shown(expected) != shown(got):
        return shown(expected), shown(got)
    pairs = enumerate(zip(expected, got, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(expected), len(got)))
    first, other = (f"{text[at : at + 40]!r} from character {at}" for text in (expected, got))
    return first, other


def _listed(values: Set[object]) -> str:
    """Return the members of a set in order, "" if there are none."""
    if not values:
        return ""
    numbered = all(isinstance(value, numbers.Real) for value in values)
    ordered: list[Any] = sorted(values, key=None if numbered else shown)
    left = len(ordered) - _REPR.maxset
    texts = [*map(shown, ordered[: _REPR.maxset]), *([f"{left} more"] if left > 0 else [])]
    return "{" + ", ".join(texts) + "}"


def expect_equal(
    expected: object,
    got: object,
    field: str,
    *,
    step: int | None = None,
    batch: BatchRecord | None = None,
    optional: bool = False,
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
    optional : bool
        Whether None is an answer too.

    Raises
    ------
    DivergedError
    ImplementationFailed
        If `got` is rubbish; see `first_difference`.
    """
    if got is None and not optional:
        _require_type(got, type(expected), (field,))
    try:
        found = first_difference(expected, got, (field,) if field else ())
    except (ImplementationFailed, _UnknownTypeError):
        raise
    except Exception as error:  # whatever a foreign value does when it is looked at
        raise ImplementationFailed(
            f"comparing {field} raised {type(error).__name__}: {error}"
        ) from error
    if found is not None:
        raise DivergedError(
            Divergence(
                field=found.field,
                expected=found.expected,
                got=found.got,
                step=step,
                request=found.request or _row_of(found.path, batch),
            )
        )


def _named(values: Sequence[object]) -> str | None:
    """Return the request that the first value is about, if it says so."""
    name = getattr(values[0], "req_id", getattr(values[0], "request_id", None)) if values else None
    return name if isinstance(name, str) else None


def _owner(record: object, name: str, below: tuple[str | int, ...]) -> str | None:
    """Return the request of a place below field `name` of the reference's record."""
    rows = getattr(record, "req_ids", ())
    if name in _ROW_FIELDS and below and isinstance(below[0], int) and below[0] < len(rows):
        return str(rows[below[0]])
    return _named([record])


def _row_of(path: tuple[str | int, ...], batch: BatchRecord | None) -> str | None:
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
