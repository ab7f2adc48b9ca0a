"""Keyed randomness, against SplitMix64 in plain integers."""

import math
import zlib

import numpy as np
import pytest
import torch

from fedloom.core.keys import bits, fold, normal, permutations, rng, root, stream, uniform

WORD = 2**64
KEYS = [0, 1, -1, 1234567, 2**63 - 1, -(2**63), -6457827717110365317]
IDS = [0, 1, 2, 63, 10**6, 2**40 + 3, -1, 2**63 - 1]


def mix(z):
    """SplitMix64's output function (Steele, Lea, Flood 2014), on numbers from 0 to 2^64 - 1."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
    return z ^ (z >> 31)


def splitmix(seed, count):
    """The first outputs of SplitMix64 from a seed."""
    return [mix((seed + (j + 1) * 0x9E3779B97F4A7C15) % WORD) for j in range(count)]


def plain_fold(key, i):
    """The definition: mix(key xor mix(i + golden))."""
    return mix((key % WORD) ^ mix((i + 0x9E3779B97F4A7C15) % WORD))


def unsigned(values):
    return [v % WORD for v in values]


def key(value):
    return torch.tensor(value, dtype=torch.int64)


# -- the generator


def test_bits_are_the_published_sequence_of_splitmix64():
    # the sequence of seed 1234567 by which implementations are checked (Rosetta Code, "Splitmix64")
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix(1234567, 5) == published
    assert unsigned(bits(key(1234567), torch.arange(5)).tolist()) == published


@pytest.mark.parametrize("seed", KEYS)
def test_bits_equal_splitmix64_in_plain_integers_for_keys_of_any_sign(seed):
    assert unsigned(bits(key(seed), torch.arange(200)).tolist()) == splitmix(seed, 200)


def test_streams_are_named_by_crc32_and_host_generators_by_seed_stream_and_ids():
    assert stream("batch") == zlib.crc32(b"batch")
    expected = np.random.default_rng([3, zlib.crc32(b"sample"), 7, 8]).random(4)
    np.testing.assert_array_equal(rng("sample", 3, 7, 8).random(4), expected)


# -- folding


@pytest.mark.parametrize("k", KEYS)
@pytest.mark.parametrize("i", IDS)
def test_folding_integers_equals_the_definition_and_fits_in_64_bits(k, i):
    found = fold(k, i)
    assert found % WORD == plain_fold(k, i)
    assert -(2**63) <= found < 2**63


def test_folding_gives_the_same_for_integers_and_tensors_in_all_combinations():
    for k in KEYS:
        expected = [fold(k, i) for i in IDS]
        assert fold(k, torch.tensor(IDS)).tolist() == expected
        assert fold(key(k), torch.tensor(IDS)).tolist() == expected
        assert [int(fold(key(k), i)) for i in IDS] == expected
    for i in IDS:
        assert fold(torch.tensor(KEYS), i).tolist() == [fold(k, i) for k in KEYS]


def test_folding_broadcasts_keys_over_ids():
    for make in (torch.tensor, np.array):
        found = fold(make(KEYS)[:, None], make(IDS))
        assert found.tolist() == [[fold(k, i) for i in IDS] for k in KEYS]


def test_folding_several_ids_is_folding_one_after_another():
    assert fold(5, 1, 2, 3) == fold(fold(fold(5, 1), 2), 3)
    assert fold(5, 1, 2) != fold(5, 2, 1)
    assert fold(5) == 5


def test_folding_small_keys_and_ids_gives_no_two_alike():
    assert len({fold(k, i, j) for k in range(20) for i in range(20) for j in range(20)}) == 8000


def test_roots_differ_by_seed_and_by_name():
    assert root(1, "batch") % WORD == plain_fold(mix(1), zlib.crc32(b"batch"))
    assert len({root(seed, name) for seed in range(100) for name in ("init", "batch", "noise", "sample")}) == 400


# -- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_the_upper_24_bits_as_a_fraction(dtype):
    found = uniform(key(42), (3, 4), dtype)
    assert found.dtype == dtype
    # 24 bits fit the fraction of a float32, so both types give the same numbers, below 1
    assert found.flatten().tolist() == [(z >> 40) / 2**24 for z in splitmix(42, 12)]


def test_uniform_is_in_0_to_1_with_the_mean_and_variance_of_a_uniform():
    u = uniform(key(7), (200_000,), torch.float64)
    assert u.min() >= 0
    assert u.max() < 1
    # standard errors: of the mean 1/sqrt(12 n) = 6.5e-4, of the variance 1/sqrt(180 n) = 1.7e-4; bounds at four
    assert float(u.mean()) == pytest.approx(1 / 2, abs=2.6e-3)
    assert float(u.var()) == pytest.approx(1 / 12, abs=7e-4)
    # every tenth gets its tenth: standard deviation sqrt(n * 0.09) = 134
    assert np.abs(np.histogram(u.numpy(), 10, (0, 1))[0] - 20_000).max() < 540


def test_normal_has_the_moments_of_a_standard_normal():
    z = normal(key(7), (200_000,), torch.float64)
    assert torch.isfinite(z).all()
    # standard errors: mean 1/sqrt(n) = 2.2e-3, variance sqrt(2/n) = 3.2e-3, fourth moment sqrt(96/n) = 0.022; at four
    assert float(z.mean()) == pytest.approx(0, abs=9e-3)
    assert float(z.var()) == pytest.approx(1, abs=1.3e-2)
    assert float((z**4).mean()) == pytest.approx(3, abs=0.09)
    assert float((z.abs() < 1).double().mean()) == pytest.approx(math.erf(1 / math.sqrt(2)), abs=4.2e-3)


def test_numbers_of_neighbouring_keys_and_neighbouring_counters_are_uncorrelated():
    n = 100_000
    rows = torch.stack([uniform(fold(key(3), i), (n,), torch.float64) for i in range(3)])
    shifted = torch.stack([rows[0][:-1], rows[0][1:]])
    for pair in (rows, shifted):
        correlation = torch.corrcoef(pair) - torch.eye(len(pair), dtype=torch.float64)
        assert correlation.abs().max() < 4 / math.sqrt(n)  # four standard errors


@pytest.mark.parametrize("draw", [uniform, normal])
def test_padding_rows_change_nothing_in_the_rows_before_them(draw):
    few, padded = draw(key(9), (4, 3, 2), torch.float64), draw(key(9), (10, 3, 2), torch.float64)
    torch.testing.assert_close(few, padded[:4], rtol=1e-14, atol=0)


@pytest.mark.parametrize("draw", [uniform, normal])
def test_numbers_for_many_keys_under_vmap_are_those_of_each_key_alone(draw):
    keys = torch.tensor(KEYS)
    stacked = torch.func.vmap(lambda k: draw(k, (5, 2), torch.float64))(keys)
    for row, k in zip(stacked, keys, strict=True):
        torch.testing.assert_close(row, draw(k, (5, 2), torch.float64), rtol=1e-14, atol=0)


# -- permutations


def segments(keys, sizes):
    return torch.split(permutations(torch.tensor(keys), torch.tensor(sizes)), sizes)


def test_every_segment_is_a_permutation():
    sizes = [5, 0, 1, 100, 17]
    for order, n in zip(segments(KEYS[:5], sizes), sizes, strict=True):
        assert sorted(order.tolist()) == list(range(n))
    assert segments(KEYS[:5], sizes)[3].tolist() != list(range(100))


def test_a_segment_does_not_depend_on_the_segments_beside_it():
    (alone,) = segments([77], [50])
    first, _ = segments([77, 5], [50, 9])
    _, last, _ = segments([5, 77, 8], [200, 50, 3])
    assert torch.equal(alone, first)
    assert torch.equal(alone, last)


def test_segments_of_the_same_key_are_alike_and_of_other_keys_are_not():
    a, b, c = segments([77, 77, 78], [50, 50, 50])
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_all_orders_of_three_are_equally_likely():
    orders = permutations(torch.arange(6000), torch.full((6000,), 3)).view(-1, 3)
    found = torch.unique(orders, dim=0, return_counts=True)[1]
    # six orders, 1000 each expected, standard deviation sqrt(6000 * 5/36) = 29; bound at five of them
    assert len(found) == 6
    assert (found - 1000).abs().max() < 145
