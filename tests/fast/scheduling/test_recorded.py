"""Runs of the real vLLM 0.27.1 scheduler, recorded, and the same calls on the fast one.

Every line of the file is one run: its configuration, then calls and what the real scheduler
answered and held after them. The runs cover {dense, hybrid} x {sync, async} x {0, 1, 3 drafts} x
{prefix caching off, on}, with policies, thresholds, watermarks and fine hashes drawn at random
and pools small enough for preemption in each.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from servespec.fast.scheduling.v1 import Scheduler
from servespec.reference.contracts import (
    CacheConfig,
    KVCacheGroup,
    PauseState,
    Quirks,
    RepetitionDetection,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    SpeculativeConfig,
)

RUNS = [
    json.loads(line)
    for line in lzma.decompress(
        Path(__file__).with_name("vllm_0_27_1.jsonl.xz").read_bytes()
    ).splitlines()
]
GDN = [KVCacheGroup(layer_type="linear_attention", layer_indices=(i, i + 4)) for i in range(3)]
ATTENTION = KVCacheGroup(layer_type="full_attention", layer_indices=(3, 7))


def make(kind: str, c: dict[str, Any], quirks: Quirks) -> Scheduler:
    hybrid = kind == "hybrid"
    method = "ngram"
    if c["lookahead"]:
        method = "mtp" if c["eagle"] else "draft_model"
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=c["seqs"],
            max_num_batched_tokens=c["budget"],
            max_model_len=c["L"],
            enable_chunked_prefill=c["chunked"],
            long_prefill_token_threshold=c["thr"],
            policy=c["policy"],
            watermark=c["wm"],
            scheduler_reserve_full_isl=c["isl"],
            async_scheduling=c["async"],
            quirks=quirks,
        ),
        CacheConfig(
            num_gpu_blocks=c["blocks"],
            block_size=c["B"],
            enable_prefix_caching=c["prefix"],
            mamba_cache_mode="align" if hybrid and c["prefix"] else "none",
            prefix_match_unit=c["unit"],
            groups=(*GDN, ATTENTION) if hybrid else (ATTENTION,),
        ),
        SpeculativeConfig(method=method, num_speculative_tokens=c["spec"]) if c["spec"] else None,
    )


def make_request(fields: list[Any]) -> Request:
    ids, prompt, priority, arrival, salt, max_tokens, min_tokens, eos, stop, detection = fields
    return Request(
        request_id=ids,
        prompt_token_ids=tuple(prompt),
        priority=priority,
        arrival_time=arrival,
        cache_salt=salt,
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            eos_token_id=eos,
            stop_token_ids=tuple(stop),
            repetition_detection=None
            if detection is None
            else RepetitionDetection(
                max_pattern_size=detection[0],
                min_pattern_size=detection[1],
                min_count=detection[2],
            ),
        ),
    )


def plan_fields(plan: SchedulerOutput) -> dict[str, Any]:
    cached = plan.scheduled_cached_reqs
    return {
        "sched": [[*item] for item in plan.num_scheduled_tokens.items()],
        "total": plan.total_num_scheduled_tokens,
        "new": [
            [new.req_id, new.num_computed_tokens, lists(new.block_ids)]
            for new in plan.scheduled_new_reqs
        ],
        "cached": [
            [*row]
            for row in zip(
                cached.req_ids,
                cached.num_computed_tokens,
                cached.num_output_tokens,
                map(lists, cached.new_block_ids),
                strict=True,
            )
        ],
        "resumed": sorted(cached.resumed_req_ids),
        "all": lists(cached.all_token_ids),
        "spec": lists(plan.scheduled_spec_decode_tokens),
        "pre": sorted(plan.preempted_req_ids),
        "fin": sorted(plan.finished_req_ids),
        "cp": lists(plan.num_common_prefix_blocks),
        "zero": lists(plan.new_block_ids_to_zero),
        "cow": [[c.src_block_id, c.dst_block_id] for c in plan.kv_cache_block_copies],
        "k": plan.num_spec_tokens_to_schedule,
    }


def state_fields(scheduler: Scheduler) -> dict[str, Any]:
    snapshot = scheduler.snapshot()
    return {
        "free": lists(snapshot.free_blocks),
        "ref": lists(snapshot.ref_counts),
        "cached": sorted(snapshot.cached_blocks),
        "tables": lists(snapshot.block_tables),
        "running": lists(snapshot.running),
        "waiting": lists(snapshot.waiting),
        "skipped": lists(snapshot.skipped_waiting),
        "comp": dict(snapshot.num_computed_tokens),
        "ph": dict(snapshot.num_output_placeholders),
        "unf": scheduler.has_unfinished_requests(),
        "hasfin": scheduler.has_finished_requests(),
    }


def lists(value: Any) -> Any:
    if isinstance(value, tuple):
        return [lists(item) for item in value]
    if isinstance(value, dict):
        return {key: lists(item) for key, item in value.items()}
    return value


def replay(run: list[list[Any]], quirks: Quirks) -> Counter[str]:
    """Repeat the calls of one run; fail where an answer differs."""
    _, kind, config = run[0]
    scheduler = make(kind, config, quirks)
    counts: Counter[str] = Counter()
    plans = []
    plan = SchedulerOutput()
    for number, (call, *arguments) in enumerate(run[1:], 1):
        where = f"{kind} {config}, entry {number}"
        if call == "add":
            scheduler.add_request(make_request(arguments))
        elif call == "abort":
            scheduler.finish_requests(arguments, RequestStatus.FINISHED_ABORTED)
        elif call == "reset":
            assert scheduler.reset_prefix_cache(arguments[0]) == arguments[1], where
        elif call == "pause":
            scheduler.set_pause_state(PauseState(arguments[0]))
        elif call == "schedule":
            schedule = scheduler.schedule(arguments[0])
            plan = schedule.to_contract()
            if plan.total_num_scheduled_tokens:
                plans.append((schedule, plan))
            count(counts, plan, scheduler)
        elif call == "update":
            # The array form and the contract take turns.
            output = plans.pop(0)[number % 2]
            sampled = {i: tuple(tokens) for i, tokens in arguments[0].items()}
            results = scheduler.update_from_output(output, sampled)
            counts["finished"] += sum(r.finish_reason is not None for r in results)
        elif call == "drafts":
            scheduler.update_draft_token_ids({i: tuple(d) for i, d in arguments[0].items()})
        else:
            expected = arguments[0]
            got = plan_fields(plan) if call == "plan" else state_fields(scheduler)
            for field in expected:
                assert got[field] == expected[field], f"{where}: {call}.{field}"
    return counts


def count(counts: Counter[str], plan: SchedulerOutput, scheduler: Scheduler) -> None:
    cached = plan.scheduled_cached_reqs
    counts["steps"] += 1
    counts["preempted"] += len(plan.preempted_req_ids)
    counts["resumed"] += len(cached.resumed_req_ids)
    counts["hits"] += sum(new.num_computed_tokens > 0 for new in plan.scheduled_new_reqs)
    counts["copies"] += len(plan.kv_cache_block_copies)
    counts["cleared"] += len(plan.new_block_ids_to_zero)
    counts["drafted"] += len(plan.scheduled_spec_decode_tokens)
    counts["padded"] += sum(
        new.req_id in plan.scheduled_spec_decode_tokens for new in plan.scheduled_new_reqs
    )
    counts["shared"] += any(plan.num_common_prefix_blocks)
    counts["passed over"] += len(scheduler.snapshot().skipped_waiting) > 0


def test_recorded_runs() -> None:
    counts: Counter[str] = Counter()
    for run in RUNS:
        counts += replay(run, Quirks.vllm_0_27_1())
    print(dict(counts))
    assert counts["steps"] > 1500
    for event in (
        "preempted",
        "resumed",
        "hits",
        "copies",
        "cleared",
        "drafted",
        "padded",
        "shared",
        "passed over",
        "finished",
    ):
        assert counts[event] >= 3, event


@pytest.mark.parametrize("field", ["num_output_tokens", "free_blocks"])
def test_a_difference_is_seen(field: str) -> None:
    """A check that cannot fail is worth nothing: change one recorded number."""
    call, name = ("plan", "cached") if field == "num_output_tokens" else ("state", "free")
    run = json.loads(json.dumps(RUNS[0]))
    entry = next(e for e in run if e[0] == call and e[1][name])
    if call == "plan":
        entry[1][name][0][2] += 1
    else:
        entry[1][name][0] += 1
    with pytest.raises(AssertionError, match=f"{call}.{name}"):
        replay(run, Quirks.vllm_0_27_1())
