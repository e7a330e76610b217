"""Which records stand for a user: at most so many, chosen by who it is and the step, never by who
else is there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from quietgrad.randomness import RandomKey
from quietgrad.sampling import PoissonSampler, UserIndices, UserRecords
from quietgrad.sampling.identities import identities_of

KEY = RandomKey.from_seed(0)
OWNERS = ["b", "a", "b", "c", "a", "b", "b", "d", "b", "b"]  # b has six, a two, c and d one


def records_of(users: UserRecords, owner: int, step: int = 0) -> list[int]:
    return users.drawn(np.array([owner]), KEY, step).records.tolist()


def test_users_are_numbered_by_their_first_record() -> None:
    users = UserRecords.of(OWNERS, 9)
    assert users.count == 4 and users.records == 10
    assert [records_of(users, i) for i in range(4)] == [[0, 2, 5, 6, 8, 9], [1, 4], [3], [7]]


def test_a_batch_holds_users_with_few_records_first_and_each_users_side_by_side() -> None:
    drawn = UserRecords.of(OWNERS, 3).drawn(np.arange(4), KEY, 0)
    assert drawn.sizes == (1, 1, 2, 3) and drawn.users.tolist() == [2, 3, 1, 0]
    assert drawn.records.tolist()[:4] == [3, 7, 1, 4] and len(drawn) == 4
    assert set(drawn.records[4:].tolist()) < {0, 2, 5, 6, 8, 9}
    part = drawn.span(slice(1, 3))
    assert part.users.tolist() == [3, 1] and part.records.tolist() == [7, 1, 4]
    assert part.sizes == (1, 2)


def test_some_users_of_a_batch_have_their_records_alone() -> None:
    batch = UserIndices(np.array([4, 2, 7]), np.array([9, 1, 3, 5, 6, 8]), (1, 2, 3))
    for kept, users, records, sizes in (
        ([True, False, True], [4, 7], [9, 5, 6, 8], (1, 3)),
        ([False, True, False], [2], [1, 3], (2,)),
        ([False, False, False], [], [], ()),
    ):
        some = batch.where(np.array(kept))
        assert (some.users.tolist(), some.records.tolist(), some.sizes) == (users, records, sizes)


@pytest.mark.parametrize("choice", ["fixed", "fresh"])
@pytest.mark.parametrize("cap", [1, 2, 5])
def test_the_cap_bites(choice: Any, cap: int) -> None:
    users = UserRecords.of(OWNERS, cap, choice)
    for step in range(20):
        drawn = users.drawn(np.arange(4), KEY, step)
        assert sorted(drawn.sizes) == sorted(min(cap, n) for n in (6, 2, 1, 1))
        assert len(set(drawn.records.tolist())) == sum(drawn.sizes)


def test_a_fixed_choice_is_the_same_in_every_step_and_session_and_a_fresh_one_is_not() -> None:
    fixed, fresh = UserRecords.of(OWNERS, 2), UserRecords.of(OWNERS, 2, "fresh")
    other = RandomKey.from_seed(1)
    chosen = {
        tuple(fixed.drawn(np.array([0]), key, step).records)
        for step in range(9)
        for key in (KEY, other)
    }
    assert len(chosen) == 1
    by_step = [tuple(records_of(fresh, 0, step)) for step in range(30)]
    assert len(set(by_step)) > 5
    assert by_step == [tuple(records_of(fresh, 0, step)) for step in range(30)]  # and repeats
    assert by_step != [tuple(fresh.drawn(np.array([0]), other, s).records) for s in range(30)]


def test_a_fixed_choice_is_not_that_of_the_first_records() -> None:
    # What comes first in a table is often the oldest, or the largest.
    users = UserRecords.of([f"user {i % 8}" for i in range(320)], 5)
    chosen = [users.drawn(np.array([user]), KEY, 0).records // 8 for user in range(8)]
    assert len({tuple(places) for places in chosen}) == 8
    assert sum(int(places.max()) >= 20 for places in chosen) >= 6


def test_a_fresh_choice_is_uniform() -> None:
    """600 draws of 2 among 6: a right one is 5.3 deviations off with probability 1e-7 a record, six
    records; one that always takes the first is refused.
    """
    fresh = UserRecords.of(OWNERS, 2, "fresh")
    counts = np.zeros(10)
    for step in range(600):
        counts[records_of(fresh, 0, step)] += 1
    own = counts[[0, 2, 5, 6, 8, 9]]
    off = 5.3 * np.sqrt(600 / 3 * 2 / 3)
    assert np.abs(own - 200).max() < off < abs(600 - 200)


@pytest.mark.parametrize("choice", ["fixed", "fresh"])
def test_other_users_do_not_change_which_records_stand_for_one(choice: Any) -> None:
    """Without c, and beside many others: the same of the user's own records."""
    own = {}
    for others in ([], ["c"], [f"new{i}" for i in range(50)]):
        owners = ["a", *others, *["b"] * 6, "a", *others]
        mine = [i for i, owner in enumerate(owners) if owner == "b"]
        users = UserRecords.of(owners, 3, choice)
        number = list(dict.fromkeys(owners)).index("b")
        own[len(others)] = [mine.index(i) for i in records_of(users, number, 4)]
    assert own[0] == own[1] == own[50]


