"""Random plans without a scheduler, to drive batch preparation alone and harder.

A real scheduler rarely skips a request, drops output or reuses an id. These plans do so all the
time, yet each of them is one that a worker must accept: every request computes its tokens in
order, its blocks are its own, and drafts follow known tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from servespec.conformance.workloads.workload_plans import PlannedStep
from servespec.reference.contracts import (
    BlockTable,
    CacheConfig,
    CachedRequestData,
    EngineConfig,
    GraphConfig,
    GraphMode,
    KVCacheGroup,
    LayerType,
    NewRequestData,
    Quirks,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    SpeculativeConfig,
    SpeculativeMethod,
)

__all__ = ["PlanStream", "plans", "random_plan_config"]

_LAYOUTS: tuple[tuple[LayerType, ...], ...] = (
    ("full_attention",),
    ("linear_attention", "full_attention"),
    ("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    ("full_attention", "linear_attention", "full_attention"),
)
_MODES: tuple[GraphMode, ...] = (
    "NONE",
    "PIECEWISE",
    "FULL",
    "FULL_DECODE_ONLY",
    "FULL_AND_PIECEWISE",
)
_METHODS: tuple[SpeculativeMethod, ...] = ("mtp", "eagle3", "ngram")


def random_plan_config(random: Random) -> EngineConfig:
    """Return a small engine configuration in which batches grow ragged.

    Parameters
    ----------
    random : random.Random

    Returns
    -------
    EngineConfig
    """
    block_size = random.choice((2, 4, 8, 16))
    kernel = random.choice([size for size in (1, 2, 4, 8) if block_size % size == 0])
    max_len = random.choice((24, 48, 96))
    speculative = (
        SpeculativeConfig(
            method=random.choice(_METHODS), num_speculative_tokens=random.randint(1, 4)
        )
        if random.random() < 0.5
        else None
    )
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=random.randint(1, 8),
            max_num_batched_tokens=max_len + random.randint(0, 64),
            max_model_len=max_len,
            enable_chunked_prefill=random.random() < 0.8,
            quirks=random.choice((Quirks(), Quirks.vllm_0_27_1())),
        ),
        cache=CacheConfig(
            num_gpu_blocks=100_000,
            block_size=block_size,
            kernel_block_size=random.choice((None, kernel)),
            mamba_cache_mode=random.choice(("none", "align")),
            groups=tuple(
                KVCacheGroup(layer_type=layer_type, layer_indices=(index,))
                for index, layer_type in enumerate(random.choice(_LAYOUTS))
            ),
        ),
        speculative=speculative,
        graph=random.choice((None, _graph_config(random, speculative))),
    )


def _graph_config(random: Random, speculative: SpeculativeConfig | None) -> GraphConfig:
    query_len = 1 if speculative is None else 1 + speculative.num_speculative_tokens
    sizes = {query_len * random.randint(1, 24) for _ in range(random.randint(1, 8))}
    return GraphConfig(mode=random.choice(_MODES), capture_sizes=tuple(sorted(sizes)))


@dataclass(slots=True)
class _Life:
    """One request as the stream sees it."""

    req_id: str
    token_ids: list[int]
    num_prompt: int
    blocks: list[list[int]]
    computed: int = 0
    known: bool = False
    resumed: bool = False
    scheduled_last: bool = False
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class PlanStream:
    """An endless, seeded sequence of plans; `next_plan` and `sample` take turns.

    Parameters
    ----------
    config : EngineConfig
    random : random.Random
    realistic : bool
        Whether a model can follow: no prefix hit on blocks that nobody filled, and no output
        dropped, since a recurrent state cannot go back.

    Attributes
    ----------
    counts : collections.Counter
        How often each interesting thing happened.
    """

    config: EngineConfig
    random: Random
    realistic: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    _lives: list[_Life] = field(default_factory=list)
    _finished: set[str] = field(default_factory=set)
    _free: list[int] = field(default_factory=list)
    _next_block: int = 1
    _born: int = 0
    _step: dict[str, int] = field(default_factory=dict)

    @property
    def _num_spec(self) -> int:
        speculative = self.config.speculative
        return 0 if speculative is None else speculative.num_speculative_tokens

    def _chance(self, what: str, probability: float) -> bool:
        happened = self.random.random() < probability
        self.counts[what] += happened
        return happened

    def next_plan(self) -> SchedulerOutput:
        """Return the next plan."""
        scheduler = self.config.scheduler
        self._end_some()
        budget = scheduler.max_num_batched_tokens
        chosen: list[_Life] = []
        if not self._chance("empty", 0.02):
            self._disturb()
            self._be_born()
            for life in self._lives:
                if len(chosen) == scheduler.max_num_seqs or budget <= 0:
                    break
                if self._chance("skipped", 0.1):
                    continue
                if (count := self._tokens_for(life, budget)) > 0:
                    chosen.append(life)
                    self._step[life.req_id] = count
                    budget -= count
        self._step = {life.req_id: self._step[life.req_id] for life in chosen}
        return self._output(chosen)

    def _end_some(self) -> None:
        for life in list(self._lives):
            # One token must stay free for what the next step may sample, drafts included.
            full = len(life.token_ids) + 1 + self._num_spec >= self.config.scheduler.max_model_len
            if full or self._chance("finished", 0.06):
                self._lives.remove(life)
                self._release(life)
                if life.known:
                    self._finished.add(life.req_id)
                if self._chance("resubmitted", 0.3):
                    self._lives.append(self._birth(life.req_id))

    def _disturb(self) -> None:
        for life in self._lives:
            if life.known and not life.resumed and self._chance("preempted", 0.06):
                self._release(life)
                life.computed, life.resumed = 0, True
            elif (
                not self.realistic
                and len(life.token_ids) > life.num_prompt + 1
                and self._chance("output dropped", 0.02)
            ):
                life.token_ids.pop()
                life.computed = min(life.computed, len(life.token_ids) - 1)
        if self._chance("shuffled", 0.1):
            self.random.shuffle(self._lives)

    def _be_born(self) -> None:
        while len(self._lives) < 2 * self.config.scheduler.max_num_seqs and self._chance(
            "born", 0.5
        ):
            self._lives.append(self._birth(f"r{self._born}"))
            self._born += 1

    def _birth(self, req_id: str) -> _Life:
        limit = self.config.scheduler.max_model_len - self._num_spec - 2
        length = 1 if self._chance("one-token prompt", 0.2) else self.random.randint(1, limit)
        tokens = [self.random.randrange(1000) for _ in range(length)]
        return _Life(req_id, tokens, length, [[] for _ in self.config.cache.groups])

    def _tokens_for(self, life: _Life, budget: int) -> int:
        """Decide how many tokens a request gets, drafts included."""
        known = len(life.token_ids)
        if (not life.known or life.resumed) and life.computed == 0:
            boundary = (known - 1) // self.config.cache.block_size * self.config.cache.block_size
            if boundary and not self.realistic and self._chance("prefix hit", 0.2):
                life.computed = boundary
        remaining = known - life.computed
        room = self.config.scheduler.max_model_len - known
        most = min(self._num_spec, room, budget - 1)
        life.drafts = ()
        if remaining == 1:
            if most > 0 and self._chance("drafts", 0.6):
                drafts = self.random.randint(1, most)
                life.drafts = tuple(self.random.randrange(1000) for _ in range(drafts))
            return min(budget, 1 + len(life.drafts))
        return min(budget, remaining, self.random.choice((1, 2, 3, remaining, remaining)))

    def _output(self, chosen: list[_Life]) -> SchedulerOutput:
        running = [life for life in chosen if life.known and not life.resumed]
        resumed = [life for life in chosen if life.resumed]
        new = [life for life in chosen if not life.known]
        computed = {life.req_id: life.computed for life in chosen}
        grown = {life.req_id: self._allocate(life) for life in chosen}
        unseen = [life for life in (*running, *resumed) if not life.scheduled_last]
        self.counts["resumed"] += len(resumed)
        self.counts["resumed at once"] += len([life for life in resumed if life.scheduled_last])
        self.counts["re-added"] += len([life for life in unseen if not life.resumed])
        cached = [*running, *resumed]
        output = SchedulerOutput(
            scheduled_new_reqs=tuple(
                NewRequestData(
                    req_id=life.req_id,
                    prompt_token_ids=tuple(life.token_ids),
                    sampling_params=SamplingParams(),
                    block_ids=_table(life.blocks),
                    num_computed_tokens=life.computed,
                )
                for life in new
            ),
            scheduled_cached_reqs=CachedRequestData(
                req_ids=tuple(life.req_id for life in cached),
                resumed_req_ids=frozenset(life.req_id for life in resumed),
                new_block_ids=tuple(
                    _table(life.blocks) if life.resumed else grown[life.req_id] for life in cached
                ),
                num_computed_tokens=tuple(computed[life.req_id] for life in cached),
                num_output_tokens=tuple(len(life.token_ids) - life.num_prompt for life in cached),
                all_token_ids={life.req_id: tuple(life.token_ids) for life in unseen},
            ),
            num_scheduled_tokens={
                life.req_id: self._step[life.req_id] for life in (*running, *new, *resumed)
            },
            total_num_scheduled_tokens=sum(self._step.values()),
            scheduled_spec_decode_tokens={
                life.req_id: life.drafts for life in chosen if life.drafts
            },
            finished_req_ids=frozenset(self._finished),
        )
        self.counts["fresh one-token rows"] += sum(
            self._step[life.req_id] == 1 and life.computed == 0 for life in chosen
        )
        self._finished.clear()
        for life in self._lives:
            life.scheduled_last = life.req_id in self._step
        for life in chosen:
            life.known, life.resumed = True, False
        return output

    def sample(self) -> Mapping[str, tuple[int, ...]]:
        """Return what the latest plan's rows sampled, and move the requests on."""
        sampled: dict[str, tuple[int, ...]] = {}
        for life in self._lives:
            count = self._step.get(life.req_id)
            if count is None:
                continue
            end = life.computed + count
            life.computed = end
            if end < len(life.token_ids):
                self.counts["thrown away"] += 1
                continue
            accepted = self.random.randint(0, len(life.drafts))
            self.counts["accepted"] += accepted
            self.counts["rejected"] += len(life.drafts) - accepted
            tokens = (*life.drafts[:accepted], self.random.randrange(1000))
            life.token_ids += tokens
            life.computed -= len(life.drafts) - accepted
            sampled[life.req_id] = tokens
        return sampled

    def _allocate(self, life: _Life) -> BlockTable | None:
        """Give a request the blocks of this step and return the new ones."""
        cache, spec = self.config.cache, self._num_spec
        end = life.computed + self._step[life.req_id]
        added: list[tuple[int, ...]] = []
        for group, blocks in zip(cache.groups, life.blocks, strict=True):
            if group.layer_type == "full_attention":
                needed = -(-end // cache.block_size)
            elif cache.mamba_cache_mode == "align":
                needed = -(-end // cache.block_size) + spec
            else:
                needed = 1 + spec
            fresh = tuple(self._take() for _ in range(needed - len(blocks)))
            blocks += fresh
            added.append(fresh)
        return tuple(added) if any(added) else None

    def _take(self) -> int:
        if self._free and self.random.random() < 0.7:
            self.counts["blocks reused"] += 1
            return self._free.pop(self.random.randrange(len(self._free)))
        self._next_block += 1
        return self._next_block - 1

    def _release(self, life: _Life) -> None:
        for blocks in life.blocks:
            self._free += blocks
            blocks.clear()


def _table(blocks: list[list[int]]) -> BlockTable:
    return tuple(tuple(group) for group in blocks)


@st.composite
def plans(
    draw: st.DrawFn, max_steps: int = 24, *, realistic: bool = False
) -> tuple[EngineConfig, tuple[PlannedStep, ...]]:
    """Return an engine configuration and random plans for its worker.

    Parameters
    ----------
    max_steps : int
    realistic : bool
        As for `PlanStream`.
    """
    random = Random(draw(st.integers(0, 2**32 - 1)))
    config = random_plan_config(random)
    stream = PlanStream(config, random, realistic)
    steps = []
    for _ in range(draw(st.integers(1, max_steps))):
        output = stream.next_plan()
        steps.append(PlannedStep(output=output, sampled=stream.sample()))
    return config, tuple(steps)
