"""Choosing tokens.

Source: ``Sampler`` of ``vllm/v1/sample/sampler.py``, ``apply_top_k_top_p_pytorch`` of
``vllm/v1/sample/ops/topk_topp_sampler.py`` and ``apply_top_k_top_p_triton`` beside it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["greedy", "inverse_transform", "sampling_probabilities", "top_k", "top_p"]

Bools = npt.NDArray[np.bool_]


def greedy(logits: npt.NDArray[np.floating]) -> tuple[int, ...]:
    """Index of the largest logit of every row; among equals the lowest index.

    The tie rule makes the choice a function of the logits alone, so that two implementations can
    be compared.

    Parameters
    ----------
    logits : numpy.ndarray
        ``[rows, vocab_size]``.

    Returns
    -------
    tuple of int
        One token a row.

    Raises
    ------
    ValueError
        If a logit is not a number: no token would be the right one.
    """
    broken = np.flatnonzero(np.isnan(logits).any(axis=-1))
    if broken.size:
        raise ValueError(f"logits of row {broken[0]} contain NaN")
    return tuple(int(token) for token in np.argmax(logits, axis=-1))


def top_k(logits: Array, k: int) -> Bools:
    """Tell which tokens are among the k likeliest.

    A logit stays if it is at least the k-th largest. So all that equal the k-th stay, and more
    than k may: which of equals to drop, the logits don't say.

    Parameters
    ----------
    logits : numpy.ndarray
        ``[vocab_size]``.
    k : int
        In ``[1, vocab_size]``; the latter keeps all.

    Returns
    -------
    numpy.ndarray
        ``[vocab_size]`` bool, read-only.
    """
    kept: Bools = logits >= np.partition(logits, -k)[-k]
    kept.flags.writeable = False
    return kept


def top_p(probabilities: Array, p: float) -> Bools:
    """Tell which tokens make up the nucleus: the fewest likeliest whose probabilities reach `p`.

    A token is dropped if it and what comes before it, in order of rising probability, sum to no
    more than ``1 - p``; the likeliest always stays. The nucleus may begin between equals and then
    holds those of the lowest indices: vLLM's torch path leaves the choice to an unstable sort,
    its Triton path counts from the lowest, and so a small `p` comes to the same as `greedy`. Sums
    from below lose no small probability to rounding, so ``p = 1`` drops exactly what can't be
    drawn.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751.

    Parameters
    ----------
    probabilities : numpy.ndarray
        ``[vocab_size]``, of sum 1.
    p : float
        In (0, 1].

    Returns
    -------
    numpy.ndarray
        ``[vocab_size]`` bool, read-only.
    """
    # Reversed, so that among equals the highest index comes first.
    rising = np.argsort(probabilities[::-1], kind="stable")
    rising = len(probabilities) - 1 - rising
    kept = np.zeros(len(probabilities), np.bool_)
    kept[rising] = np.cumsum(probabilities[rising]) > 1.0 - p
    kept[rising[-1]] = True
    kept.flags.writeable = False
    return kept


def sampling_probabilities(logits: Array, temperature: float, k: int, p: float) -> Array:
    """Return the probability with which each token is drawn.

    The logits are divided by the temperature; top-k keeps some of them; top-p takes its nucleus
    out of what top-k kept, by probabilities among these alone. The order matters: a nucleus of the
    whole vocabulary would be larger.

    Parameters
    ----------
    logits : numpy.ndarray
        ``[vocab_size]``, no NaN.
    temperature : float
        Positive; vLLM takes anything below 1e-5 for greedy.
    k : int
        As for `top_k`.
    p : float
        As for `top_p`.

    Returns
    -------
    numpy.ndarray
        ``[vocab_size]``, 0 for what was dropped.
    """
    scaled = logits / temperature
    weights = np.where(top_k(scaled, k), np.exp(scaled - scaled.max()), 0.0)
    weights = np.where(top_p(weights / weights.sum(), p), weights, 0.0)
    return frozen(weights / weights.sum())


def inverse_transform(probabilities: Array, uniform: float) -> int:
    """Draw a token with one random number.

    It is the first token, by index, at which the running sum exceeds `uniform`. vLLM draws by the
    largest quotient of probability and exponential noise, one random number a token; both draw a
    token as often as its probability says, and this one is a function that can be compared.

    Parameters
    ----------
    probabilities : numpy.ndarray
        ``[vocab_size]``, of sum 1.
    uniform : float
        In [0, 1).

    Returns
    -------
    int
    """
    running = np.cumsum(probabilities)
    # Rounding may leave the whole sum below the number: the last possible token is drawn then.
    last = np.flatnonzero(probabilities)[-1]
    return int(min(np.searchsorted(running, uniform, side="right"), last))
