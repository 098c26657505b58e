"""What holds of every state, whatever the workload; and that the workloads are not tame.

A pretend worker follows the plans and keeps, for every block, whose prefix each slot or state
holds. So a request that would read what was never computed for its own prefix is seen at once,
be it through a hash published too early, a block given out too early or a table out of order.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from servespec.conformance.workloads.driver import PretendWorker, drive
from servespec.conformance.workloads.scheduling import make_case, matrix
from servespec.reference.contracts import PauseState, Quirks, SchedulerDiedError
from servespec.reference.scheduling import v1
from servespec.reference.scheduling.admission import blocks_alone, check_request

SEEDS = range(1)


class Watched:
    """The reference with the calls of a driver; every state is checked."""

    def __init__(self, config, workload, contents):
        self.config, self.counts = config, Counter()
        self.state = v1.initial_state(config.scheduler, config.cache, config.speculative)
        self.worker = PretendWorker(workload, config.speculative)
        self.contents = contents
        self.requests, self.chains, self.tables = {}, {}, {}
        self.held = {}

    def add_request(self, request):
        self.requests[request.request_id], self.chains[request.request_id] = request, []
        self.state = v1.add_request(self.state, request)

    def schedule(self, throttle=False):
        known = set(self.state.cache.pool.hashes)
        self.state, output = v1.schedule(self.state, throttle)
        self.check(output)
        if self.contents:
            self.run(output)
        self.count(output, known)
        return output

    def update_from_output(self, output, sampled):
        self.counts["stale"] += any(
            request.num_stale_output_tokens for request in self.state.requests.values()
        )
        self.counts["rejected"] += sum(
            len(drafts) - len(sampled[name]) + 1
            for name, drafts in output.scheduled_spec_decode_tokens.items()
            if sampled.get(name)
        )
        self.state, outputs = v1.update_from_output(self.state, output, sampled)
        self.counts["tokens"] += sum(len(out.new_token_ids) for out in outputs)
        self.check_state()
        return outputs

    def update_draft_token_ids(self, drafts):
        self.state = v1.update_draft_token_ids(self.state, drafts)

    def finish_requests(self, names, status):
        self.state = v1.finish_requests(self.state, names, status)
        self.check_state()

    def set_pause_state(self, pause):
        self.state = v1.set_pause_state(self.state, pause)

    def reset_prefix_cache(self, running=False):
        self.state, done = v1.reset_prefix_cache(self.state, running)
        self.counts["resets"] += done
        self.check_state()
        return done

    def check(self, output):
        config = self.config.scheduler
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        assert output.total_num_scheduled_tokens <= config.token_budget
        assert len(self.state.running) <= config.max_num_seqs
        assert set(output.num_scheduled_tokens) <= set(self.state.running)
        # After a reset a request may resume in the step that tells of its preemption.
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        assert not output.preempted_req_ids & set(output.num_scheduled_tokens) - resumed
        if not config.quirks.negative_schedule:
            assert all(count > 0 for count in output.num_scheduled_tokens.values())
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            if not config.quirks.padded_admission_cut_late:
                assert 0 < len(drafts) < output.num_scheduled_tokens[name]
        self.check_state()

    def check_state(self):
        """Free and held blocks are all blocks, and counts are holders."""
        cache = self.state.cache
        pool, snap = cache.pool, v1.snapshot(self.state)
        holders = Counter(
            block for table in snap.block_tables.values() for group in table for block in group
        )
        holders[0] = 0
        assert [holders[block] for block in range(len(pool.ref_counts))] == list(pool.ref_counts)
        assert sorted(pool.free) == [
            block for block, count in enumerate(pool.ref_counts) if count == 0 and block != 0
        ]
        found = {(block, key) for block, entry in pool.hashes.items() for key in entry.keys}
        assert found == {(b, key) for key, blocks in pool.blocks_by_hash.items() for b in blocks}
        queued = snap.running + snap.waiting + snap.skipped_waiting
        assert sorted(queued) == sorted(self.state.requests)
        assert set(snap.block_tables) == set(snap.running)
        assert cache.copies == ()
        for request in self.state.requests.values():
            assert request.num_output_placeholders >= 0
            assert request.num_in_flight_tokens >= request.num_stale_output_tokens >= 0

    def run(self, output):
        """Do what the plan says with marks instead of numbers."""
        for block in output.new_block_ids_to_zero:
            self.held[block] = {}
        for copy in output.kv_cache_block_copies:
            self.held[copy.dst_block_id] = dict(self.held.get(copy.src_block_id, {}))
        starts = self.follow(output)
        states = self.config.speculative is None
        size, aligned = self.config.cache.block_size, self.state.layout.is_aligned
        writes, reads = [], []
        for name, start in starts.items():
            end = start + output.num_scheduled_tokens[name]
            for group, row in zip(self.config.cache.groups, self.tables[name], strict=True):
                if group.layer_type == "full_attention":
                    writes += [(row[p // size], p % size, name, p) for p in range(start, end)]
                    reads += [(row[p // size], p % size, name, p) for p in range(end)]
                elif states:
                    if start > 0:
                        # A state is read when the step begins, before anybody writes.
                        entry = (start - 1) // size if aligned else 0
                        self.read(row[entry], "state", name, start - 1)
                    entry = (end - 1) // size if aligned else 0
                    writes.append((row[entry], "state", name, end - 1))
        for block, slot, name, position in writes:
            assert block != 0
            if slot == "state" or "state" in self.held.get(block, {}):
                self.held[block] = {}
            self.held.setdefault(block, {})[slot] = self.prefix(name, position)
        for read in reads:
            self.read(*read)

    def read(self, block, slot, name, position):
        assert block != 0
        assert self.held[block].get(slot) == self.prefix(name, position), (name, position)
        self.counts["reads"] += 1

    def follow(self, output):
        """Keep each row's table as a worker does; return the tokens computed before the step."""
        starts = {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.tables[new.req_id] = new.block_ids
        cached = output.scheduled_cached_reqs
        for name, start, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            starts[name] = start
            if name in cached.resumed_req_ids:
                self.tables[name] = blocks
            elif blocks is not None:
                self.tables[name] = tuple(
                    row + more for row, more in zip(self.tables[name], blocks, strict=True)
                )
        return starts

    def prefix(self, name, position):
        """A mark that is equal only for equal tokens up to a position."""
        chain, request = self.chains[name], self.requests[name]
        for index in range(len(chain), position + 1):
            token = (
                request.prompt_token_ids[index]
                if index < request.num_prompt_tokens
                else self.worker.token(name, index)
            )
            before = chain[-1] if chain else (request.cache_salt, request.lora_name)
            chain.append(hash((before, token)))
        return chain[position]

    def count(self, output, known):
        config = self.config.scheduler
        self.counts["steps"] += 1
        self.counts["preempting"] += bool(output.preempted_req_ids)
        self.counts["evicting"] += bool(known - set(self.state.cache.pool.hashes))
        self.counts["hits"] += sum(row.num_computed_tokens > 0 for row in output.scheduled_new_reqs)
        self.counts["copies"] += len(output.kv_cache_block_copies)
        self.counts["cleared"] += bool(output.new_block_ids_to_zero)
        self.counts["common"] += any(output.num_common_prefix_blocks)
        self.counts["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        self.counts["set aside"] += len(self.state.skipped_waiting)
        self.counts["split"] += sum(
            self.state.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens
        )
        self.counts["stuck"] += (
            not output.num_scheduled_tokens
            and bool(self.state.waiting)
            and not self.state.running
            and self.state.pause_state is PauseState.UNPAUSED
        )
        self.counts["padded"] += sum(
            -1 in drafts and not config.async_scheduling
            for drafts in output.scheduled_spec_decode_tokens.values()
        )


AT_LEAST = {
    "steps": 9000,
    "preempting": 300,
    "evicting": 500,
    "hits": 100,
    "copies": 20,
    "cleared": 1000,
    "common": 500,
    "resumed": 300,
    "set aside": 50,
    "split": 1000,
    "stale": 100,
    "rejected": 1000,
    "tokens": 5000,
    "padded": 5,
    "resets": 20,
}


@pytest.mark.parametrize("profile", ["vllm-0.27.1", "intended"])
def test_conservation(profile):
    quirks = Quirks() if profile == "intended" else Quirks.vllm_0_27_1()
    counts = Counter()
    for combination in matrix():
        for seed in SEEDS:
            config, workload = make_case(combination, seed, quirks)
            # With drafts in flight only the worker knows where a row stands.
            simple = config.speculative is None or not config.scheduler.async_scheduling
            watched = Watched(config, workload, simple and profile == "intended")
            try:
                for _ in drive(watched, workload, config):
                    pass
            except SchedulerDiedError:
                assert profile != "intended"
                counts["deaths"] += 1
            counts += watched.counts
    print(profile, dict(counts))
    too_few = {name: counts[name] for name, least in AT_LEAST.items() if counts[name] < least}
    assert not too_few
    if profile == "intended":
        assert counts["reads"] > 100_000


def test_progress_in_the_tightest_pool_a_request_is_accepted_for():
    counts = Counter()
    for combination in matrix()[::2]:
        config, workload = make_case(combination, 7, Quirks())
        workload = replace(workload, max_steps=3000, max_concurrent_batches=2)
        args = (config.scheduler, config.cache, config.speculative)
        needed = max(blocks_alone(request, *args) for request in workload.requests)
        spare = Random(str(combination)).choice((0, 0, 1, 3))
        cache = replace(config.cache, num_gpu_blocks=1 + needed + spare)
        config = replace(config, cache=cache)
        for request in workload.requests:
            check_request(request, config.scheduler, cache, config.speculative)
        watched = Watched(config, workload, False)
        for _ in drive(watched, workload, config):
            pass
        assert not watched.state.requests, str(combination)
        counts += watched.counts
    print(dict(counts))
    assert counts["preempting"] > 250
