"""Edits of MLIR text, which need no compiler."""

from __future__ import annotations

import pytest

from servespec.fast.backends.base import CompileError
from servespec.fast.backends.cpu import library, lowering, products

BROADCAST = (
    "    %3 = linalg.broadcast ins(%1 : tensor<4xf32>) outs(%2 : tensor<8x4xf32>) dimensions = [0] "
)


def test_a_broadcast_is_cloned_for_each_use():
    module = "\n".join(
        [BROADCAST, "    %4 = arith.mulf %0, %3 : tensor<8x4xf32>", "    %5 = use %3, %3"]
    )
    lines = lowering._clone_broadcasts(module).split("\n")
    clones = [line.split(" = ")[0].strip() for line in lines if "clone" in line.split(" = ")[0]]
    assert len(clones) == len(set(clones)) == 2
    assert f"arith.mulf %0, {clones[0]} " in lines[2]
    assert f"use {clones[1]}, {clones[1]}" in lines[4]


def test_a_name_used_again_for_something_else_is_left_alone():
    module = "\n".join([BROADCAST, "    %3 = arith.select %a, %b, %c : i32", "    %4 = use %3"])
    assert lowering._clone_broadcasts(module) == module


def test_only_reductions_may_be_reassociated():
    module = """\
    %9 = arith.addf %7, %8 : f32
    %r = linalg.reduce ins(%x : tensor<8x4xf32>) outs(%y : tensor<8xf32>) dimensions = [1]
      (%in: f32, %init: f32) {
        %1 = arith.addf %in, %init : f32
        linalg.yield %1 : f32
      }
"""
    lowered = lowering._generalize(module)
    assert "%9 = arith.addf %7, %8 : f32" in lowered
    assert "arith.addf %in, %init fastmath<reassoc,contract> : f32" in lowered
    assert 'iterator_types = ["parallel", "reduction"]' in lowered
    assert "} -> tensor<8xf32>" in lowered


def test_buffers_move_to_the_entry_under_names():
    module = (
        "define void @f(ptr %0) {\n  br label %2\n\n2:\n  %3 = alloca float, i64 64, align 64\n"
        "  store float 0.0, ptr %3\n  %33 = load float, ptr %3\n  ret void\n}\n"
    )
    lines = lowering._allocate_at_entry(module).split("\n")
    assert lines[1] == "  %buffer3 = alloca float, i64 64, align 64"
    assert "  store float 0.0, ptr %buffer3" in lines
    assert "  %33 = load float, ptr %buffer3" in lines


def test_products_of_both_kinds_become_loops():
    for name, right in (("matmul", "16x64"), ("matmul_transpose_b", "64x16")):
        module = (
            f"linalg.{name} ins(%a, %b#1 : memref<4x16xbf16>, memref<{right}xbf16>)"
            " outs(%c : memref<4x64xf32>)"
        )
        loops = products.spell_out(module)
        assert "linalg" not in loops
        assert loops.count("scf.for") == (3 if name == "matmul" else 2)
        assert loops.count("{") == loops.count("}")
        assert "%b#1" in loops
        assert "arith.extf" in loops


def test_an_unknown_library_function_is_named():
    module = "  func.func private @triton_fft(tensor<4xf32>) -> tensor<4xf32>"
    with pytest.raises(CompileError, match="triton_fft"):
        library.add_bodies(module)
