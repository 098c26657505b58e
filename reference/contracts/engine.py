"""The record of one engine step: every layer of it, for a check to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from servespec.reference.contracts.batch import BatchRecord
from servespec.reference.contracts.request import EngineCoreOutput
from servespec.reference.contracts.scheduling import SchedulerOutput

__all__ = ["StepRecord"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """One step of an engine.

    Attributes
    ----------
    step : int
        Number of the step, from 0.
    scheduler_output : SchedulerOutput
        The plan.
    batch : BatchRecord or None
        The batch; None if nothing was scheduled.
    logits : numpy.ndarray or None
        ``[rows, vocab_size]`` in the row order of `batch`, if the engine keeps logits; float64
        from the reference, float32 from the fast path.
    sampled_token_ids : mapping of str to tuple of int
        Tokens sampled for each row whose token is kept.
    outputs : tuple of EngineCoreOutput
        What each request was given, in the order of `SchedulerOutput.num_scheduled_tokens`.
    """

    step: int
    scheduler_output: SchedulerOutput
    batch: BatchRecord | None
    logits: npt.NDArray[np.floating] | None = None
    sampled_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: tuple[EngineCoreOutput, ...] = ()