def test_without_the_last_user_nothing_of_the_others_moves() -> None:
    users = UserRecords.of(OWNERS, 2)
    fewer = users.without_last()
    assert fewer.count == 3 and fewer.records == 9
    assert [records_of(fewer, i) for i in range(3)] == [records_of(users, i) for i in range(3)]


@pytest.mark.parametrize(
    "owners",
    [
        np.array([3, 1, 3]),
        torch.tensor([3, 1, 3]),
        (3, 1, 3),
        [3.0, 1.0, 3.0],  # a table with gaps elsewhere
        ["3", "1", "3"],
        [b"3", b"1", b"3"],
        "313",
    ],
    ids=str,
)
def test_owners_come_in_many_forms(owners: Any) -> None:
    given = iter(owners) if isinstance(owners, str) else owners
    users = UserRecords.of(given, 4)
    assert users.count == 2 and users.identities == UserRecords.of(["3", "1", "3"], 4).identities


def test_owners_of_a_table_are_read() -> None:
    pandas = pytest.importorskip("pandas")
    assert UserRecords.of(pandas.Series(["x", "y", "x"]), 4).count == 2
    for gap in (None, float("nan"), pandas.NA):
        column = pandas.Series(["x", gap, "secret"], dtype=object)
        with pytest.raises(ValueError, match="no owner for some record") as refused:
            UserRecords.of(column, 4)
        assert "secret" not in str(refused.value) and "1" not in str(refused.value)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (["a", None, "b"], "no owner for some record.*leave such records out"),
        (["a", "  ", "b"], "no owner for some record"),
        ([1.0, float("nan")], "no owner for some record"),
        (["a", 1, "b"], "mixes text and numbers.*as text"),
        (["a", "nan", "b"], "no owner for some record"),
        (np.array(["a", float("nan"), "b"]), "no owner for some record"),
        ([1.0, 2.0**53], "so large that two numbers may be one"),
        (np.array([1.0, 2.0**24 + 1], dtype=np.float32), "so large that two numbers may be one"),
        (torch.tensor([1.0, 2.0**24 + 1]), "so large that two numbers may be one"),
        (torch.tensor([1.0, 257.0], dtype=torch.bfloat16), "so large that two numbers may be one"),
        (np.array([1.0, 2049.0], dtype=np.float16), "so large that two numbers may be one"),
        ([torch.tensor(257.0, dtype=torch.bfloat16), 1.0], "so large that two numbers may be one"),
        (["a", "NA", "b"], "no owner for some record"),  # R, pandas
        (["a", "#N/A", "b"], "no owner for some record"),  # spreadsheets
        (["a", r"\N", "b"], "no owner for some record"),  # data bases
        (["1.23457E+18", "1.23458E+18"], "so large that two numbers may be one"),
        (["1.2345678901234568e+18", "7.0"], "so large that two numbers may be one"),
        (["9007199254740992.0", "7.0"], "so large that two numbers may be one"),
        (["9007199254740995.0", "7.0"], "so large that two numbers may be one"),  # no float32
        ([b"a", b"nan", b"b"], "no owner for some record"),  # HDF5, numpy's "S"
        (np.array([b"a", b"NA", b"b"]), "no owner for some record"),
        ([b"1.23457E+18", b"1.23458E+18"], "so large that two numbers may be one"),
        ([b"16777216.0", b"33554436.0"], "so large that two numbers may be one"),
        ([1.5, 2.0], "neither text nor whole numbers"),
        ([True, False], "neither text nor whole numbers"),
        ([("a",), ("b",)], "neither text nor whole numbers"),
        (["a", "a", "a"], "single user.*column that tells people apart"),
        ("abc", "single text.*as a list"),
    ],
)
def test_bad_owners_are_refused(owners: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        UserRecords.of(owners, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("alice", " alice"),
        ("alice", "alice\t"),
        ("ren\u00e9", "rene\u0301"),
        ("7", "7.0"),
        ("-3", "-3.000"),
        ("7", 7),
        (7, 7.0),
    ],
)
def test_one_name_written_in_two_ways_is_one_user(one: Any, other: Any) -> None:
    """In two units a person has twice the weight that epsilon speaks of; and one whose name a test
    file writes in the other way would be public and protected at once.
    """
    assert identities_of([one]) == identities_of([other])
    if type(one) is type(other):
        assert UserRecords.of([one, other, 8 if isinstance(one, int) else "bob"], 4).count == 2


