from __future__ import annotations

from servespec.fast.scheduling.hooks import Hooks
from servespec.fast.scheduling.v1 import Scheduler
from servespec.reference.contracts import (
    CacheConfig,
    KVCacheGroup,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
)


class Recorder(Hooks):
    """Holds requests back by id, keeps one draft each and writes down what ended."""

    def __init__(self) -> None:
        self.blocked: set[str] = set()
        self.finished: list[str] = []

    def may_start(self, request: Request) -> bool:
        return request.request_id not in self.blocked

    def valid_drafts(self, request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
        return drafts[:1]

    def on_finished(self, request: Request) -> None:
        self.finished.append(request.request_id)


def make(hooks: Hooks) -> Scheduler:
    group = KVCacheGroup(layer_type="full_attention", layer_indices=(0,))
    return Scheduler(
        SchedulerConfig(max_num_batched_tokens=64, max_model_len=64),
        CacheConfig(num_gpu_blocks=20, block_size=4, groups=(group,)),
        SpeculativeConfig(method="ngram", num_speculative_tokens=3),
        hooks,
    )


def request(name: str) -> Request:
    return Request(
        request_id=name, prompt_token_ids=(1, 2, 3), sampling_params=SamplingParams(max_tokens=9)
    )


def test_a_request_held_back_is_passed_over_and_then_goes_first() -> None:
    hooks = Recorder()
    scheduler = make(hooks)
    hooks.blocked = {"a", "b"}
    for name in "abc":
        scheduler.add_request(request(name))
    assert list(scheduler.schedule().req_ids) == ["c"]
    assert scheduler.snapshot().skipped_waiting == ("a", "b")
    scheduler.add_request(request("d"))
    hooks.blocked = set()
    assert list(scheduler.schedule().req_ids) == ["a", "b", "d"]


def test_drafts_and_ends_pass_the_hooks() -> None:
    hooks = Recorder()
    scheduler = make(hooks)
    scheduler.add_request(request("a"))
    scheduler.update_from_output(scheduler.schedule(), {"a": (7,)})
    scheduler.update_draft_token_ids({"a": (4, 5, 6)})
    plan = scheduler.schedule().to_contract()
    assert plan.scheduled_spec_decode_tokens == {"a": (4,)}
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert hooks.finished == ["a"]
