"""What an implementation makes and answers: whatever goes wrong in there is its own failure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast, get_origin

import msgspec
import numpy as np

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.compare import shown
from servespec.conformance.verdicts import attempt

__all__ = ["itself", "made", "require_answer", "require_known"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Foreign:
    """Calls on what a factory returned; each is an `attempt`, looking the method up included."""

    __slots__ = ("made", "what")

    def __init__(self, what: str, made: object) -> None:
        self.what = what
        self.made = made

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, name)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = attempt(getattr, self.made, name, None)
        if method is None:
            raise ImplementationFailed(f"the {self.what} has no {name!r}")
        if not callable(method):
            raise ImplementationFailed(
                f"{name!r} of the {self.what} is {shown(method)}: must be a method"
            )
        return attempt(method, *args, **kwargs)


def made(what: str, factory: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return what a factory of an implementation makes, to be used like the thing itself.

    Parameters
    ----------
    what : str
        What it is to make, as a person calls it.
    factory : callable
    *args, **kwargs
        Handed on.

    Returns
    -------
    object
        Whatever goes wrong in a method of it, or in looking for one, is `ImplementationFailed`.

    Raises
    ------
    ImplementationFailed
        If it raises or makes nothing.
    """
    thing = attempt(factory, *args, **kwargs)
    if thing is None:
        name = getattr(factory, "__name__", "the factory")
        raise ImplementationFailed(f"{name} returned None in place of the {what}")
    return cast("_T", _Foreign(what, thing))


def itself(thing: object) -> object:
    """Return what the factory returned, of something that `made` returned."""
    assert isinstance(thing, _Foreign)
    return thing.made


def require_answer(answer: object, kind: Any, field: str) -> None:
    """Refuse an answer whose fields have types that the contract does not know.

    What is compared with the reference's answer needs no such look: see `expect_equal`.

    Parameters
    ----------
    answer : object
    kind : type
        Of the contracts: a dataclass, or a tuple of such.
    field : str
        Name of the answer, for the error.

    Raises
    ------
    ImplementationFailed
    """
    origin = get_origin(kind) or kind
    if not isinstance(answer, (tuple, list) if origin is tuple else origin):
        name = getattr(kind, "__name__", str(kind))
        raise ImplementationFailed(f"{field} is {shown(answer)}: must be of type {name}")
    try:
        msgspec.convert(msgspec.to_builtins(answer, enc_hook=_plain), kind)
    except Exception as error:  # whatever foreign values do
        what, _, where = str(error).partition(" - at `$")
        raise ImplementationFailed(f"{field}{where.rstrip('`')} is no answer: {what}") from error


def require_known(names: Iterable[str], known: Container[str], field: str) -> None:
    """Refuse an answer that names a request which was never added.

    Parameters
    ----------
    names : iterable of str
    known : container of str
    field : str
        Name of the answer, for the error.

    Raises
    ------
    ImplementationFailed
    """
    for name in names:
        if name not in known:
            raise ImplementationFailed(f"{field} names {shown(name)}: no such request")


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{shown(value)} is of type {type(value).__name__}")
