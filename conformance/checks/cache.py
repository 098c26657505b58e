"""Suite ``cache``: what holds of blocks and steps whatever a scheduler decides.

Unlike ``scheduling`` this suite has no opinion on who goes first: the implementation alone is
driven, and every state is held against conservation and progress. So it also judges a scheduler
that rightly differs from vLLM's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from servespec.conformance.adapters.base import SchedulerFactory, SchedulerUnderTest
from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.counting import count_outputs, count_schedule
from servespec.conformance.checks.foreign import made, require_answer
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import shown
from servespec.conformance.verdicts import DivergedError, Divergence, Tally
from servespec.conformance.workloads.driver import drive
from servespec.conformance.workloads.scheduling import scheduler_cases
from servespec.reference.contracts import (
    EngineConfig,
    EngineCoreOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerDiedError,
    SchedulerOutput,
    SchedulerSnapshot,
)

__all__ = ["SUITE", "WatchedScheduler", "check"]


class WatchedScheduler:
    """A scheduler whose plans and states are held against the invariants.

    Parameters
    ----------
    scheduler : SchedulerUnderTest
    config : EngineConfig
        What it was made of.

    Attributes
    ----------
    step : int
        Steps scheduled before the current one.
    before, state : SchedulerSnapshot
        The state before the last plan, and the last one seen.
    """

    def __init__(self, scheduler: SchedulerUnderTest, config: EngineConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._requests: dict[str, Request] = {}
        self._outputs: dict[str, list[int]] = {}
        self._ended: set[str] = set()
        self._rows: dict[str, list[list[int]]] = {}
        self._filled: set[int] = set()
        self.step = 0
        self.before = self.state = self._look("make_scheduler")

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.request_id] = request
        self._outputs[request.request_id] = []
        self._scheduler.add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step and check plan and state."""
        output = self._scheduler.schedule(throttle_prefills)
        require_answer(output, SchedulerOutput, "scheduler_output")
        self._check_rows(output)
        self.before, self.state = self.state, self._look("schedule")
        self._check_plan(output)
        self._check_tables(output)
        self._check_writes(output)
        self._check_hits(output)
        self.step += 1
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in sampled tokens and check what they gave."""
        results = self._scheduler.update_from_output(output, sampled)
        require_answer(results, tuple[EngineCoreOutput, ...], "outputs")
        for result in results:
            name = result.request_id
            given = sampled.get(name, ())
            self._require(
                name in self._requests and name not in self._ended,
                "outputs",
                "requests that live",
                result,
                name,
            )
            self._require(
                tuple(result.new_token_ids) == given[: len(result.new_token_ids)],
                "outputs.new_token_ids",
                f"a prefix of {given}",
                result.new_token_ids,
                name,
            )
            self._outputs[name] += result.new_token_ids
            if result.finish_reason is not None:
                self._ended.add(name)
        self.state = self._look("update_from_output")
        return results

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in drafts."""
        self._scheduler.update_draft_token_ids(drafts)

    def finish_requests(self, request_ids: tuple[str, ...], status: RequestStatus) -> None:
        """End requests from outside."""
        self._scheduler.finish_requests(request_ids, status)
        self._ended.update(self._requests.keys() & request_ids)
        self.state = self._look("finish_requests")

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume."""
        self._scheduler.set_pause_state(state)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes."""
        done = self._scheduler.reset_prefix_cache(reset_running_requests)
        self.state = self._look("reset_prefix_cache")
        self._require(
            not (done and self.state.cached_blocks),
            "cached_blocks",
            "none after a reset",
            set(self.state.cached_blocks),
        )
        return done

    def check_progress(self) -> None:
        """Check that a step that did nothing had no choice; called when no step is in flight.

        A running request can always go on, at worst by preempting the others, unless its sequence
        is as long as the model allows; and with nothing running, a request that fits into the
        empty pool can be admitted.

        Raises
        ------
        DivergedError
        """
        state = self.state
        if state.pause_state is PauseState.PAUSED_ALL:
            return
        limit = self._config.scheduler.max_model_len - 1
        for name in state.running:
            self._require(
                state.num_computed_tokens[name] >= limit,
                "num_scheduled_tokens",
                "a token for some running request",
                "none",
                name,
            )
        heads = (*state.waiting[:1], *state.skipped_waiting[:1])
        if state.running or not heads or state.pause_state is not PauseState.UNPAUSED:
            return
        free = len(state.free_blocks)
        need = max(self._most_blocks(name) for name in heads)
        self._require(
            need > free,
            "num_scheduled_tokens",
            f"an admission: {free} blocks are free, the first in line needs at most {need}",
            "none",
        )

    def _most_blocks(self, name: str) -> int:
        """Return the blocks that a request's known tokens and one step of drafts can take."""
        config = self._config
        drafts = config.speculative.num_speculative_tokens if config.speculative else 0
        known = self._requests[name].num_prompt_tokens + len(self._outputs[name])
        tokens = min(known + 2 * drafts, config.scheduler.max_model_len)
        blocks = -(-tokens // config.cache.block_size) + 1
        # A GDN group never takes more than a block for each of attention's, and its drafts'.
        return len(config.cache.groups) * (blocks + drafts)

    def _look(self, call: str) -> SchedulerSnapshot:
        """Return the state after a call, and check what holds at any time."""
        state = self._scheduler.snapshot()
        require_answer(state, SchedulerSnapshot, f"snapshot after {call}")
        self._check_pool(state)
        self._check_queues(state)
        self._check_sharing(state)
        return state

    def _check_pool(self, state: SchedulerSnapshot) -> None:
        """Check conservation: every block is free once, or held as often as its count says."""
        total = self._config.cache.num_gpu_blocks
        self._require(
            len(state.ref_counts) == total,
            "ref_counts",
            f"{total} counts",
            str(len(state.ref_counts)),
        )
        free = Counter(state.free_blocks)
        holders = Counter(
            block
            for groups in state.block_tables.values()
            for blocks in groups
            for block in blocks
            if block != 0
        )
        for block in range(1, total):
            held = state.ref_counts[block]
            self._require(
                held == holders[block], f"ref_counts[{block}]", f"{holders[block]} holders", held
            )
            self._require(
                free[block] == (held == 0),
                "free_blocks",
                f"block {block}, held {held} times, to be in the queue {int(held == 0)} times",
                f"{free[block]} times",
            )
        known = set(range(1, total))
        for field, blocks in (
            ("free_blocks", free.keys()),
            ("block_tables", holders.keys()),
            ("cached_blocks", state.cached_blocks),
        ):
            self._require(
                known.issuperset(blocks), field, f"blocks 1 to {total - 1}", set(blocks) - known
            )
        if not self._config.cache.enable_prefix_caching:
            self._require(
                not state.cached_blocks,
                "cached_blocks",
                "none without prefix caching",
                set(state.cached_blocks),
            )

    def _check_queues(self, state: SchedulerSnapshot) -> None:
        """Check that every live request stands in one place, and only those do or hold blocks."""
        live = self._requests.keys() - self._ended
        places = Counter((*state.running, *state.waiting, *state.skipped_waiting))
        for name in {*live, *places}:
            self._require(
                places[name] == (name in live),
                "running, waiting and skipped_waiting",
                f"{int(name in live)} place",
                f"{places[name]} places",
                name,
            )
        for field in ("block_tables", "num_computed_tokens", "num_output_placeholders"):
            strangers = getattr(state, field).keys() - live
            self._require(not strangers, field, "requests that live", strangers)
        for name in live:
            self._require(
                state.num_computed_tokens.get(name, -1) >= 0,
                f"num_computed_tokens[{name!r}]",
                "at least 0",
                state.num_computed_tokens.get(name),
                name,
            )
            self._require(
                state.num_output_placeholders.get(name, -1) >= 0,
                f"num_output_placeholders[{name!r}]",
                "at least 0",
                state.num_output_placeholders.get(name),
                name,
            )
        seats = self._config.scheduler.max_num_seqs
        self._require(len(state.running) <= seats, "running", f"at most {seats}", state.running)

    def _check_sharing(self, state: SchedulerSnapshot) -> None:
        """Check that a shared block is cached and stands at one place of one prefix."""
        size = self._config.cache.block_size
        seen: dict[int, tuple[str, int, int]] = {}
        for name, groups in state.block_tables.items():
            for group, blocks in enumerate(groups):
                for index, block in enumerate(blocks):
                    if block == 0:
                        continue
                    first = seen.setdefault(block, (name, group, index))
                    if first == (name, group, index):
                        continue
                    end = (index + 1) * size
                    self._require(
                        first[0] != name
                        and first[1:] == (group, index)
                        and block in state.cached_blocks
                        and self._prefix(name, end) == self._prefix(first[0], end),
                        f"block_tables[{name!r}][{group}][{index}]",
                        "a block of its own or one of a common prefix",
                        f"block {block}, also block {first[2]} of group {first[1]} of {first[0]!r}",
                        name,
                    )

    def _prefix(self, name: str, end: int) -> tuple[object, ...]:
        """Return all that decides the content of a block that ends before token `end`."""
        request = self._requests[name]
        tokens = (*request.prompt_token_ids, *self._outputs[name])[:end]
        return (request.cache_salt, request.lora_name, *tokens)

    def _check_rows(self, output: SchedulerOutput) -> None:
        """Check that the rows of a plan are of known requests, and as long as their names."""
        cached = output.scheduled_cached_reqs
        for name in (*(new.req_id for new in output.scheduled_new_reqs), *cached.req_ids):
            known = name in self._requests
            self._require(known, "scheduler_output", "requests that were added", name)
        for name in cached.req_ids:
            known = name in self._rows or name in {r.req_id for r in output.scheduled_new_reqs}
            self._require(known, "scheduled_cached_reqs", "requests the worker knows", name, name)
        for field in ("new_block_ids", "num_computed_tokens", "num_output_tokens"):
            count = len(getattr(cached, field))
            self._require(
                count == len(cached.req_ids),
                f"scheduled_cached_reqs.{field}",
                f"one for each of {len(cached.req_ids)} requests",
                str(count),
            )
        groups = len(self._config.cache.groups)
        for name, blocks in (
            *((new.req_id, new.block_ids) for new in output.scheduled_new_reqs),
            *zip(cached.req_ids, cached.new_block_ids, strict=True),
        ):
            count = groups if blocks is None else len(blocks)
            what = f"blocks of {groups} groups"
            self._require(count == groups, "scheduler_output.block_ids", what, str(count), name)

    def _check_plan(self, output: SchedulerOutput) -> None:
        """Check that the plan keeps to its budget, to requests that run, and to what it did."""
        config, state = self._config.scheduler, self.state
        counts = output.num_scheduled_tokens
        self._require(
            sum(counts.values()) == output.total_num_scheduled_tokens <= config.token_budget,
            "total_num_scheduled_tokens",
            f"the sum, and at most {config.token_budget}",
            output.total_num_scheduled_tokens,
        )
        cached = output.scheduled_cached_reqs
        rows = [new.req_id for new in output.scheduled_new_reqs] + list(cached.req_ids)
        self._require(
            sorted(rows) == sorted(counts),
            "num_scheduled_tokens",
            f"one for each of {rows}",
            counts,
        )
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in counts.items():
            self._require(name in state.running, "num_scheduled_tokens", "running", name, name)
            self._require(
                count >= 1 or config.quirks.negative_schedule,
                f"num_scheduled_tokens[{name!r}]",
                "at least 1 token",
                count,
                name,
            )
            self._require(
                state.num_computed_tokens[name] == computed[name] + count <= config.max_model_len,
                f"num_computed_tokens[{name!r}]",
                f"{computed[name]} + {count}, at most {config.max_model_len}",
                state.num_computed_tokens[name],
                name,
            )
        self._require(
            output.preempted_req_ids.isdisjoint(state.running) or not self._preempts_alone(output),
            "preempted_req_ids",
            "requests that no longer run",
            set(output.preempted_req_ids),
        )

    def _preempts_alone(self, output: SchedulerOutput) -> bool:
        """Whether the preemptions are this step's own; a reset's may run again at once."""
        return output.preempted_req_ids <= {*self.before.running}

    def _check_tables(self, output: SchedulerOutput) -> None:
        """Check that the blocks a worker was told of, put one after the other, are the table."""
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._rows[new.req_id] = [list(blocks) for blocks in new.block_ids]
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._rows[name] = [[] for _ in self._config.cache.groups]
            for row, added in zip(self._rows[name], blocks or (), strict=blocks is not None):
                row.extend(added)
        for name in output.num_scheduled_tokens:
            for group, table in enumerate(self.state.block_tables.get(name, ())):
                if self._is_attention(group):
                    self._require(
                        tuple(self._rows[name][group]) == tuple(table),
                        f"block_tables[{name!r}][{group}]",
                        f"{self._rows[name][group]}, as the worker was told",
                        table,
                        name,
                    )

    def _check_writes(self, output: SchedulerOutput) -> None:
        """Check that every token has a block of attention to go to that nobody else writes."""
        size = self._config.cache.block_size
        writers: dict[int, str] = {}
        for name, count in output.num_scheduled_tokens.items():
            end = self.state.num_computed_tokens[name]
            for group in range(len(self._config.cache.groups)):
                if not self._is_attention(group):
                    continue
                table = self.state.block_tables.get(name, ((),) * (group + 1))[group]
                for index in range((end - count) // size, -(-end // size)):
                    block = table[index] if index < len(table) else 0
                    where = f"block_tables[{name!r}][{group}][{index}]"
                    self._require(block != 0, where, "a block to write to", "none", name)
                    writer = writers.setdefault(block, name)
                    self._require(
                        writer == name,
                        where,
                        "a block of its own to write to",
                        f"block {block}, which {writer!r} writes to",
                        name,
                    )

    def _check_hits(self, output: SchedulerOutput) -> None:
        """Check that a hit block of attention was filled by steps that ran, this one included."""
        size = self._config.cache.block_size
        groups = [g for g in range(len(self._config.cache.groups)) if self._is_attention(g)]
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                starts[name] = computed
        hits = {
            (name, group): self._rows[name][group][: start // size]
            for name, start in starts.items()
            for group in groups
        }
        self._filled.difference_update(self._handed_out(output, starts))
        for name, count in output.num_scheduled_tokens.items():
            end = self.state.num_computed_tokens[name]
            for group in groups:
                self._filled.update(self._rows[name][group][(end - count) // size : end // size])
        if self._config.scheduler.quirks.preempted_step_stays_cached:
            return
        for (name, group), blocks in hits.items():
            for index, block in enumerate(blocks):
                self._require(
                    block in self._filled,
                    f"block_tables[{name!r}][{group}][{index}]",
                    "a hit of a block that was computed",
                    f"block {block}, which no step has filled since it was handed out",
                    name,
                )

    def _handed_out(self, output: SchedulerOutput, starts: Mapping[str, int]) -> set[int]:
        """Return the blocks that requests got in this step and did not hit."""
        size = self._config.cache.block_size
        blocks: set[int] = set()
        for name, start in starts.items():
            for group, row in enumerate(self._rows[name]):
                hit = start // size if self._is_attention(group) else 0
                blocks.update(row[hit:])
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if added is not None and name not in starts:
                blocks.update(*added)
        return blocks

    def _is_attention(self, group: int) -> bool:
        return self._config.cache.groups[group].layer_type == "full_attention"

    def _require(
        self, condition: bool, field: str, expected: str, got: object, request: str | None = None
    ) -> None:
        if not condition:
            raise DivergedError(
                Divergence(
                    field=field,
                    expected=expected,
                    got=got if isinstance(got, str) else shown(got),
                    step=self.step,
                    request=request,
                )
            )


def check(case: Case, implementation: SchedulerFactory, tally: Tally) -> None:
    """Drive an implementation alone and hold it against the invariants.

    Parameters
    ----------
    case : Case
    implementation : SchedulerFactory
    tally : Tally

    Raises
    ------
    DivergedError
    ImplementationFailed
    """
    configs = (case.config.scheduler, case.config.cache, case.config.speculative)
    scheduler = made("scheduler", implementation.make_scheduler, *configs)
    try:
        _watch(WatchedScheduler(scheduler, case.config), case, tally)
    except ImplementationFailed as error:
        # Where the release that the quirks reproduce dies, so does whoever reproduces it.
        if not isinstance(error.__cause__, SchedulerDiedError):
            raise


def _watch(watched: WatchedScheduler, case: Case, tally: Tally) -> None:
    for driven in drive(watched, case.workload, case.config):
        count_schedule(tally, driven.output, watched.before, watched.state)
        count_outputs(tally, driven.outputs)
        tally.steps += 1
        tally.tokens += sum(len(result.new_token_ids) for result in driven.outputs)
        if driven.updated is None and not driven.output.num_scheduled_tokens:
            tally.counts["idle_steps"] += 1
            if not (driven.events.throttle_prefills or driven.output.preempted_req_ids):
                watched.check_progress()


SUITE = Suite(
    name="cache",
    summary="conservation of blocks and progress, without the reference",
    needs="make_scheduler",
    cases=partial(scheduler_cases, "cache"),
    check=check,
    sizes={"quick": 200, "standard": 2_000, "full": 20_000},
    must_reach=("preemptions", "resumptions", "prefix_hits", "evictions", "idle_steps"),
)
