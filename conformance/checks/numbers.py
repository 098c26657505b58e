"""Comparing logits and tokens, with the bounds of `servespec.conformance.checks.bounds`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.cases.case import Dtype
from servespec.conformance.checks.bounds import logits_bound, token_margin_bound
from servespec.conformance.compare import shown
from servespec.conformance.verdicts import DivergedError, Divergence, Tally
from servespec.reference.contracts import ModelConfig

__all__ = ["compare_logits", "compare_token", "float_array"]


def float_array(value: object, shape: tuple[int, ...], field: str) -> npt.NDArray[np.float64]:
    """Return an implementation's array in float64.

    Parameters
    ----------
    value : object
    shape : tuple of int
        What it must have.
    field : str
        Name of it, for the error.

    Raises
    ------
    ImplementationFailed
        If it is no array of real numbers or has another shape.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
        raise ImplementationFailed(f"{field} is {shown(value)}: must be an array of real numbers")
    if value.shape != shape:
        raise ImplementationFailed(f"{field} has shape {value.shape}: must be {shape}")
    return value.astype(np.float64)


def compare_logits(
    expected: npt.NDArray[np.floating],
    got: npt.NDArray[np.float64],
    model: ModelConfig,
    dtype: Dtype,
    *,
    num_keys: int,
    step: int,
    request: str,
) -> None:
    """Compare one row of logits.

    Parameters
    ----------
    expected, got : numpy.ndarray
        ``[vocab_size]``.
    model : ModelConfig
    dtype : {"float32", "bfloat16"}
    num_keys : int
        Length of the sequence that the row ends.
    step : int
    request : str

    Raises
    ------
    DivergedError
        Naming the logit with the greatest error.
    """
    bound = logits_bound(expected, model, dtype, num_keys)
    errors = np.where(np.isfinite(got), np.abs(got - expected), np.inf)
    worst = int(np.argmax(errors))
    if errors[worst] > bound:
        raise DivergedError(
            Divergence(
                field=f"logits[{worst}]",
                expected=f"{expected[worst]:.6g} +- {bound:.2g}",
                got=f"{got[worst]:.6g}",
                step=step,
                request=request,
            )
        )


def compare_token(
    expected: int,
    got: object,
    logits: npt.NDArray[np.floating] | None,
    model: ModelConfig,
    dtype: Dtype,
    tally: Tally,
    *,
    num_keys: int,
    step: int | None,
    request: str,
    field: str | None = None,
) -> bool:
    """Compare one sampled token, and count it.

    Parameters
    ----------
    expected : int
    got : object
    logits : numpy.ndarray or None
        ``[vocab_size]``, the reference's row; None allows no tie.
    model : ModelConfig
    dtype : {"float32", "bfloat16"}
    tally : Tally
    num_keys : int
        Length of the sequence that the row ends.
    step : int or None
    request : str
    field : str, optional
        Name in the divergence, if other than ``sampled_token_ids``.

    Returns
    -------
    bool
        True if the tokens are equal, False for a tie.

    Raises
    ------
    DivergedError
    ImplementationFailed
        If `got` is no token.
    """
    if not isinstance(got, int | np.integer) or isinstance(got, bool):
        raise ImplementationFailed(f"a token of request {request} is {shown(got)}: must be an int")
    if not 0 <= got < model.vocab_size:
        raise ImplementationFailed(
            f"a token of request {request} is {shown(got)}:"
            f" must be in [0, vocab_size = {model.vocab_size})"
        )
    tally.tokens += 1
    if got == expected:
        return True
    margin = bound = None
    if logits is not None:
        margin = float(logits[expected] - logits[got])
        bound = token_margin_bound(logits, model, dtype, num_keys)
        if margin <= bound:
            tally.ties += 1
            return False
    note = "" if margin is None else f" (margin {margin:.2g}, a tie up to {bound:.2g})"
    raise DivergedError(
        Divergence(
            field=field or f"sampled_token_ids[{request!r}]",
            expected=f"{expected}{note}",
            got=f"{got}",
            step=step,
            request=request,
        )
    )


def single_token(tokens: object, request: str) -> object:
    """Return the only token of a sequence an implementation gave.

    Raises
    ------
    ImplementationFailed
        If it is no sequence of one.
    """
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or len(tokens) != 1:
        raise ImplementationFailed(
            f"sampled_token_ids of request {request} is {shown(tokens)}: must be one token"
        )
    return tokens[0]
