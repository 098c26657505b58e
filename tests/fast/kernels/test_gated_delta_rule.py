"""Both forms of the gated delta rule against the recurrence in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from servespec.fast.kernels.chunk_gated_delta_rule import chunk_gated_delta_rule, plan_chunks
from servespec.fast.kernels.gated_delta_rule import (
    evenly_spaced,
    gated_delta_rule_decode,
    gating,
)

U = 2.0**-24
ELEMENTS = 4 * (8 + 6)


class Rows:
    """Random normed inputs of packed rows, and states in a poisoned memory."""

    def __init__(
        self,
        seed: int,
        lengths: list[int],
        *,
        key_heads: int = 2,
        value_heads: int = 4,
        dk: int = 8,
        dv: int = 6,
        decay: float = 1.0,
        slots: list[int] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        tokens = sum(lengths)
        self.q = torch.nn.functional.normalize(torch.randn(tokens, key_heads, dk), dim=-1)
        self.q *= dk**-0.5
        self.k = torch.nn.functional.normalize(torch.randn(tokens, key_heads, dk), dim=-1)
        self.v = torch.randn(tokens, value_heads, dv)
        self.g = -decay * torch.rand(tokens, value_heads) ** 4
        self.beta = torch.rand(tokens, value_heads)
        count = max(20, len(lengths) + 5)
        matrix = value_heads * dv * dk
        pages = torch.full((count, matrix + 9), math.nan)
        self.states = pages[:, :matrix].view(count, value_heads, dv, dk)
        self.slots = torch.tensor(slots or torch.randperm(count)[: len(lengths)].tolist())
        self.states[self.slots] = torch.randn(len(lengths), value_heads, dv, dk)
        self.before = self.states.clone()
        self.starts = torch.tensor([0, *itertools.accumulate(lengths)])

    def row(self, row: int):
        """Outputs and final state by the recurrence, and what bounds the error.

        Per token the state is multiplied by exp(g) and by (1 - beta k kT), neither of which
        lengthens it since |k| = 1, and gains beta v kT; so errors only add up. Each token brings a
        product over dk and a handful of roundings, each of at most u (|S| + |v|). They are as good
        as independent, so T tokens bring sqrt(T (dk + 8)) of them, and 6 standard deviations are
        allowed for the largest of thousands.
        """
        part = slice(int(self.starts[row]), int(self.starts[row + 1]))
        share = self.v.shape[1] // self.k.shape[1]
        q, k = (x[part].double().repeat_interleave(share, dim=1) for x in (self.q, self.k))
        v, g, beta = (x[part].double() for x in (self.v, self.g, self.beta))
        state = self.before[self.slots[row]].double()
        outputs, sizes = [], [float(state.norm(dim=(1, 2)).max())]
        for t in range(len(q)):
            state = state * g[t].exp()[:, None, None]
            update = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + torch.einsum("hv,hk->hvk", update, k[t])
            outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
            sizes.append(float(state.norm(dim=(1, 2)).max()))
        size = max(sizes) + float(v.norm(dim=-1).max())
        error = 6 * math.sqrt((len(q) + 1) * (q.shape[-1] + 8)) * U * size
        return part, torch.stack(outputs), state, error

    def conditioning(self, size: int = 64) -> float:
        """How much solving the chunks' systems may enlarge a relative error.

        Substitution in a unit triangular T of n rows is off by at most n u |inv(T)| |T| |x|.
        """
        worst = 1.0
        share = self.v.shape[1] // self.k.shape[1]
        k = self.k.double().repeat_interleave(share, dim=1).transpose(0, 1)
        for start, end in itertools.pairwise(self.starts.tolist()):
            for first in range(start, end, size):
                part = slice(first, min(first + size, end))
                total = self.g[part].double().cumsum(0).T
                ratio = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
                gram = k[:, part] @ k[:, part].mT * ratio
                system = (gram * self.beta[part].double().T[:, :, None]).tril(-1)
                system = system + torch.eye(system.shape[-1], dtype=torch.float64)
                factor = torch.linalg.inv(system).abs() @ system.abs()
                worst = max(worst, float(factor.sum(-1).max()))
        return worst

    def check(self, out: torch.Tensor, factor: float = 1.0) -> None:
        worst = 0.0
        for row, slot in enumerate(self.slots):
            part, expected, state, bound = self.row(row)
            bound *= factor
            worst = max(
                worst,
                float((out[part].double() - expected).abs().max()) / bound,
                float((self.states[slot].double() - state).abs().max()) / bound,
            )
        assert worst <= 1.0, worst
        untouched = [s for s in range(len(self.states)) if s not in self.slots.tolist()]
        assert bool(self.states[untouched].isnan().all())


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 4), (1, 3)])
def test_decode(rows, key_heads, value_heads):
    case = Rows(rows, [1] * rows, key_heads=key_heads, value_heads=value_heads)
    out = gated_delta_rule_decode(
        case.q, case.k, case.v, case.g, case.beta, case.states, case.slots
    )
    case.check(out)


SLOTS = {
    "side by side": ([3, 4, 5, 6, 7], slice(3, 8, 1)),
    "evenly spaced": ([1, 4, 7, 10, 13, 16, 19], slice(1, 20, 3)),
    "almost": ([2, 3, 4, 5, 6, 15, 11], None),
    "descending": ([9, 7, 5], None),
    "one row": ([5], slice(5, 6, 1)),
}


@pytest.mark.parametrize("most", [0, 1 << 19], ids=["by head", "together"])
@pytest.mark.parametrize("name", SLOTS)
def test_decode_where_the_states_lie(monkeypatch, name, most):
    monkeypatch.setattr("servespec.fast.kernels.gated_delta_rule._MAX_TOGETHER", most)
    slots, span = SLOTS[name]
    case = Rows(1, [1] * len(slots), slots=slots)
    assert evenly_spaced(case.slots) == span
    inputs = (case.q, case.k, case.v, case.g, case.beta, case.states, case.slots)
    case.check(gated_delta_rule_decode(*inputs, span))


def test_no_slots_are_not_evenly_spaced():
    assert evenly_spaced(torch.empty(0, dtype=torch.int64)) is None


@pytest.mark.parametrize("decay", [0.0, 1.0, 60.0])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (1, 3)])
@pytest.mark.parametrize("elements", [ELEMENTS, 1200, 10**9])
def test_chunks_of_random_rows(key_heads, value_heads, decay, elements):
    rng = np.random.default_rng(17)
    sizes = set()
    for seed in range(6):
        lengths = rng.choice([1, 2, 5, 15, 16, 40, 63, 64, 65, 128, 200], rng.integers(1, 6))
        case = Rows(
            seed, lengths.tolist(), key_heads=key_heads, value_heads=value_heads, decay=decay
        )
        plan = plan_chunks(case.starts, elements)
        sizes |= {rows.segments[0].tokens.shape[1] for rows in plan.batches}
        out = chunk_gated_delta_rule(
            case.q, case.k, case.v, case.g, case.beta, case.states, case.slots, plan
        )
        case.check(out, case.conditioning())
    assert sizes >= {4, 8, 16, 64}


def test_strong_decay_never_overflows():
    # exp(-sum g) over 64 tokens would be exp(3840).
    case = Rows(0, [130], decay=0.0)
    case.g.fill_(-60.0)
    out = chunk_gated_delta_rule(
        case.q,
        case.k,
        case.v,
        case.g,
        case.beta,
        case.states,
        case.slots,
        plan_chunks(case.starts, ELEMENTS),
    )
    case.check(out, case.conditioning())


def test_infinities_of_one_row_stay_there():
    case = Rows(2, [3, 70, 5])
    part = slice(3, 73)
    case.v[part] = math.inf
    out = chunk_gated_delta_rule(
        case.q,
        case.k,
        case.v,
        case.g,
        case.beta,
        case.states,
        case.slots,
        plan_chunks(case.starts, ELEMENTS),
    )
    assert bool(out[:3].isfinite().all())
    assert bool(out[73:].isfinite().all())
    assert bool(case.states[case.slots[[0, 2]]].isfinite().all())


def test_the_work_of_short_rows_is_in_proportion_to_their_tokens():
    lengths = [1, 2, 3, 5, 9, 17, 33, 65, 700]
    plan = plan_chunks(torch.tensor([0, *itertools.accumulate(lengths)]), ELEMENTS)
    places = sum(s.tokens.numel() for rows in plan.batches for s in rows.segments)
    # A row below 64 tokens is padded to a power of two, at least 4; others to multiples of 64.
    assert places == 4 + 4 + 4 + 8 + 16 + 32 + 64 + 128 + 704


def test_gating():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(50, 3) * 20).to(dtype), torch.randn(50, 3).to(dtype)
        a_log, dt_bias = torch.randn(3), torch.randn(3)
        g, beta = gating(a, b, -a_log.exp(), dt_bias)
        x = a.double() + dt_bias.double()
        softplus = torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)
        expected = -a_log.double().exp() * softplus
        # torch's softplus leaves out log1p(exp(-x)) beyond x = 20, which is below exp(-20); the
        # sum a + dt_bias is off by u of its terms, with a slope of at most 1.
        bound = a_log.double().exp() * (2e-9 + 4 * U * (a.double().abs() + dt_bias.abs() + 1))
        bound += 8 * U * expected.abs()
        assert bool(((g.double() - expected).abs() <= bound).all())
        assert bool(((beta.double() - b.double().sigmoid()).abs() <= 8 * U).all())
        assert g.dtype == beta.dtype == torch.float32
