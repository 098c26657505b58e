"""Random cases for schedulers, small enough that everything happens often.

A case is a `Combination` of switches and a seed that a plain generator expands: pools of a few
dozen blocks, blocks of a few tokens, prompts that share prefixes, budgets that split them. Little
is drawn through Hypothesis, so a step costs microseconds to make, and any two integers give a
case: ``make_case(matrix()[i], seed)`` needs no Hypothesis at all.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from hypothesis import strategies as st

from servespec.conformance.cases.case import Case
from servespec.conformance.workloads.workload import Workload, WorkloadStep
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    KVCacheGroup,
    LayerType,
    PauseState,
    Quirks,
    RepetitionDetection,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
    gdn_groups_first,
)

__all__ = [
    "LAYOUTS",
    "Combination",
    "Layout",
    "combinations",
    "make_case",
    "matrix",
    "scheduler_cases",
    "scheduling",
    "with_quirks",
]

Layout = Literal["dense", "hybrid none", "hybrid align"]
LAYOUTS: tuple[Layout, ...] = ("dense", "hybrid none", "hybrid align")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """The switches whose every combination is checked.

    Attributes
    ----------
    layout : {"dense", "hybrid none", "hybrid align"}
        One full-attention group, or GDN groups before it in one of the two cache modes.
    async_scheduling : bool
    num_speculative_tokens : int
        0 for no speculation.
    policy : {"fcfs", "priority"}
    enable_prefix_caching : bool
        Not with ``hybrid none``: vLLM turns that into ``hybrid align``, and its scheduler refuses
        the pair.
    threshold : bool
        Whether a small `SchedulerConfig.long_prefill_token_threshold` is set.
    watermark : float
    """

    layout: Layout = "dense"
    async_scheduling: bool = False
    num_speculative_tokens: int = 0
    policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = False
    threshold: bool = False
    watermark: float = 0.0

    def __str__(self) -> str:
        return ", ".join(
            (
                self.layout,
                "async" if self.async_scheduling else "sync",
                f"{self.num_speculative_tokens} drafts",
                self.policy,
                "prefix caching" if self.enable_prefix_caching else "no caching",
                "threshold" if self.threshold else "no threshold",
                f"watermark {self.watermark:g}",
            )
        )


@cache
def matrix() -> tuple[Combination, ...]:
    """Return every combination, 240 of them."""
    return tuple(
        Combination(
            layout=layout,
            async_scheduling=async_scheduling,
            num_speculative_tokens=drafts,
            policy=policy,
            enable_prefix_caching=caching,
            threshold=threshold,
            watermark=watermark,
        )
        for layout, async_scheduling, drafts, policy, caching, threshold, watermark in (
            itertools.product(
                LAYOUTS,
                (False, True),
                (0, 1, 3),
                _POLICIES,
                (False, True),
                (False, True),
                (0.0, 0.05),
            )
        )
        if not (layout == "hybrid none" and caching)
    )


_POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "priority")


@st.composite
def combinations(draw: st.DrawFn) -> Combination:
    """Return combinations of the matrix, the simplest ones first."""
    return matrix()[draw(st.integers(0, len(matrix()) - 1))]


@st.composite
def scheduling(draw: st.DrawFn, quirks: Quirks | None = None) -> tuple[EngineConfig, Workload]:
    """Return configurations and a workload for a scheduler without a model.

    Parameters
    ----------
    quirks : Quirks, optional
        Of the scheduler; all of vLLM 0.27.1's if left out.
    """
    combination = draw(combinations())
    return make_case(combination, draw(st.integers(0, 2**32 - 1)), quirks)


@st.composite
def scheduler_cases(draw: st.DrawFn, suite: str) -> Case:
    """Return cases of a suite that drives a scheduler alone, of either profile.

    Parameters
    ----------
    suite : str
    """
    quirks = draw(st.sampled_from((Quirks.vllm_0_27_1(), Quirks())))
    config, workload = draw(scheduling(quirks))
    return Case(suite=suite, config=config, workload=workload)


def with_quirks(case: Case, quirks: Quirks) -> Case:
    """Return a case of one profile, for schedulers that know no other.

    Parameters
    ----------
    case : Case
    quirks : Quirks
    """
    scheduler = replace(case.config.scheduler, quirks=quirks)
    return replace(case, config=replace(case.config, scheduler=scheduler))


def make_case(
    combination: Combination, seed: int, quirks: Quirks | None = None
) -> tuple[EngineConfig, Workload]:
    """Expand a combination and a seed.

    Parameters
    ----------
    combination : Combination
    seed : int
        Decides all else; equal arguments give equal cases on every machine.
    quirks : Quirks, optional
        Of the scheduler; all of vLLM 0.27.1's if left out.

    Returns
    -------
    EngineConfig, Workload
    """
    rng = random.Random(f"{combination} {seed}")
    quirks = Quirks.vllm_0_27_1() if quirks is None else quirks
    block_size = rng.choice((1, 2, 3, 4, 4, 4, 6, 8))
    large = rng.random() < 0.1
    max_model_len = rng.choice((rng.randint(12, 32), rng.randint(32, 96)))
    if large:
        max_model_len = rng.randint(96, 256)
    if rng.random() < 0.4:
        # So that a prompt exists which hits all but one token and is padded to the very end.
        max_model_len -= (max_model_len - combination.num_speculative_tokens - 1) % block_size
    groups = _groups(combination.layout, rng)
    scheduler = _scheduler_config(combination, max_model_len, block_size, quirks, rng)
    speculative = None
    if combination.num_speculative_tokens:
        speculative = SpeculativeConfig(
            method=rng.choice(("ngram", "ngram", "mtp", "eagle", "draft_model")),
            num_speculative_tokens=combination.num_speculative_tokens,
        )
    count = rng.randint(15, 50) if large else rng.randint(3, 14)
    workload = _workload(count, scheduler, speculative, block_size, rng)
    aligned = combination.layout == "hybrid align"
    unit = None
    if aligned and combination.enable_prefix_caching and rng.random() < 0.4:
        unit = rng.choice([n for n in range(1, block_size + 1) if block_size % n == 0])
    cache_config = CacheConfig(
        num_gpu_blocks=_num_blocks(workload, groups, aligned, block_size, speculative, rng),
        block_size=block_size,
        enable_prefix_caching=combination.enable_prefix_caching,
        mamba_cache_mode="align" if aligned else "none",
        prefix_match_unit=unit,
        groups=groups,
    )
    return EngineConfig(scheduler=scheduler, cache=cache_config, speculative=speculative), workload


def _groups(layout: Layout, rng: random.Random) -> tuple[KVCacheGroup, ...]:
    if layout == "dense":
        return gdn_groups_first(("full_attention",) * 2)
    gdn: LayerType = "linear_attention"
    return gdn_groups_first((*(gdn,) * rng.choice((1, 2, 3, 3)), "full_attention") * 2)


def _scheduler_config(
    combination: Combination,
    max_model_len: int,
    block_size: int,
    quirks: Quirks,
    rng: random.Random,
) -> SchedulerConfig:
    # vLLM insists on chunked prefill where prompts are cut at block boundaries.
    chunked = combination.layout == "hybrid align" or rng.random() < 0.8
    budget = rng.choice((rng.randint(1, 8), rng.randint(6, 24), rng.randint(16, 96)))
    if not chunked:
        budget = max(budget, max_model_len)
    # The drafts of one request are scheduled together, so a budget below that starves it.
    budget = max(budget, 1 + combination.num_speculative_tokens)
    extra = rng.choice((0, 0, 4))
    return SchedulerConfig(
        max_num_seqs=rng.choice((rng.randint(1, 3), rng.randint(3, 10), rng.randint(3, 30))),
        max_num_batched_tokens=budget + extra,
        max_num_scheduled_tokens=budget if extra else None,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.randint(1, min(2 * block_size + 2, max_model_len))
        if combination.threshold
        else 0,
        policy=combination.policy,
        watermark=combination.watermark,
        scheduler_reserve_full_isl=rng.random() < 0.6,
        async_scheduling=combination.async_scheduling,
        quirks=quirks,
    )


def _num_blocks(
    workload: Workload,
    groups: tuple[KVCacheGroup, ...],
    aligned: bool,
    block_size: int,
    speculative: SpeculativeConfig | None,
    rng: random.Random,
) -> int:
    """Return a pool for one or two of the largest requests, now and then for none."""
    gdn = sum(group.layer_type == "linear_attention" for group in groups)
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    longest = max(
        request.num_prompt_tokens + request.sampling_params.max_tokens
        for request in workload.requests
    )
    blocks = -(-(longest + drafts) // block_size)
    # In align mode a running request holds at most two states a group beside its drafts'.
    need = (len(groups) - gdn) * blocks + gdn * ((2 if aligned else 1) + drafts)
    share = rng.uniform(0.5, 1.0) if rng.random() < 0.1 else rng.uniform(1.0, 2.2)
    return 2 + int(share * need)


def _workload(
    count: int,
    scheduler: SchedulerConfig,
    speculative: SpeculativeConfig | None,
    block_size: int,
    rng: random.Random,
) -> Workload:
    num_token_ids = rng.choice((2, 5, 50))
    base = [rng.randrange(50) for _ in range(scheduler.max_model_len)]
    salted = rng.random() < 0.1
    wide = rng.random() < 0.2
    # The later, the more urgent: victims were scheduled before, in the very step.
    urgent = rng.random() < 0.3
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    # A prompt one longer than whole blocks can hit all but its last token; one that ends K short
    # of the longest sequence can be padded right up to it.
    edges = [*range(1, scheduler.max_model_len, block_size), scheduler.max_model_len - 1]
    edges += [scheduler.max_model_len - drafts] * (len(edges) if drafts else 0)
    events: list[dict[str, object]] = []
    made: list[Request] = []
    busy = rng.choice((0.3, 0.7, 1.5, 3.0))
    while len(made) < count:
        arriving = min(count - len(made), int(rng.expovariate(1.0) * busy + 0.5))
        arrivals = [
            _request(len(made) + i, len(events), base, edges, num_token_ids, salted, wide, rng)
            for i in range(arriving)
        ]
        if urgent:
            arrivals = [
                replace(request, priority=count - number)
                for number, request in enumerate(arrivals, len(made))
            ]
        made += arrivals
        events.append({"add": tuple(arrivals)})
    events += [{} for _ in range(rng.randint(0, 30))]
    for event in events:
        if made and rng.random() < 0.03:
            event["abort"] = (rng.choice(made).request_id,)
    if rng.random() < 0.15:
        start = rng.randrange(len(events))
        events[start]["pause"] = rng.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL))
        end = start + rng.randint(1, 6)
        events += [{} for _ in range(end + 1 - len(events))]
        events[end]["pause"] = PauseState.UNPAUSED
    if rng.random() < 0.25:
        events[rng.randrange(len(events))]["reset_prefix_cache"] = rng.random() < 0.6
    if rng.random() < 0.1:
        period = rng.randint(2, 4)
        for index, event in enumerate(events):
            event["throttle_prefills"] = index % period != 0
    return Workload(
        steps=tuple(WorkloadStep(**event) for event in events),  # type: ignore[arg-type]
        max_steps=len(events) + 60,
        token_seed=rng.getrandbits(32),
        num_token_ids=num_token_ids,
        acceptance=rng.choice((0.0, 0.5, 0.7, 0.9, 1.0)),
        max_concurrent_batches=rng.choice((2, 2, 2, 3)),
    )


def _request(
    number: int,
    step: int,
    base: list[int],
    edges: list[int],
    num_token_ids: int,
    salted: bool,
    wide: bool,
    rng: random.Random,
) -> Request:
    longest = len(base) - 1
    length = rng.choice((rng.randint(1, min(6, longest)), rng.randint(1, longest)))
    if rng.random() < 0.3:
        length = rng.choice(edges)
    shared = rng.choice((0, length, rng.randint(0, length)))
    prompt = base[:shared] + [rng.randrange(50) for _ in range(length - shared)]
    if wide:
        # The same ids in one or two bytes: hashes of narrowed tokens collide.
        start, more = rng.randrange(length), rng.choice((0, 1 << 8, 1 << 16))
        prompt[start:] = [token + more for token in prompt[start:]]
    max_tokens = rng.choice((1, rng.randint(1, 8), rng.randint(4, 30)))
    # Now and then more than the model's length allows, which vLLM takes for an endless request.
    min_tokens = rng.choice((max_tokens, rng.randint(0, max_tokens))) if rng.random() < 0.1 else 0
    stops = rng.random() < 0.3
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            eos_token_id=rng.randrange(num_token_ids) if stops and rng.random() < 0.5 else None,
            stop_token_ids=(rng.randrange(num_token_ids),) if stops and rng.random() < 0.5 else (),
            repetition_detection=RepetitionDetection(
                max_pattern_size=rng.randint(1, 3), min_count=rng.randint(2, 4)
            )
            if rng.random() < 0.05
            else None,
        ),
        priority=rng.randint(0, 2),
        # Requests of one step arrive together, so that ties are decided too.
        arrival_time=float(step),
        cache_salt=rng.choice((None, "a", "b")) if salted else None,
        lora_name=rng.choice((None, "adapter")) if salted else None,
    )
