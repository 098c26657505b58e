"""Oddities of one vLLM release and of the Ascend backend, each a switch of its own."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Quirks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """Oddities of one vLLM release, each a switch of its own.

    `Quirks.vllm_0_27_1()` has all of them on and is the profile ``vllm-0.27.1``; `Quirks()` has
    them off and is the profile ``intended``. Issue numbers are of vllm-project/vllm.

    Attributes
    ----------
    priority_victim_skips_next : bool
        A preemption victim that stands earlier in ``running`` and was skipped in this step shifts
        the list without moving the loop index, so the next request loses a step (#49097).
    victim_tie_ignores_id : bool
        Among requests of equal priority and arrival the preemption victim is the one admitted
        first, though the queue orders them by id: two such requests can preempt each other for
        ever (no public report known).
    negative_schedule : bool
        A request whose computed count already reached ``max_model_len`` is scheduled with a
        negative number of tokens, because the loop tests for zero only (#53962).
    padded_admission_cut_late : bool
        Draft padding of a newly admitted request is fixed before the chunk is cut by the
        threshold or the block-aligned split (#54392).
    finish_in_set_order : bool
        ``finish_requests`` frees a collection of ids in the order of a Python set, not in the
        order given.
    min_tokens_outlive_model_len : bool
        A request that cannot reach ``min_tokens`` within ``max_model_len`` never ends and keeps
        its blocks (#51299).
    aligned_split_starves : bool
        With GDN states at block boundaries a prefill gets no token while the budget left is short
        of a block, however many steps that lasts, and holds up everybody behind it (#45414,
        #40707).
    preempted_step_stays_cached : bool
        A request that is preempted after it was scheduled in the same step leaves the hashes of
        blocks that nobody will compute, and later requests, itself first, hit them (no public
        report known).
    overwritten_tail_published : bool
        The GDN state inside the prompt's last block is published whenever the known tokens end
        there, also when the step scheduled runs on beyond them (it awaits tokens in flight, or
        has drafts) and overwrites the state, and later requests hit it; if the state has been
        freed meanwhile, the scheduler dies (no public report known; only with
        ``prefix_match_unit``).
    skipped_states_leak : bool
        With steps in flight a prefill whose chunks span several GDN blocks forgets the states
        between them, whose blocks stay held until the request ends; a long prompt can fill the
        pool with them (no public report known).
    gdn_fresh_decode : bool
        A GDN layer takes every leading one-token row for a decode, also one that is still in its
        prompt, so a request's very first chunk can read the state its block held before (#51562).
    gdn_ignores_accepted : bool
        A row without drafts starts from its first state column even if the step before accepted
        drafts and left the state in a later one.
    gdn_forgets_accepted : bool
        A request that a step left out is put back with an accepted count of one.
    gdn_packed_state_index : bool
        The recurrent form of rows with drafts finds a token's state block at the token's position
        in the flattened block list, which is right only if every such row has all its drafts.
    """

    priority_victim_skips_next: bool = False
    victim_tie_ignores_id: bool = False
    negative_schedule: bool = False
    padded_admission_cut_late: bool = False
    finish_in_set_order: bool = False
    min_tokens_outlive_model_len: bool = False
    aligned_split_starves: bool = False
    preempted_step_stays_cached: bool = False
    overwritten_tail_published: bool = False
    skipped_states_leak: bool = False
    gdn_fresh_decode: bool = False
    gdn_ignores_accepted: bool = False
    gdn_forgets_accepted: bool = False
    gdn_packed_state_index: bool = False

    @classmethod
    def vllm_0_27_1(cls) -> Quirks:
        """All oddities of vLLM 0.27.1."""
        return cls(
            priority_victim_skips_next=True,
            victim_tie_ignores_id=True,
            negative_schedule=True,
            padded_admission_cut_late=True,
            finish_in_set_order=True,
            min_tokens_outlive_model_len=True,
            aligned_split_starves=True,
            preempted_step_stays_cached=True,
            overwritten_tail_published=True,
            skipped_states_leak=True,
            gdn_fresh_decode=True,
            gdn_ignores_accepted=True,
            gdn_forgets_accepted=True,
            gdn_packed_state_index=True,
        )
