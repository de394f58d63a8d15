"""Products built for Hopper and Ampere with the tiles that they get: instructions, spills, shared memory, and the
instructions of the protocols by which parts meet."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from triton.backends.compiler import GPUTarget

from fxfuser.config import Config
from fxfuser.lowering.gemm.folded import MOST
from fxfuser.lowering.gemm.lower import lower_gemm
from fxfuser.lowering.kernel import Kernel
from fxfuser.ops.products import WIDE_PRODUCT as wide_product
from fxfuser.runtime.build import SHARED_LIMIT, Report, Variant, build, report

from .harness import made

Tensor = torch.Tensor
B = torch.bfloat16


def plain(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def lse(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w.t()).float()
    m = h.amax(1, keepdim=True)
    return (h - m).exp().sum(1, keepdim=True).log() + m


def logits_and_lse(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w.t()
    m = h.float().amax(1, keepdim=True)
    return h, (h.float() - m).exp().sum(1, keepdim=True).log() + m


def summed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = F.relu(x @ w.t())
    return h, h.sum(0)


def gelu_and_sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = F.gelu(x @ w.t())
    return h, h.sum(0)


def argmax(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).argmax(1)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.t() @ x


def rms_norm(h: Tensor) -> Tensor:
    wide = h.float()
    return torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)


def normalised(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> Tensor:
    h = res + x @ w.t()
    return (h.float() * rms_norm(h) * g).to(x.dtype) @ v.t()


def deferred(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> Tensor:
    h = res + x @ w.t()
    return (((h.float() * g).to(x.dtype) @ v.t()) * rms_norm(h)).to(x.dtype)


def deferred_mean(x: Tensor, w: Tensor, res: Tensor, v: Tensor, c: Tensor) -> Tensor:
    h = res + x @ w.t()
    mean = h.float().mean(-1, keepdim=True)
    distance = h.float() - mean
    scale = torch.rsqrt((distance * distance).sum(-1, keepdim=True) / h.shape[-1] + 1e-5)
    return (wide_product(h, v.t()) * scale - mean * scale * c).to(x.dtype)


BEHIND = [(12288, 768), (768, 768), (12288, 768), (3072, 768)]


def halves(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w.t()).chunk(2, -1)
    return F.silu(gate) * up


def neighbours(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w.t()
    return F.silu(h[:, ::2]) * h[:, 1::2]


def two_weights(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


SPILLS = {"two weights": 256}  # bytes, on Ampere, whose tensor cores take both factors from registers

FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "plain": (plain, [(4096, 1024), (4096, 1024)]),
    "activated": (activated, [(4096, 1024), (4096, 1024), (4096,)]),
    "logsumexp": (lse, [(4096, 1024), (50304, 1024)]),
    "logits and logsumexp": (logits_and_lse, [(2048, 768), (50304, 768)]),
    "summed": (summed, [(4096, 1024), (4096, 1024)]),
    "halves": (halves, [(8192, 1024), (8192, 1024)]),
    "neighbours": (neighbours, [(8192, 1024), (8192, 1024)]),
    "two weights": (two_weights, [(8192, 1024), (4096, 1024), (4096, 1024)]),
    "gelu and sums": (gelu_and_sums, [(8192, 1024), (4096, 1024)]),
    "argmax": (argmax, [(8192, 1024), (50304, 1024)]),
    "split": (weight_gradient, [(12288, 768), (12288, 768)]),
    "normalised": (normalised, [*BEHIND, (768,)]),
    "deferred": (deferred, [*BEHIND, (768,)]),
    "deferred_mean": (deferred_mean, [*BEHIND, (3072,)]),
    "bundles": (weight_gradient, [(65536, 256), (65536, 256)]),
}


@cache
def programs(name: str) -> dict[str, Kernel]:
    fn, shapes = FUNCTIONS[name]
    return {policy: p.launches[0].kernel
            for policy, p in made(fn, [torch.empty(s, dtype=B) for s in shapes], blocks=None).programs.items()}


def pointers_only(kernel: Kernel) -> Variant:
    """What a misaligned factor leaves."""
    usual = Variant.usual(kernel)
    return replace(usual, aligned=(False, *usual.aligned[1:]))


def built(kernel: Kernel, arch: int = 90, variant: Variant | None = None, spills: int = 0) -> Report:
    """The build of a kernel that takes no more than there is, and spills at most so many bytes."""
    found = report(kernel, arch, variant)
    assert found.spills <= spills and found.shared <= SHARED_LIMIT[arch]
    return found


@pytest.mark.parametrize("name, spills", [("plain", 0), ("logsumexp", 0), ("summed", 0), ("activated", 0)])
def test_hopper_moves_tiles_and_multiplies_in_warp_groups(name: str, spills: int) -> None:
    found = built(programs(name)["persistent"], spills=spills)
    assert "wgmma.mma_async" in found.ptx and "cp.async.bulk.tensor" in found.ptx
    stores = re.search(r"cp\.async\.bulk\.tensor\S*\.global\.shared", found.ptx) is not None
    assert stores == (name != "logsumexp"), "tiles are stored by descriptors too"


@pytest.mark.parametrize("name", ["normalised", "deferred", "deferred_mean"])
def test_a_product_behind_another_s_rows(name: str) -> None:
    """Statistics are combined beside a whole tile of accumulators; a computed factor goes to them from registers."""
    fn, shapes = FUNCTIONS[name]
    found = made(fn, [torch.empty(s, dtype=B) for s in shapes], blocks=None).lowered.programs[0]
    assert len(found.launches) == 2
    for launch in found.launches:
        ptx = built(launch.kernel).ptx
        assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx


def scaled_rows(x: Tensor, w: Tensor, r: Tensor, b: Tensor) -> Tensor:
    return torch.relu((x @ w.t()) * r[:, None] + b)


FUNCTIONS["scaled rows"] = (scaled_rows, [(4096, 1024), (4096, 1024), (4096,), (4096,)])


@pytest.mark.parametrize("name", ["normalised", "deferred", "deferred_mean", "scaled rows", "activated"])
def test_numbers_of_rows_and_columns_come_to_the_tile_and_not_the_tile_to_them(name: str) -> None:
    """No tile of a factor or of a strip goes from one layout to another by way of shared memory, as one that does is
    stored there and loaded in wide or in single elements, a dozen times at least.  Those of descriptors go by matrices
    (STSM and LDSM)."""
    fn, shapes = FUNCTIONS[name]
    programs = made(fn, [torch.empty(s, dtype=B) for s in shapes], blocks=None).lowered.programs
    for program in [p for p in programs if p.name.endswith("persistent")][:3]:
        for kernel in (launch.kernel for launch in program.launches if "MBLOCK" in dict(launch.kernel.tile.blocks)):
            for tile in (kernel.tile, *kernel.candidates[:2]):
                found = [op for op in instructions(replace(kernel, tile=tile)) if re.match(r"(STS|LDS)\.(U16|128)", op)]
                assert len(found) < 8, (kernel.name, str(tile), found)


@pytest.mark.parametrize("name", ["normalised", "deferred", "deferred_mean"])
def test_the_most_states_fit_beside_any_tile_of_a_second_product(name: str) -> None:
    fn, shapes = FUNCTIONS[name]
    wide = [tuple(2048 if n == 768 else n for n in s) for s in shapes]
    found = made(fn, [torch.empty(s, dtype=B) for s in wide], blocks=None).lowered.programs
    for program in (p for p in found[:5] if len(p.launches) == 2 and p.name.endswith("persistent")):
        kernel = program.launches[1].kernel
        states = dict(kernel.tile.blocks)["STATES"]
        assert states * sum(d is torch.float32 for d in kernel.inputs) in (MOST * 2 // 3, MOST)
        built(kernel)


def instructions(kernel: Kernel) -> list[str]:
    """What the assembler makes of the build for Hopper, by name, in order."""
    made = build(kernel, Variant.usual(kernel), GPUTarget("cuda", 90, 32))
    tool = Path(triton.knobs.nvidia.cuobjdump.path)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Zx0-9_.]*)", text, re.M)


def of_tile(kernel: Kernel, rows: int, columns: int) -> Kernel:
    """The kernel with a candidate of that size and eight warps, 128 fp32 of which are in each thread."""
    return replace(kernel, tile=next(t for t in (kernel.tile, *kernel.candidates) if t.num_warps == 8
                                     and dict(t.blocks)["MBLOCK"] == rows and dict(t.blocks)["NBLOCK"] == columns))


@pytest.mark.parametrize("name", ["halves", "neighbours"])
def test_two_dots_of_one_factor_are_one_chain_of_wide_instructions(name: str) -> None:
    found = instructions(of_tile(programs(name)["persistent"], 128, 128))
    chain = [i for i, op in enumerate(found) if op.startswith("HGMMA")]
    assert len(chain) == 4 and {found[i] for i in chain} == {"HGMMA.64x256x16.F32.BF16"}
    assert "WARPGROUP.DEPBAR.LE" not in found[chain[0]:chain[-1]]


def test_two_chains_do_not_wait_within_themselves() -> None:
    found = instructions(of_tile(programs("two weights")["persistent"], 128, 128))
    chain = [i for i, op in enumerate(found) if op.startswith("HGMMA")]
    assert len(chain) == 8 and "WARPGROUP.DEPBAR.LE" not in found[chain[0]:chain[-1]]


@pytest.mark.parametrize("name", ["logsumexp", "logits and logsumexp"])
def test_only_tiles_at_the_border_are_masked(name: str) -> None:
    """50304 columns are 196 tiles and a half.  A branch masks, and folds what it has masked; that the tensor cores' own
    registers leave no branch keeps their instructions in one chain."""
    found = instructions(of_tile(programs(name)["persistent"], 128, 256))
    chain = [i for i, op in enumerate(found) if op.startswith("HGMMA")]
    assert len(chain) == 4 and "WARPGROUP.DEPBAR.LE" not in found[chain[0]:chain[-1]]
    counts = Counter(op.partition(".")[0] for op in found)
    assert counts["MUFU"] >= 2 * 128 and 128 <= counts["FSEL"] < 160
    assert counts["FMNMX"] < 2 * 128 + 32 and counts["FADD"] < 4 * 128 + 32  # of each of the two: one, and two


def test_whole_tiles_have_no_branch() -> None:
    found = instructions(of_tile(programs("logsumexp")["persistent"], 256, 128))
    counts = Counter(op.partition(".")[0] for op in found)
    assert 128 <= counts["MUFU"] < 160 and counts["FSEL"] < 32


@pytest.mark.parametrize("name, most", [("argmax", 12), ("gelu and sums", 25)])
def test_instructions_of_an_epilogue(name: str, most: int) -> None:
    """All of a kernel over the elements of a tile that a thread has, the main loop included."""
    kernel = of_tile(programs(name)["persistent"], 128, 256)
    assert built(kernel).spills == 0
    found = instructions(kernel)
    assert len(found) <= most * 128
    assert sum(op.startswith("SHFL") for op in found) < 32, "sums of halves need no lane's help"


@pytest.mark.parametrize("name", ["plain", "logsumexp", "logits and logsumexp", "halves", "gelu and sums"])
def test_no_candidate_spills_or_leaves_its_multiprocessor_alone(name: str) -> None:
    kernel = programs(name)["persistent"]
    for tile in (kernel.tile, *kernel.candidates[:2]):
        found, resident = built(replace(kernel, tile=tile)), dict(tile.blocks)["RESIDENT"]
        assert resident * (found.shared + 1024) <= 228 * 1024
        assert resident * found.registers * tile.num_warps * 32 <= 65536


@pytest.mark.parametrize("name, spills", [("plain", 0), ("logsumexp", 128)])
def test_hopper_by_pointers(name: str, spills: int) -> None:
    kernel = programs(name)["persistent"]
    found = built(kernel, variant=pointers_only(kernel), spills=spills)
    assert "wgmma.mma_async" in found.ptx and "cp.async.bulk" not in found.ptx


@cache
def lowered_for(name: str, arch: int) -> dict[str, Kernel]:
    """The kernels that a device of this architecture gets."""
    fn, shapes = FUNCTIONS[name]
    segment = made(fn, [torch.empty(s, dtype=B) for s in shapes], blocks=None).segment
    return {p.name.removeprefix(f"{p.launches[0].kernel.name}_"): p.launches[0].kernel
            for p in lower_gemm(segment, Config(), {}, SHARED_LIMIT[arch]).programs}


@pytest.mark.parametrize("arch", [80, 86])
@pytest.mark.parametrize("name, policy", [
    ("plain", "persistent"), ("logsumexp", "persistent"), ("summed", "persistent"), ("gelu and sums", "persistent"),
    ("halves", "persistent"), ("two weights", "persistent"), ("argmax", "persistent"), ("split", "last_arriver")])
def test_ampere_builds_the_default_tile(name: str, policy: str, arch: int) -> None:
    found = built(lowered_for(name, arch)[policy], arch, spills=SPILLS.get(name, 0))
    assert "mma.sync" in found.ptx and "cp.async" in found.ptx and "cp.async.bulk" not in found.ptx


def test_every_candidate_fits_the_memory_that_there_is() -> None:
    kernel = lowered_for("gelu and sums", 86)["persistent"]
    for tile in (kernel.tile, *kernel.candidates):
        assert built(replace(kernel, tile=tile), 86, spills=1 << 12).shared <= SHARED_LIMIT[86]


SEMANTICS = ("acq_rel", "acquire", "release", "relaxed")


def memory_operations(ptx: str) -> list[str]:
    """Barriers, atomics by their semantics, loads and stores that bypass L1, as they stand in the text.

    An atomic that adds nothing may become a load of its semantics.
    """
    found = []
    for line in ptx.splitlines():
        if re.search(r"\bbar(rier)?\.sync", line):
            found.append("barrier")
        elif (atomic := re.search(r"\b(atom|ld)\.global\.[\w.]*gpu[\w.]*", line)) is not None:
            found += [s for s in SEMANTICS if s in atomic[0].split(".")]
        elif (access := re.search(r"\b(ld|st)\.global\S*\.cg\b", line)) is not None:
            found.append({"ld": "load", "st": "store"}[access[1]])
    return [op for i, op in enumerate(found) if i == 0 or op != found[i - 1]]


@pytest.mark.parametrize("policy, atomics, spills", [
    ("last_arriver", ["acq_rel"], 0), ("turnstile", ["acquire", "release", "release"], 128)])
def test_the_protocol_reaches_the_device(policy: str, atomics: list[str], spills: int) -> None:
    """Parts bypass L1.  A barrier stands between their stores and the atomic that publishes them, and another between
    the atomic that finds them and their loads, as the model in protocol.py has it: its result goes to all threads."""
    found = built(programs("split")[policy], spills=spills)
    assert "wgmma.mma_async" in found.ptx
    operations = memory_operations(found.ptx)
    assert [o for o in operations if o in SEMANTICS] == atomics
    store, load, publishes = operations.index("store"), operations.index("load"), atomics[0 if len(atomics) == 1 else 1]
    assert "barrier" in operations[store:operations.index(publishes, store)]
    assert "barrier" in operations[operations.index(atomics[0]):load]


def test_bundles_meet_behind_barriers_too() -> None:
    """Parts, a bundle and the whole: each is published by an atomic behind a barrier, and loads bypass L1."""
    kernel = programs("bundles")["last_arriver"]
    tile = next(t for t in (kernel.tile, *kernel.candidates) if dict(t.blocks)["JOIN"] < dict(t.blocks)["SPLITS"])
    operations = memory_operations(built(replace(kernel, tile=tile)).ptx)
    first, second = (i for i, o in enumerate(operations) if o in SEMANTICS)
    assert operations[first] == operations[second] == "acq_rel"
    for publishes, before in ((first, operations[:first]), (second, operations[first + 1:second])):
        assert before[-1] == "barrier" and "store" in before and "load" in operations[publishes:]
    assert "load" in operations[first:second]


@pytest.mark.parametrize("name", ["split", "bundles"])
def test_programs_behind_others_wait_and_read_wide(name: str) -> None:
    """Parts are published by an atomic behind a barrier, and awaited by an acquire with a barrier behind it.  Those who
    add them up load 16 bytes a thread past L1, or all that it has, many parts at once, and need no more than who leaves
    them."""
    both = programs(name)
    tile = both["one_grid"].tile
    each = min(4, dict(tile.blocks)["REST_XBLOCK"] // (32 * tile.num_warps))
    one, apart = built(both["one_grid"]), built(both["parts"])
    operations = memory_operations(one.ptx)
    semantics = [o for o in operations if o in SEMANTICS]
    assert semantics == ["release", "acquire", "relaxed"]
    arrives, waits = operations.index("release"), operations.index("acquire")
    assert operations[arrives - 1] == "barrier"
    assert operations[waits + 1] == "barrier" and "load" in operations[waits:]
    loads = re.findall(r"ld\.global\.cg\S*", one.ptx)
    assert each > 1 and loads and all(f".v{each}" in load for load in loads)
    assert len(loads) >= min(8, dict(tile.blocks)["SPLITS"])
    assert one.shared == apart.shared and one.registers <= apart.registers + 32


def decode(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x @ w.t()
    f = h.float()
    return h, (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-6)).to(B)


@pytest.mark.parametrize("rows", [1, 16])
def test_decoding_reads_wide_and_spills_nothing(rows: int) -> None:
    """Copies of 16 bytes feed the tensor cores, or each thread loads as many; parts are read by 16 bytes."""
    shapes = [(rows, 4096), (4096, 4096), (rows, 4096)]
    program = made(decode, [torch.empty(s, dtype=B) for s in shapes], blocks=None).programs["parts"]
    first, second = (built(launch.kernel) for launch in program.launches)
    loads = [re.findall(r"ld\.global\S*", r.ptx) for r in (first, second)]
    assert loads[1] and all(".v4" in load for load in loads[1])
    if rows == 1:
        assert loads[0] and all(".v4" in load for load in loads[0])
    else:
        copies = re.findall(r"cp\.async\.c[ag]\S*.*", first.ptx)
        assert copies and all(", 0x10" in copy for copy in copies) and "mma.sync" in first.ptx and not loads[0]


@pytest.mark.parametrize("policy, described", [
    ("persistent", True), ("last_arriver", False), ("turnstile", False), ("parts", False), ("one_grid", False)])
def test_programs_of_one_part_make_no_descriptors(policy: str, described: bool) -> None:
    """Each would make its own first, for one tile; whatever tile is chosen, and nobody asks whether they can be had."""
    kernel = programs("bundles")[policy]
    assert ("make_tensor_descriptor" in kernel.source) == ("DESCRIPTORS" in kernel.source) == described
    assert (kernel.aligned is not None) == described


@pytest.mark.parametrize("fn", [lse, argmax])
@pytest.mark.parametrize("rows", [1024, 12288])
def test_states_are_combined_from_registers(fn: Callable[..., Any], rows: int) -> None:
    """Many programs, each thread with few states, so that nothing is spilled."""
    args = [torch.empty(rows, 768, dtype=B), torch.empty(50304, 768, dtype=B)]
    finish = made(fn, args, blocks=None).lowered.programs[0].launches[1].kernel
    found = report(finish)
    assert found.spills == 0 and found.registers <= 96
    assert -(-rows // dict(finish.tile.blocks)["XBLOCK"]) >= 64


def test_tiles_that_divide_the_columns_have_no_masks() -> None:
    """Selects in the built kernel: those of the statistics alone are gone where 128 columns divide the row."""
    def selects(columns: int) -> int:
        args = [torch.empty(1024, 256, dtype=B), torch.empty(columns, 256, dtype=B)]
        kernel = made(lse, args, blocks=None).lowered.programs[0].launches[0].kernel
        ptx = report(replace(kernel, tile=replace(kernel.tile, blocks=tuple(
            (n, 128 if n in ("NBLOCK", "STRIPBLOCK", "MBLOCK") else v) for n, v in kernel.tile.blocks)))).ptx
        return ptx.count("selp.f32")

    assert selects(50304) + 128 <= selects(50320)
