"""Random cases for the legacy V0 scheduler: small pools, tight budgets, forks, swaps, aborts.

A case is a `V0Combination` of switches and a seed that a plain generator expands, so that any two
integers give a case: ``make_v0_case(v0_matrix()[i], seed)`` needs no Hypothesis.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st

from servespec.conformance.workloads.workload_v0 import START, V0Case, V0Step, V0Workload
from servespec.reference.contracts import SamplingParams
from servespec.reference.contracts.v0 import (
    PreemptionMode,
    SequenceGroupRequest,
    V0CacheConfig,
    V0SchedulerConfig,
)

__all__ = ["V0Combination", "make_v0_case", "v0_cases", "v0_matrix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class V0Combination:
    """The switches whose every combination is checked.

    Attributes
    ----------
    enable_chunked_prefill : bool
        The chunked policy instead of the default one.
    preemption_mode : {"swap", "recompute"} or None
    widest : int
        Largest `SequenceGroupRequest.best_of`.
    use_v2_block_manager : bool
    """

    enable_chunked_prefill: bool = False
    preemption_mode: PreemptionMode | None = None
    widest: int = 1
    use_v2_block_manager: bool = False

    def __str__(self) -> str:
        return ", ".join(
            (
                "chunked" if self.enable_chunked_prefill else "default",
                self.preemption_mode or "either preemption",
                f"best of {self.widest}",
                f"block manager {2 if self.use_v2_block_manager else 1}",
            )
        )


@cache
def v0_matrix() -> tuple[V0Combination, ...]:
    """Return every combination, 36 of them."""
    return tuple(
        V0Combination(
            enable_chunked_prefill=chunked,
            preemption_mode=mode,
            widest=widest,
            use_v2_block_manager=newer,
        )
        for newer, widest, mode, chunked in itertools.product(
            (False, True), (1, 2, 3), _MODES, (False, True)
        )
    )


_MODES: tuple[PreemptionMode | None, ...] = (None, "swap", "recompute")


@st.composite
def v0_cases(draw: st.DrawFn, chunk_alignment: int = 1) -> V0Case:
    """Return cases of every combination.

    Parameters
    ----------
    chunk_alignment : int
        Of the scheduler; vLLM 0.5.1 knows only 1.
    """
    combination = v0_matrix()[draw(st.integers(0, len(v0_matrix()) - 1))]
    return make_v0_case(combination, draw(st.integers(0, 2**32 - 1)), chunk_alignment)


def make_v0_case(combination: V0Combination, seed: int, chunk_alignment: int = 1) -> V0Case:
    """Expand a combination and a seed.

    Parameters
    ----------
    combination : V0Combination
    seed : int
        Decides all else; equal arguments give equal cases on every machine.
    chunk_alignment : int
        Of the scheduler.
    """
    rng = random.Random(f"{combination} {seed}")
    block_size = rng.choice((1, 2, 3, 4, 4, 4, 8))
    max_model_len = rng.choice((rng.randint(4, 24), rng.randint(24, 64)))
    scheduler = _scheduler_config(combination, max_model_len, chunk_alignment, rng)
    longest = -(-max_model_len // block_size)
    most = rng.choice((longest + 1, 2 * longest + 2, 3 * longest + 6))
    cache_config = V0CacheConfig(
        num_gpu_blocks=rng.randint(max(1, most // 3), most),
        num_cpu_blocks=rng.choice((longest, 3 * longest, 200, 200, 200)),
        block_size=block_size,
        watermark=rng.choice((0.0, 0.01, 0.01, 0.1, 0.25)),
    )
    workload = _workload(combination, scheduler, rng)
    return V0Case(scheduler=scheduler, cache=cache_config, workload=workload)


def _scheduler_config(
    combination: V0Combination, max_model_len: int, chunk_alignment: int, rng: random.Random
) -> V0SchedulerConfig:
    max_num_seqs = rng.choice((rng.randint(1, 4), rng.randint(3, 12)))
    budget = rng.choice((rng.randint(1, 16), rng.randint(8, 80)))
    if not combination.enable_chunked_prefill:
        budget = max(budget, max_model_len)
    lookahead = rng.choice((0, 0, 1, 3, 9)) if combination.use_v2_block_manager else 0
    return V0SchedulerConfig(
        max_num_batched_tokens=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_chunked_prefill=combination.enable_chunked_prefill,
        preemption_mode=combination.preemption_mode,
        delay_factor=rng.choice((0.0, 0.0, 0.0, 0.5, 2.0)),
        use_v2_block_manager=combination.use_v2_block_manager,
        num_lookahead_slots=lookahead,
        chunk_alignment=chunk_alignment,
    )


def _workload(
    combination: V0Combination, scheduler: V0SchedulerConfig, rng: random.Random
) -> V0Workload:
    # Siblings that end at different times shrink a group until it is recomputed instead of swapped,
    # at which V0 gives up if an older sibling lives. Forks where only recomputation is allowed
    # end a run as well, so neither happens in every case.
    widest = combination.widest if rng.random() < 0.8 else 1
    style = rng.choice(("plain", "plain", "stops", "thinning" if widest > 1 else "stops"))
    steps: list[V0Step] = []
    clock = START
    names: list[str] = []
    for _ in range(rng.randint(1, 16)):
        elapsed = rng.choice((0.0, 0.5, 1.0, 1.0, 4.0))
        clock += elapsed
        add = []
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            names.append(f"r{len(names)}")
            add.append(_request(names[-1], clock, scheduler, widest, style, rng))
        abort = rng.sample(names, min(len(names), 2)) if rng.random() < 0.06 else []
        steps.append(V0Step(elapsed=elapsed, add=tuple(add), abort=tuple(abort)))
    return V0Workload(steps=tuple(steps), token_seed=rng.randrange(2**32), num_token_ids=30)


def _request(
    name: str,
    clock: float,
    scheduler: V0SchedulerConfig,
    widest: int,
    style: str,
    rng: random.Random,
) -> SequenceGroupRequest:
    most = scheduler.max_model_len
    length = rng.choice((rng.randint(1, 8), rng.randint(1, most)))
    if rng.random() < 0.05:
        length = most + rng.randint(0, 8)
    best_of = rng.randint(1, widest)
    max_tokens = rng.randint(1, 24)
    min_tokens = 0
    beams = rng.random() < 0.3
    if style == "thinning":
        length, best_of, max_tokens, beams = rng.randint(1, 8), widest, 48, False
    elif style == "stops":
        min_tokens = rng.choice((0, rng.randint(0, max_tokens)))
    return SequenceGroupRequest(
        request_id=name,
        prompt_token_ids=tuple(rng.randrange(30) for _ in range(length)),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            eos_token_id=3 if style != "plain" and rng.random() < 0.5 else None,
            stop_token_ids=(5, 7) if style != "plain" and rng.random() < 0.7 else (),
        ),
        best_of=best_of,
        use_beam_search=best_of > 1 and beams,
        arrival_time=clock - rng.choice((0.0, 0.0, 0.0, 0.5, 3.0)),
    )
