"""A case: everything that decides one comparison, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from servespec.conformance.verdicts import Divergence, ExpectedStep
from servespec.conformance.workloads.kernels import KernelCase
from servespec.conformance.workloads.workload import Workload
from servespec.conformance.workloads.workload_attention import AttentionCase
from servespec.conformance.workloads.workload_plans import PlannedStep
from servespec.conformance.workloads.workload_v0 import V0Case
from servespec.reference.contracts import EngineConfig, ModelConfig, require

__all__ = ["SPEC_VERSION", "Case", "CaseFile", "Dtype", "TinyModel"]

SPEC_VERSION = "0.1"
"""Version of the specification; changes when the reference decides anything differently."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A model small enough to make from a seed.

    Attributes
    ----------
    config : ModelConfig
    seed : int
        Of the weights, see `servespec.reference.models.tiny.weights`.
    """

    config: ModelConfig
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, "TinyModel.seed", self.seed, "in [0, 2**32)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison.

    Attributes
    ----------
    suite : str
        Whose check runs it.
    config : EngineConfig
        A suite without a model uses its scheduler, cache and speculative parts.
    workload : Workload
    model : TinyModel or None
        None for a suite without a model.
    dtype : {"float32", "bfloat16"}
        What the implementation computes in; the reference always uses float64.
    plans : tuple of PlannedStep or None
        What suite ``batch`` is given in place of a workload, whose plans a scheduler makes.
    attention : AttentionCase or None
        What suite ``attention`` runs; its cases leave `config` and `workload` unused.
    v0 : V0Case or None
        What suite ``scheduling-v0`` runs; its cases leave `config` and `workload` unused.
    kernel : KernelCase or None
        What suite ``kernels`` runs; its cases leave `config` and `workload` unused.
    """

    suite: str
    config: EngineConfig
    workload: Workload
    model: TinyModel | None = None
    dtype: Dtype = "float32"
    plans: tuple[PlannedStep, ...] | None = None
    attention: AttentionCase | None = None
    v0: V0Case | None = None
    kernel: KernelCase | None = None

    @property
    def num_requests(self) -> int:
        """Requests of the workload."""
        if self.attention is not None:
            return sum(len(step.rows) for step in self.attention.steps)
        if self.plans is not None:
            return sum(len(step.output.scheduled_new_reqs) for step in self.plans)
        return len((self.workload if self.v0 is None else self.v0.workload).requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """A case and what was seen when it was written.

    Attributes
    ----------
    spec_version : str
        `SPEC_VERSION` of the writer.
    implementation : str
        What was checked, as given to ``--impl``.
    case : Case
    divergence : Divergence or None
    last_lines : tuple of str
        The end of the implementation's output, if it failed.
    expected : tuple of ExpectedStep
        The reference's steps, up to the divergence.
    """

    spec_version: str
    implementation: str
    case: Case
    divergence: Divergence | None = None
    last_lines: tuple[str, ...] = ()
    expected: tuple[ExpectedStep, ...] = ()
