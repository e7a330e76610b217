"""Streams have keys of their full length, and no two names give one key."""

from __future__ import annotations

from quietgrad.plan.seeds import key_of_seed
from quietgrad.randomness import Purpose, RandomKey

PURPOSES: tuple[Purpose, ...] = ("sampling", "projection", "noise", "model", "seal", "user")
NAMES = [
    (purpose, step, name)
    for purpose in PURPOSES
    for step in (0, 1, 11, 111)
    for name in ("", "1", "11", "w", "w\0float64")
]


def test_both_words_of_every_stream_are_its_own() -> None:
    """Mutant: the second word was the first again, so that 2^64 keys had to be tried."""
    key = RandomKey.from_entropy()
    words = [word for name in NAMES for word in key.words(*name)]
    assert len(set(words)) == 2 * len(NAMES)
    assert all(0 <= word < 2**64 for word in words) and max(words) > 2**60
    assert [key.words(*name) for name in NAMES] == [
        RandomKey(key.root, False).words(*name) for name in NAMES
    ]


def test_ciphers_have_keys_of_256_bits_of_their_own() -> None:
    key = RandomKey.from_entropy()
    found = {key.stream_key(*name) for name in NAMES}
    assert len(found) == len(NAMES) and {len(one) for one in found} == {32}
    assert not any(one[:16] == one[16:] or one in (key.root, key.root[::-1]) for one in found)


def test_every_byte_of_the_root_counts() -> None:
    root = RandomKey.from_entropy().root
    others = [root[:i] + bytes([root[i] ^ 1]) + root[i + 1 :] for i in range(32)]
    keys = [RandomKey(one, False) for one in (root, *others)]
    assert len(root) == 32 and len(set(root)) > 8
    for derived in (
        lambda key: key.words("noise", 3, "w"),
        lambda key: key.stream_key("noise", 3, "w"),
        lambda key: key.seal(),
        lambda key: key.generator("sampling", 3).integers(2**63),
    ):
        assert len({derived(key) for key in keys}) == 33


def test_every_digit_of_a_seed_and_of_a_starts_name_counts() -> None:
    """Mutant: the last 64 bits of a seed fixed its root."""
    digits, name = "4f1d8e03b7a62c95d0e4718a3bc9f256" * 2, "0" * 32

    def others(text: str) -> list[str]:
        changed = (text[:i] + f"{int(text[i], 16) ^ 1:x}" + text[i + 1 :] for i in range(len(text)))
        return [text, *changed]

    roots = {key_of_seed(seed, name).root for seed in others(digits)}
    assert len(roots) == len(digits) + 1
    assert len({key_of_seed(digits, start).root for start in others(name)}) == len(name) + 1
