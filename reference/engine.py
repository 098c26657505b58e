"""The reference engine: scheduler, batch and model as one value that steps.

A step plans, brings the memory and the batch up to the plan, runs the model, samples greedily and
hands the tokens back to the scheduler.

Source: ``EngineCore.step`` of ``vllm/v1/engine/core.py`` and ``execute_model`` of
``vllm/v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from servespec.reference.batch.persistent import (
    InputBatch,
    append_sampled,
    empty_batch,
    update_states,
)
from servespec.reference.batch.prepare import prepare
from servespec.reference.cache.memory import (
    Memory,
    copy_blocks,
    initial_memory,
    move_states,
    zero_blocks,
)
from servespec.reference.contracts import (
    BatchRecord,
    CacheConfig,
    EngineConfig,
    Request,
    RequestError,
    SamplingParams,
    SchedulerOutput,
    SchedulerSnapshot,
    StepRecord,
    require,
)
from servespec.reference.models.qwen3_5 import Qwen3_5, forward
from servespec.reference.numerics.sampling import greedy
from servespec.reference.scheduling import planner
from servespec.reference.scheduling.admission import check_request
from servespec.reference.scheduling.planner import PlannerState

__all__ = [
    "EngineState",
    "abort_requests",
    "add_request",
    "generate",
    "has_unfinished_requests",
    "initial_state",
    "snapshot",
    "step",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineState:
    """An engine between two steps.

    Attributes
    ----------
    model : Qwen3_5
    config : EngineConfig
    scheduler : PlannerState
    batch : InputBatch
    memory : Memory
    num_steps : int
        Steps taken.
    """

    model: Qwen3_5
    config: EngineConfig
    scheduler: PlannerState
    batch: InputBatch
    memory: Memory
    num_steps: int = 0


def initial_state(model: Qwen3_5, config: EngineConfig) -> EngineState:
    """Return an engine without requests.

    Parameters
    ----------
    model : Qwen3_5
    config : EngineConfig

    Returns
    -------
    EngineState

    Raises
    ------
    ConfigError
        If the cache's groups are not the model's layers, or speculation is asked for, which
        needs a drafter.
    """
    layers = {
        layer: group.layer_type for group in config.cache.groups for layer in group.layer_indices
    }
    expected = dict(enumerate(model.config.layer_types))
    require(layers == expected, "CacheConfig.groups", layers, f"the model's layers {expected}")
    require(
        config.speculative is None,
        "EngineConfig.speculative",
        config.speculative,
        "None: this engine has no drafter",
    )
    return EngineState(
        model=model,
        config=config,
        scheduler=planner.initial_state(config),
        batch=empty_batch(),
        memory=initial_memory(
            config.cache.groups, config.cache.block_size, config.cache.kernel_block_size
        ),
    )


def add_request(state: EngineState, request: Request) -> EngineState:
    """Queue a request.

    Parameters
    ----------
    state : EngineState
    request : Request

    Returns
    -------
    EngineState

    Raises
    ------
    DuplicateRequestError
        If a live request has this id.
    RequestError
        If the prompt is too long or a token is not in the vocabulary.
    CacheTooSmallError
        If the request could not be served even alone.
    """
    largest = max(request.prompt_token_ids)
    if largest >= state.model.config.vocab_size:
        raise RequestError(
            f"request {request.request_id!r}: prompt_token_ids holds {largest}: must be below"
            f" vocab_size = {state.model.config.vocab_size}"
        )
    check_request(request, state.config.scheduler, state.config.cache)
    return replace(state, scheduler=planner.add_request(state.scheduler, request))


def step(
    state: EngineState, forced_token_ids: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[EngineState, StepRecord]:
    """Run one step.

    Parameters
    ----------
    state : EngineState
    forced_token_ids : mapping of str to tuple of int, optional
        Tokens with which to go on instead of those sampled, for requests of which this step keeps
        a token.

    Returns
    -------
    state : EngineState
    record : StepRecord
        Names the engine's own choice of tokens, forced or not.
    """
    scheduler, output = planner.schedule(state.scheduler)
    memory = copy_blocks(
        zero_blocks(state.memory, output.new_block_ids_to_zero), output.kv_cache_block_copies
    )
    record, logits, sampled = None, None, {}
    if output.total_num_scheduled_tokens > 0:
        batch, record = prepare(state.batch, output, state.config)
        memory = _carry_states(memory, record, state.config.cache)
        logits, memory = forward(state.model, record, state.config.cache.groups, memory)
        sampled = {
            req_id: (token,)
            for req_id, token, keep in zip(
                record.req_ids, greedy(logits), record.sampled, strict=True
            )
            if keep
        }
    else:
        batch = update_states(state.batch, output)
    kept = {req_id: (forced_token_ids or {}).get(req_id, own) for req_id, own in sampled.items()}
    scheduler, outputs = planner.update_from_output(scheduler, output, _for_all(output, kept))
    after = replace(
        state,
        scheduler=scheduler,
        batch=append_sampled(batch, kept) if record is not None else batch,
        memory=memory,
        num_steps=state.num_steps + 1,
    )
    return after, StepRecord(
        step=state.num_steps,
        scheduler_output=output,
        batch=record,
        logits=logits if state.config.keep_logits else None,
        sampled_token_ids=sampled,
        outputs=outputs,
    )


def _for_all(
    output: SchedulerOutput, kept: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Give every scheduled request an entry, () where no token is kept."""
    return {req_id: kept.get(req_id, ()) for req_id in output.num_scheduled_tokens}


