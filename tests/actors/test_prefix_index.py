"""Prefixes by hash, and who computed them."""

from __future__ import annotations

from actors.prefix_index import PrefixIndex, prefix_hashes


def test_prompts_share_the_hashes_of_what_they_share() -> None:
    first, second = list(range(1000)), [*range(600), *range(5000, 5400)]
    shared = [a == b for a, b in zip(prefix_hashes(first), prefix_hashes(second), strict=True)]
    assert shared == [True] * 4 + [False] * 3, 'prefixes of 128, 256, 384 and 512 tokens'


def test_the_order_of_tokens_matters() -> None:
    assert prefix_hashes([1, 2] * 100) != prefix_hashes([2, 1] * 100)


def test_short_prompts_have_no_prefix() -> None:
    assert prefix_hashes(range(128)) == ()
    assert len(prefix_hashes(range(129))) == 1


def test_long_prompts_have_few() -> None:
    assert len(prefix_hashes(range(200_000))) < 60


def test_the_longest_prefix_wins() -> None:
    index: PrefixIndex[str] = PrefixIndex(10)
    index.add([1, 2], 'a')
    index.add([1, 2, 3], 'b')
    assert index.longest([1, 2, 3, 4], ['a', 'b']) == 'b'
    assert index.longest([1, 2, 3, 4], ['a']) == 'a'
    assert index.longest([9], ['a', 'b']) is None


def test_the_least_recently_used_are_forgotten() -> None:
    index: PrefixIndex[str] = PrefixIndex(2)
    for prefix in (1, 2, 1, 3):
        index.add([prefix], 'a')
    assert [index.longest([prefix], ['a']) for prefix in (1, 2, 3)] == ['a', None, 'a']


def test_those_who_are_gone_are_forgotten() -> None:
    index: PrefixIndex[str] = PrefixIndex(10)
    index.add([1], 'a')
    index.add([1, 2], 'b')
    index.keep(['b'])
    assert index.longest([1], ['a', 'b']) == 'b'
    index.keep([])
    assert len(index) == 0
