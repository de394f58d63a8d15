"""The prims of random numbers: the published generator, and equal bits in ATen and in kernels."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from fxfuser.ops import philox, row

from .harness import interpret

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822]
INDEX = torch.cat([torch.arange(600), 2**33 + torch.arange(7), torch.tensor([2**62, 2**63 - 1])])


# of the authors' own test vectors (Random123, kat_vectors): counter, key, words
@pytest.mark.parametrize(("counter", "key", "words"), [
    (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
])
def test_known_answers(counter: int, key: int, words: str) -> None:
    made = philox._philox(torch.tensor(key), torch.tensor([counter]))
    assert " ".join(f"{int(w):08x}" for w in made) == words


def test_words_agree_with_plain_integers() -> None:
    seed, counter = -0x123456789ABCDEF0, 0x0FEDCBA987654321
    key, block = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    for _ in range(10):
        first, second = block[0] * 0xD2511F53, block[2] * 0xCD9E8D57
        block = [second >> 32 ^ block[1] ^ key[0], second & 0xFFFFFFFF, first >> 32 ^ block[3] ^ key[1],
                 first & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    assert [int(w) for w in philox._philox(torch.tensor(seed), torch.tensor([counter]))] == block


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prim", [philox.UNIFORM, philox.BITS])
def test_kernels_make_equal_bits(prim, seed: int) -> None:
    wanted = prim(torch.tensor(seed), INDEX)
    assert torch.equal(interpret(prim, (torch.tensor(seed), INDEX), {}, wanted), wanted)
    assert wanted.unique().numel() > 590


@pytest.mark.parametrize("seed", SEEDS)
def test_normal_numbers_agree(seed: int) -> None:
    wanted = philox.NORMAL(torch.tensor(seed), INDEX)
    got = interpret(philox.NORMAL, (torch.tensor(seed), INDEX), {}, wanted)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_number_follows_from_its_index_alone() -> None:
    seed, index = torch.tensor(5), torch.arange(101)
    for prim in philox.PRIMS:
        whole = prim(seed, index)
        assert torch.equal(whole[3::2], prim(seed, index[3::2]))
        assert torch.equal(whole.view(1, 101), prim(seed, index.view(1, 101)))
        assert not torch.equal(whole, prim(seed + 1, index))


def test_the_ends_of_the_range() -> None:
    uniform = philox.UNIFORM(torch.tensor(3), torch.arange(1 << 20))
    assert uniform.min() >= 0 and uniform.max() < 1 and uniform.min() < 1e-5 and uniform.max() > 1 - 1e-5
    assert philox.NORMAL(torch.tensor(3), torch.arange(1 << 20)).isfinite().all()


@pytest.mark.parametrize("prim", philox.PRIMS)
def test_prims_are_ops_of_pytorch(prim) -> None:
    opcheck(prim, (torch.tensor(3), torch.arange(6).view(2, 3)),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
    assert row(prim) is not None