def _carry_states(memory: Memory, record: BatchRecord, cache: CacheConfig) -> Memory:
    """In mode ``align``, move each row's state to the block that the step will write.

    The state after C tokens is in the block at index ``(C - 1) // block_size`` of the row's table;
    a step that ends at token E writes the one at ``(E - 1) // block_size``.
    """
    if cache.mamba_cache_mode != "align":
        return memory
    for index, group in enumerate(cache.groups):
        if group.layer_type != "linear_attention":
            continue
        moves: dict[int, int] = {}
        for table, done, end in zip(
            record.block_tables, record.num_computed_tokens, record.seq_lens, strict=True
        ):
            before, after = (done - 1) // cache.block_size, (end - 1) // cache.block_size
            if done > 0 and before != after:
                moves[table[index][after]] = table[index][before]
        memory = move_states(memory, group, moves)
    return memory


def abort_requests(state: EngineState, request_ids: Sequence[str]) -> EngineState:
    """End requests from outside; ids that are not alive are ignored.

    Parameters
    ----------
    state : EngineState
    request_ids : sequence of str

    Returns
    -------
    EngineState
    """
    return replace(
        state,
        scheduler=planner.abort_requests(state.scheduler, request_ids),
    )


def has_unfinished_requests(state: EngineState) -> bool:
    """Whether any request still waits or runs."""
    return planner.has_unfinished_requests(state.scheduler)


def snapshot(state: EngineState) -> SchedulerSnapshot:
    """Return the scheduler's state as far as checks compare it."""
    return planner.snapshot(state.scheduler)


def generate(
    model: Qwen3_5,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
) -> tuple[tuple[int, ...], ...]:
    """Serve prompts together until all have ended.

    Parameters
    ----------
    model : Qwen3_5
    config : EngineConfig
    prompts : sequence of sequence of int
    sampling : SamplingParams
        For all of them.

    Returns
    -------
    tuple of tuple of int
        New tokens of each prompt.

    Raises
    ------
    RequestError
        If a prompt is refused, or the requests that are left can never go on.
    """
    state = initial_state(model, config)
    tokens: dict[str, tuple[int, ...]] = {}
    for index, prompt in enumerate(prompts):
        request = Request(
            request_id=str(index), prompt_token_ids=tuple(prompt), sampling_params=sampling
        )
        state = add_request(state, request)
        tokens[request.request_id] = ()
    while has_unfinished_requests(state):
        state, record = step(state)
        # Under V0 a step may do nothing but preempt.
        if record.batch is None and not record.scheduler_output.preempted_req_ids:
            raise RequestError(
                "nothing can be scheduled any more: a request that may not stop before min_tokens"
                " has reached max_model_len"
            )
        for output in record.outputs:
            tokens[output.request_id] += output.new_token_ids
    return tuple(tokens.values())