def test_names_that_differ_are_two_users() -> None:
    names = ["Bob", "bob", "b ob", "7", "07", "7.5", "7.0.0", "v7.0", "none", "Null", "7e0", "12e4"]
    assert len(set(identities_of(names))) == len(names)
    raw = [b"id\n", b"id", b"7.0", b"7"]  # bytes are no text
    assert len(set(identities_of(raw))) == len(raw)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="records_per_user=0"):
        UserRecords.of(OWNERS, 0)
    with pytest.raises(ValueError, match="choice='first' is unknown"):
        UserRecords.of(OWNERS, 1, "first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not of the same data"):
        PoissonSampler(10, 0.5, users=UserRecords.of(OWNERS, 1))


def test_a_user_is_drawn_as_often_as_one_coin_says_however_many_records() -> None:
    """2000 steps at rate 0.1, a user of 50 records and 20 of one: 200 expected, 13.4 a deviation;
    a right sampler is five off with probability 6e-7 a user, and one that draws a user wherever one
    record is drawn would have that user in nearly every step.
    """
    owners = ["many"] * 50 + [f"one{i}" for i in range(20)]
    users = UserRecords.of(owners, 8)
    sampler = PoissonSampler(21, 0.1, users=users)
    seen = np.zeros(21)
    for step in range(2000):
        seen[sampler.batch(KEY, step).users] += 1  # type: ignore[union-attr]
    assert np.abs(seen - 200).max() < 5 * 13.4
    by_record = PoissonSampler(70, 0.1)
    wrong = sum(bool((by_record.indices(KEY, step) < 50).any()) for step in range(2000))
    assert wrong > 1900


LARGE = np.array([2**24 + i for i in range(6)], dtype=np.float32)  # three numbers, of six owners
ROUNDED: dict[str, Any] = {
    "its numbers": list(LARGE),
    "as Python has them": LARGE.tolist(),
    "as text": [f"{number:.1f}" for number in LARGE],
    "objects": np.array(list(LARGE), dtype=object),
    "of half precision": list(np.array([2048, 2049, 2050], dtype=np.float16)),
    "a column with gaps": pd.Series(LARGE, dtype="Float32"),
    "categories": pd.Series(LARGE).astype("category"),
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_owners_that_were_rounded_before_they_came_are_refused(kind: str) -> None:
    """Before: users whose numbers were rounded to one were one user."""
    with pytest.raises(TypeError, match="of float32 above 16777216"):
        identities_of(ROUNDED[kind])


def test_whole_numbers_of_any_type_are_known_alike() -> None:
    ids = [2**24, 2**24 + 1, 2**24 + 2]
    expected = identities_of(ids)
    for same in (
        [float(i) for i in ids],
        [f"{i}.0" for i in ids],
        np.array(ids, dtype=np.float64),
        list(torch.tensor(ids)),  # a column of a data set in torch's format
        list(np.array([2**24, 2**24 + 1, 2**24 + 2], dtype=np.float64)),
    ):
        assert identities_of(same) == expected
    assert len(set(identities_of(np.array([2.0**24, 2.0**25])))) == 2  # of float64, as it says
