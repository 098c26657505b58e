"""servespec compile: what fails, what passes, and how they are told apart."""

from __future__ import annotations

import re

import pytest

from servespec.conformance import compile as compiling
from servespec.conformance.launches import Launch, configurations

OVERFLOW = """\
loc("k.mlir":1:1): warning: failed to tile
[NOTE] Ub overflow detected; retrying
error: ub overflow, requires 67108864 bits while 1572864 bits available!
error: Cannot find hivmc
"""


def test_reasons_are_the_compilers_errors_alone():
    assert compiling._reason(OVERFLOW) == (
        "error: ub overflow, requires 67108864 bits while 1572864 bits available!"
    )


def test_memory_is_the_highest_end_of_a_buffer():
    module = """\
  %c0 = arith.constant 0 : i64
  %c512 = arith.constant 512 : i64
  %0 = hivm.hir.pointer_cast(%c0) : memref<16x8xf32, #hivm.address_space<ub>>
  %1 = hivm.hir.pointer_cast(%c512) : memref<64xbf16, #hivm.address_space<ub>>
  %2 = hivm.hir.pointer_cast(%c0) : memref<4x16x16xf32, #hivm.address_space<cc>>
"""
    assert compiling._used(module) == {"ub": 512 + 128, "cc": 4096}


def test_an_unknown_target_and_a_missing_compiler_are_told(monkeypatch):
    with pytest.raises(ValueError, match="unknown target 'Ascend310': must be one of"):
        list(compiling.compile_all([], ["Ascend310"]))
    monkeypatch.setattr("servespec.fast.backends.registry._has", lambda name: False)
    with pytest.raises(ValueError, match="the Ascend compiler is not here: triton-ascend"):
        compiling.compile_kernels((), ())


def test_configurations_cover_what_models_need():
    names = [(c.operation, c.name) for c in configurations()]
    assert len(set(names)) == len(names)
    for dim in (64, 128, 256):
        for page in (16, 128):
            for kind in ("bf16", "fp32"):
                assert ("paged_attention_decode", f"D={dim} page={page} {kind}") in names
            for operation in ("int8_attention_decode", "int8_varlen_attention"):
                assert (operation, f"D={dim} page={page} int8") in names


@pytest.fixture
def vadd(tmp_path):
    pytest.importorskip("ascendnpuir", reason="needs the extra cpu")
    triton = pytest.importorskip("triton", reason="needs the extra cpu")
    if "ascend" not in triton.backends.backends:
        pytest.skip("needs triton-ascend: extra cpu")
    import kernel_of_test_compile as module  # type: ignore[import-not-found]

    return module.add


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "kernel_of_test_compile.py").write_text(
        "import triton\n"
        "import triton.language as tl\n"
        "@triton.jit\n"
        "def add(X, O, n, BLOCK: tl.constexpr):\n"
        "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(O + i, tl.load(X + i, mask=i < n) + 1.0, mask=i < n)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("target", compiling.TARGETS)
def test_a_kernel_that_overflows_fails_with_the_reason_and_one_that_fits_does_not(vadd, target):
    def run(block):
        types = {"X": "*fp32", "O": "*fp32", "n": "i32"}
        launch = Launch(kernel=vadd, types=types, constants={"BLOCK": block})
        return compiling.compile_launch(launch, target, "add", f"BLOCK={block}")

    fits = run(1024)
    assert fits.ok, fits.reason
    assert 4096 <= fits.memory["ub"].used <= fits.memory["ub"].available
    overflows = run(1 << 20)
    assert not overflows.ok
    assert "overflow" in overflows.reason
    assert not overflows.memory


# Of A2 and A3 the loop is still one; of A5 it is blocks of a control flow graph.
LOOP = r"""
(?P<plane>%\d+)\ =\ \w+\.muli?\ {x},\ {y}\ :\ i32\s+
(?P<total>%\d+)\ =\ \w+\.muli?\ (?P=plane),\ {z}\ :\ i32\s+
(?P<index>%\d+)\ =\ hivm\.hir\.get_block_idx\ ->\ i64\s+
(?P<first>%\d+)\ =\ \w+\.trunci?\ (?P=index)\ :\ i64\ to\ i32\n
.*?(?:
    scf\.for\ %\w+\ =\ (?P=first)\ to\ (?P=total)\ step\ %c{cores}_i32
|
    cf\.br\ (?P<head>\^bb\d+)\((?P=first)\ :\ i32\)\s+
    (?P=head)\((?P<current>%\d+):\ i32\):[^\n]*\s+
    %\d+\ =\ arith\.cmpi\ slt,\ (?P=current),\ (?P=total)\ :\ i32\n
    .*?(?P<next>%\d+)\ =\ arith\.addi\ (?P=current),\ {step}\ [^\n]*\s+
    cf\.br\ (?P=head)\((?P=next)\ :\ i32\)
)"""


CORES = (("Ascend910B3", 40), ("Ascend910_9391", 48), ("Ascend950PR_9589", 64))


@pytest.mark.parametrize(("target", "cores"), CORES)
def test_a_grid_of_any_size_becomes_a_loop_over_all_its_axes(vadd, target, cores, monkeypatch):
    modules = []

    def used(module, real=compiling._used):
        modules.append(module)
        return real(module)

    monkeypatch.setattr(compiling, "_used", used)
    types = {"X": "*fp32", "O": "*fp32", "n": "i32"}
    launch = Launch(kernel=vadd, types=types, constants={"BLOCK": 1024})
    assert compiling.compile_launch(launch, target, "add", "").ok
    function = modules[0][modules[0].index("func.func @add(") :]
    # The last three arguments are the extents of the grid.
    arguments = re.findall(r"(%arg\d+): i32", function.partition(") attributes")[0])
    constant = re.search(rf"(%\d+) = llvm\.mlir\.constant\({cores} : i32\)", function)
    loop = LOOP.format(
        **dict(zip("xyz", arguments[-3:], strict=True)),
        cores=cores,
        step=constant.group(1) if constant else "none",
    )
    assert re.search(loop, function, re.VERBOSE | re.DOTALL)
