"""The suite finds what a kernel can do wrong, told by stand-ins that need no Triton."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from servespec.conformance.cases.case import Case
from servespec.conformance.checks import kernels
from servespec.conformance.checks.guarded import Allocations, Memory
from servespec.conformance.verdicts import run_check
from servespec.conformance.workloads.kernels import OPERATIONS, KernelCase, make_kernel_case
from servespec.conformance.workloads.workload import Workload


def case(operation, **fields):
    return Case(
        suite="kernels",
        config=kernels._UNUSED,
        workload=Workload(steps=()),
        kernel=KernelCase(operation=operation, **fields),
    )


def verdict(whole, **operations):
    implementation = SimpleNamespace(make_kernels=lambda: operations)
    return run_check(kernels.SUITE.check, whole, implementation).divergence


def write_kv(key, value, key_pages, value_pages, slots):
    size = key_pages.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_pages[slot // size, slot % size] = key[token]
            value_pages[slot // size, slot % size] = value[token]


WRITES = case("write_kv", lengths=(5,), null_rows=True, gap=8, dim=32)


def test_a_right_answer_agrees():
    assert verdict(WRITES, write_kv=write_kv) is None
    greedy = lambda logits: logits.argmax(-1)  # noqa: E731
    assert verdict(case("greedy", lengths=(1, 1), contexts=(0, 0)), greedy=greedy) is None


def test_padding_that_is_written_shows():
    def wrong(key, value, key_pages, value_pages, slots):
        write_kv(key, value, key_pages, value_pages, slots)
        key_pages[int(slots.min()), 0] = 0.0

    assert verdict(WRITES, write_kv=wrong).field == "key_pages.memory"


def test_a_write_beside_the_tensor_shows():
    def wrong(key, value, key_pages, value_pages, slots):
        write_kv(key, value, key_pages, value_pages, slots)
        value_pages.as_strided((1,), (1,), value_pages.storage_offset() - 1)[0] = 0.0

    found = verdict(WRITES, write_kv=wrong)
    assert found.field == "value_pages.memory"
    assert "element -1 of the buffer" in found.got


def test_an_input_that_is_changed_shows():
    def wrong(logits):
        tokens = logits.argmax(-1)
        logits[0, 0] += 1.0
        return tokens

    assert verdict(case("greedy"), greedy=wrong).field == "logits.memory"


ALLOCATIONS = {
    "empty": lambda x, n: torch.empty(n, dtype=torch.int64),
    "empty_like": lambda x, n: torch.empty_like(x[:, 0], dtype=torch.int64),
    "empty_strided": lambda x, n: torch.empty_strided((n,), (1,), dtype=torch.int64),
    "new_empty": lambda x, n: x.new_empty(n, dtype=torch.int64),
    "zeros": lambda x, n: torch.zeros(n, dtype=torch.int64),
    "new_zeros": lambda x, n: x.new_zeros(n, dtype=torch.int64),
    "full": lambda x, n: torch.full((n,), 0),
    "clone": lambda x, n: x[:, 0].clone(),
    "to": lambda x, n: x[:, 0].to(torch.int64),
    "contiguous": lambda x, n: x[:, 0].contiguous(),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("past", [-1, 3])
def test_a_write_beside_what_the_launcher_allocated_shows(name, past):
    def launcher(logits, *, wrong):
        out = ALLOCATIONS[name](logits, len(logits))
        out.copy_(logits.argmax(-1))
        if wrong:
            out.as_strided((1,), (1,), out.storage_offset() + past)[0] = 7
        return out

    whole = case("greedy", lengths=(1, 1, 1), contexts=(0, 0, 0))
    assert verdict(whole, greedy=lambda x: launcher(x, wrong=False)) is None
    found = verdict(whole, greedy=lambda x: launcher(x, wrong=True))
    assert found.field == f"{name}[3].memory"
    assert f"element {past} of the buffer" in found.got


def test_an_element_that_is_left_unwritten_shows():
    def wrong(x):
        out = torch.empty_like(x, dtype=torch.float32)
        kept = out.flatten()[:-1]
        kept.copy_((x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).flatten()[:-1])
        return out

    found = verdict(case("l2_norm", lengths=(3,)), l2_norm=wrong)
    assert found.field == "l2_norm.l2_norm[2, 0, 31]"
    assert found.got == "nan"


def test_tensors_lie_where_the_kernels_run():
    seen = []
    implementation = SimpleNamespace(
        make_kernels=lambda: {"greedy": lambda logits: seen.append(logits.device.type)},
        kernel_device="meta",
    )
    assert run_check(kernels.SUITE.check, case("greedy"), implementation).divergence
    assert seen == ["meta"]


def test_allocations_keep_their_layout_and_values():
    memory = Memory(gap=0)
    strange = torch.zeros(4, 3, 2).permute(2, 0, 1)
    with Allocations(memory):
        like, scalar, none = torch.empty_like(strange), torch.zeros(()), torch.empty(0, 5)
        ones = torch.ones(2, 3, dtype=torch.bfloat16)
    assert (like.shape, like.stride()) == (strange.shape, torch.empty_like(strange).stride())
    assert like.isnan().all()
    assert scalar.item() == 0.0
    assert none.shape == (0, 5)
    assert torch.equal(ones, torch.ones(2, 3, dtype=torch.bfloat16))
    memory.check({})


def test_what_need_not_be_copied_is_not():
    x = torch.ones(2, 3)
    with Allocations(Memory(gap=0)):
        assert x.contiguous() is x
        assert x.to(torch.float32) is x
        assert x.clone().data_ptr() != x.data_ptr()


def test_a_read_of_what_nobody_wrote_shows():
    whole = case("paged_attention_decode", contexts=(20,), dim=32, block_size=16)

    def attend(query, key_pages, value_pages, table, lens, scale, extra, parts):
        block, n = table[0].long(), int(lens[0]) + extra
        k, v = (p[block].flatten(0, 1)[:n, 0] for p in (key_pages, value_pages))
        return ((query[:, 0] @ k.T * scale).softmax(-1) @ v)[:, None]

    right, wrong = (lambda *a, extra=e, parts: attend(*a, extra, parts) for e in (0, 1))
    assert verdict(whole, paged_attention_decode=right) is None
    found = verdict(whole, paged_attention_decode=wrong)
    assert found.field.startswith("paged_attention_decode.out")
    assert found.got == "nan"


def test_the_wrong_one_of_equal_maxima_shows():
    def last(logits):
        return logits.shape[1] - 1 - logits.flip(-1).argmax(-1)

    seeds = [verdict(case("greedy", seed=seed), greedy=last) for seed in range(40)]
    assert any(seeds)


def draw(logits, temperature, top_k, top_p, uniform, *, kept):
    """Sample in float64, with another rule of what stays."""
    tokens = []
    for row in range(len(logits)):
        weights = (logits[row].double() / temperature[row].double()).softmax(-1)
        weights *= kept[0](weights, int(top_k[row]))
        weights /= weights.sum()
        weights *= kept[1](weights, float(top_p[row]))
        running = (weights / weights.sum()).cumsum(0)
        tokens.append(int((running > float(uniform[row])).nonzero()[0]))
    return torch.tensor(tokens)


def all_equals(weights, k):
    return weights >= weights.topk(k).values[-1]


def k_of_them(weights, k):
    order = weights.argsort(descending=True, stable=True)
    return torch.zeros_like(weights).index_fill_(0, order[:k], 1.0)


def nucleus(weights, p, *, backwards=False):
    order = weights.flip(0) if backwards else weights
    order = order.argsort(descending=True, stable=True)
    order = len(order) - 1 - order if backwards else order
    falling = weights[order]
    return torch.zeros_like(weights).index_fill_(0, order[falling.cumsum(0) - falling < p], 1.0)


def nucleus_and_equals(weights, p):
    return weights >= weights[nucleus(weights, p) > 0].min()


@pytest.mark.parametrize(
    ("rules", "right"),
    [
        ((all_equals, nucleus), True),
        ((k_of_them, nucleus), False),
        ((all_equals, partial(nucleus, backwards=True)), False),
        ((all_equals, nucleus_and_equals), False),
        ((all_equals, lambda weights, p: 1.0), False),
    ],
)
def test_another_rule_of_sampling_shows(rules, right):
    sample = partial(draw, kept=rules)
    whole = [case("sample", lengths=(1,) * 8, contexts=(0,) * 8, seed=seed) for seed in range(20)]
    found = [verdict(one, sample=sample) for one in whole]
    assert not any(found) if right else any(f and f.place == "sample.tokens" for f in found)


def test_a_missing_operation_and_a_wrong_shape_are_failures_of_the_implementation():
    found = verdict(case("greedy"))
    assert found.failed
    assert "no operation 'greedy'" in str(found)
    found = verdict(case("greedy"), greedy=lambda logits: torch.zeros(7))
    assert found.failed
    assert "must be a tensor of (1,)" in str(found)


def test_cases_are_their_seeds_and_differ():
    assert make_kernel_case(3) == make_kernel_case(3)
    assert len({make_kernel_case(seed).operation for seed in range(200)}) == len(OPERATIONS)


@pytest.mark.parametrize(
    "fields", [{"dim": 33}, {"lengths": ()}, {"contexts": (1, 2)}, {"gap": -1}]
)
def test_impossible_cases_are_refused(fields):
    with pytest.raises(ValueError, match="KernelCase"):
        KernelCase(operation="greedy", **fields)
