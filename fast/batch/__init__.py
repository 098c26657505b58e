"""Batch preparation in place: rows are slot numbers, everything else is arrays indexed by them."""

from servespec.fast.batch.inputs import AttentionInputs, GdnInputs, StepInputs
from servespec.fast.batch.persistent import InputBatch

__all__ = ["AttentionInputs", "GdnInputs", "InputBatch", "StepInputs"]
