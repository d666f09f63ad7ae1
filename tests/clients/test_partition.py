# SPDX-License-Identifier: Apache-2.0
"""Partitions: nothing lost, nothing twice, nobody left out in silence."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedloom.clients.partition import Partition, partition, schemes
from fedloom.core.errors import ConfigError, DataError

LABELS = np.repeat(np.arange(10), 600)
SPLIT = np.tile(np.repeat(["train", "test"], [500, 100]), 10)
LABEL_SCHEMES = (
    "iid",
    "classes:2",
    "shards:2",
    "dirichlet:0.3",
    "dirichlet-class:0.3",
    "dirichlet-normalised:0.3",
)


def everything(found: Partition) -> np.ndarray:
    held = [part for c in found.clients for part in (c.train, c.val, c.test)]
    return np.concatenate([*held, found.unused])


def same(a: Partition, b: Partition) -> bool:
    def parts(p: Partition) -> list[Any]:
        return [(c.id, c.unseen, c.train.tolist(), c.val.tolist(), c.test.tolist()) for c in p.clients]

    return parts(a) == parts(b) and a.notes == b.notes and a.unused.tolist() == b.unused.tolist()


def label_counts(found: Partition, pool: str, classes: int = 10) -> np.ndarray:
    return np.stack([np.bincount(LABELS[getattr(c, pool)], minlength=classes) for c in found.clients])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Any labels of 1 to 12 classes, some tiny, with any label scheme that fits them."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    labels = rng.permutation(np.repeat(np.arange(len(sizes)) * 3, sizes))  # labels with gaps
    alpha = 10 ** draw(st.floats(-3, 3))
    family = st.sampled_from(
        [
            "iid",
            f"classes:{draw(st.integers(1, len(sizes)))}",
            f"shards:{draw(st.integers(1, 5))}",
            f"dirichlet:{alpha}",
            f"dirichlet-class:{alpha}",
            f"dirichlet-normalised:{alpha}",
        ]
    )
    kinds = draw(st.sampled_from([None, ["train"], ["train", "test"], ["train", "val", "test"]]))
    return {
        "labels": labels,
        "scheme": draw(family),
        "clients": draw(st.integers(1, 30)),
        "seed": draw(st.integers(0, 1000)),
        "split": None if kinds is None else rng.choice(kinds, len(labels)),
        "unseen": draw(st.sampled_from([0, 0.1, 0.5, 1, 4])),
        "unseen_scheme": draw(st.none() | family),
    }


@settings(deadline=None, max_examples=300)
@given(cases())
def test_every_sample_has_one_place(case: dict[str, Any]) -> None:
    try:
        found = partition(**case)
    except ConfigError as error:
        assert "more clients" in str(error)
        assume(False)
    assert sorted(everything(found).tolist()) == list(range(len(case["labels"])))
    assert everything(found).dtype == np.int64
    participants = [c for c in found.clients if not c.unseen]
    assert len(participants) == case["clients"]
    assert all(c.unseen for c in found.clients[case["clients"] :])
    assert [c.id for c in found.clients] == [str(i) for i in range(len(found.clients))]
    assert all(len(c.train) for c in participants)
    for client in found.clients:
        for name in ("train", "val", "test"):
            part = getattr(client, name)
            assert all(a < b for a, b in pairwise(part.tolist()))
            if case["split"] is not None and name in case["split"]:
                assert (case["split"][part] == name).all()
    counted = [int(n.split(": ")[1].split()[0].replace(",", "")) for n in found.notes if n.endswith("unused")]
    assert sum(counted) == len(found.unused)
    assert same(found, partition(**case))
    rows = found.summary(case["labels"])
    assert all(0 <= row["skew"] <= 1 + 1e-9 and 0 <= row["largest"] <= 1 for row in rows)


@settings(deadline=None, max_examples=100)
@given(cases(), st.data())
def test_classes_per_client(case: dict[str, Any], data: st.DataObject) -> None:
    classes = len(np.unique(case["labels"]))
    k = data.draw(st.integers(1, classes))
    case |= {"scheme": f"classes:{k}", "unseen": 0, "unseen_scheme": None}
    try:
        found = partition(**case)
    except ConfigError:
        assume(False)
    if not any("moved" in note for note in found.notes):
        assert all(row["classes"] <= k for row in found.summary(case["labels"]))
    if case["clients"] * k >= classes:
        assert len(found.unused) == 0


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3), st.floats(0, 0.6), st.integers(0, 99))
def test_groups_place_every_sample(clients: int, groups: int, unseen: int, test_share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = rng.integers(0, groups, 300).astype(str)
    labels = rng.integers(0, 5, 300)
    given = {"groups": {"by": names}, "unseen": unseen, "test_share": test_share}
    if groups == 1 and unseen:
        with pytest.raises(ConfigError, match="1 groups of 'by' cannot be both"):
            partition(labels, "group:by", clients, seed, **given)
        return
    found = partition(labels, "group:by", clients, seed, **given)
    taken = [{c.id.partition("/")[0] for c in found.clients if c.unseen is unseen} for unseen in (False, True)]
    assert not taken[0] & taken[1]  # an unseen client shares no group with a participant
    assert sorted(everything(found).tolist()) == list(range(300))
    assert len({c.id for c in found.clients}) == clients + unseen
    assert all(len(c.train) for c in found.clients if not c.unseen)
    assert len(found.unused) == 0 or "have no client" in found.notes[0]


@pytest.mark.parametrize("scheme", LABEL_SCHEMES)
def test_another_seed_is_another_partition(scheme: str) -> None:
    assert same(partition(LABELS, scheme, 20, 1), partition(LABELS, scheme, 20, 1))
    assert not same(partition(LABELS, scheme, 20, 1), partition(LABELS, scheme, 20, 2))


@pytest.mark.parametrize("scheme", LABEL_SCHEMES)
def test_pools_follow_the_same_shares(scheme: str) -> None:
    found = partition(LABELS, scheme, 20, 3, split=SPLIT, val_share=0.2)
    train, val, test = (label_counts(found, pool) for pool in ("train", "val", "test"))
    assert (train.sum(0) == 400).all() and (val.sum(0) == 100).all() and (test.sum(0) == 100).all()
    # each count is within one sample of its exact share
    assert np.abs(train / 400 - test / 100).max() <= 1 / 400 + 1 / 100 + 1e-9
    assert np.abs(val - test).max() <= 2


def test_iid_is_balanced_even_with_tiny_classes() -> None:
    labels = np.repeat(np.arange(12), 10)
    rows = partition(labels, "iid", 30, 0, val_share=0, test_share=0).summary(labels)
    assert {row["train"] for row in rows} == {4}


def test_classes_are_held_by_equally_many_clients_in_shares_within_bounds() -> None:
    found = partition(LABELS, "classes:3", 25, 0, val_share=0, test_share=0)
    counts = label_counts(found, "train")
    holders = (counts > 0).sum(axis=0)
    assert (counts > 0).sum(axis=1).tolist() == [3] * 25
    assert holders.max() - holders.min() <= 1
    least = 0.4 / (0.4 + 0.6 * (holders - 1)) * 600 - 1
    most = 0.6 / (0.6 + 0.4 * (holders - 1)) * 600 + 1
    assert ((counts == 0) | ((counts >= least) & (counts <= most))).all()


def test_unheld_classes_are_unused_and_noted() -> None:
    one = partition(LABELS, "classes:9", 1, 0)
    missing = set(range(10)) - set(LABELS[one.clients[0].train].tolist())
    assert f"class {missing.pop()} is held by no participant: 600 samples unused" in one.notes
    few = partition(LABELS, "classes:2", 2, 0)
    assert len(few.unused) == 6 * 600
    assert any(n.startswith("6 classes (") and "3,600 samples unused" in n for n in few.notes)


def test_shards_are_of_equal_size_and_cover_few_classes() -> None:
    found = partition(LABELS, "shards:2", 25, 0, split=SPLIT)
    rows = found.summary(LABELS)
    assert max(r["train"] for r in rows) - min(r["train"] for r in rows) <= 2
    assert all(row["classes"] <= 2 for row in rows)  # 50 shards, 5 per class exactly


def test_dirichlet_clients_are_of_equal_size() -> None:
    rows = partition(LABELS, "dirichlet:0.3", 20, 0, split=SPLIT).summary(LABELS)
    assert max(r["train"] for r in rows) - min(r["train"] for r in rows) <= 3


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet-normalised"])
def test_tiny_alpha_is_nearly_one_class_per_client(scheme: str) -> None:
    rows = partition(LABELS, f"{scheme}:0.001", 100, 0, split=SPLIT).summary(LABELS)
    assert np.mean([row["largest"] for row in rows]) > 0.95
    assert np.mean([row["skew"] for row in rows]) > 0.85


def test_tiny_alpha_is_nearly_one_client_per_class() -> None:
    found = partition(LABELS, "dirichlet-class:0.001", 100, 0, split=SPLIT)
    assert label_counts(found, "train").max(axis=0).mean() > 0.8 * 425
    assert any("participants drew no training samples: one moved to each" in note for note in found.notes)
    assert all(len(c.train) for c in found.clients)


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet-class", "dirichlet-normalised"])
def test_large_alpha_is_nearly_iid(scheme: str) -> None:
    rows = partition(LABELS, f"{scheme}:1e5", 10, 0, split=SPLIT).summary(LABELS)
    assert max(row["skew"] for row in rows) < 0.03
    assert max(r["train"] for r in rows) - min(r["train"] for r in rows) <= 15


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet-class", "dirichlet-normalised"])
@pytest.mark.parametrize("alpha", ["1e-6", "1e6"])
def test_extreme_alphas_end(scheme: str, alpha: str) -> None:
    found = partition(LABELS, f"{scheme}:{alpha}", 50, 0)
    assert sorted(everything(found).tolist()) == list(range(len(LABELS)))


def test_dirichlet_draws_have_the_moments_of_a_dirichlet() -> None:
    # shares of one class over 4 clients: Var = (1/4)(3/4) / (4 * 0.5 + 1)
    labels = np.repeat(np.arange(500), 400)
    found = partition(labels, "dirichlet-class:0.5", 4, 0, val_share=0, test_share=0)
    shares = np.bincount(labels[found.clients[0].train], minlength=500) / 400
    assert abs(shares.mean() - 1 / 4) < 0.03
    assert abs(shares.var() - 3 / 16 / 3) < 0.01


def test_unseen_clients_do_not_depend_on_the_participants_nor_they_on_them() -> None:
    base = {"labels": LABELS, "clients": 18, "seed": 5, "split": SPLIT, "unseen": 0.1}
    a = partition(scheme="dirichlet:0.1", **base)
    b = partition(scheme="dirichlet:0.1", unseen_scheme="classes:1", **base)
    c = partition(scheme="classes:2", unseen_scheme="dirichlet:0.1", **base)
    assert [x.unseen for x in a.clients] == [False] * 18 + [True] * 2
    for x, y in zip(a.clients[:18], b.clients[:18]):
        assert x.train.tolist() == y.train.tolist() and x.test.tolist() == y.test.tolist()
    for x, y in zip(a.clients[18:], c.clients[18:]):
        assert x.train.tolist() == y.train.tolist() and x.test.tolist() == y.test.tolist()
    assert any(n.startswith("8 classes (") and "held by no unseen client" in n for n in b.notes)
    assert abs(len(b.unused) - 480) <= 8


@pytest.mark.parametrize(("unseen", "count"), [(0, 0), (3, 3), (0.1, 10), (0.5, 90), (0.001, 1)])
def test_unseen_is_a_count_or_a_share(unseen: float, count: int) -> None:
    found = partition(LABELS, "iid", 90, 0, unseen=unseen)
    assert sum(c.unseen for c in found.clients) == count
    sizes = [len(c.train) for c in found.clients]
    assert max(sizes) - min(sizes) <= 2


def test_pools_without_a_published_split() -> None:
    found = partition(LABELS, "iid", 10, 0, val_share=0.1, test_share=0.2)
    pools = [label_counts(found, pool).sum(axis=0) for pool in ("train", "val", "test")]
    assert [p.tolist() for p in pools] == [[420] * 10, [60] * 10, [120] * 10]


def test_a_published_validation_set_is_kept() -> None:
    split = np.tile(["train", "train", "val", "test"], 1500)
    found = partition(LABELS, "dirichlet:1", 10, 0, split=split, val_share=0.5)
    assert sum(len(c.val) for c in found.clients) == 1500


def test_empty_pools_are_one_note() -> None:
    found = partition(LABELS[:20], "iid", 15, 0, val_share=0.1, test_share=0.1)
    assert [n for n in found.notes if "val" in n] == ["13 of 15 clients have no val samples"]
    assert [n for n in found.notes if "test" in n] == ["13 of 15 clients have no test samples"]


def test_regression_targets() -> None:
    targets = np.linspace(0, 1, 200)
    rows = partition(targets, "iid", 8, 0).summary(targets)
    assert {row["train"] for row in rows} <= {17, 18}
    assert rows[0]["classes"] is rows[0]["largest"] is rows[0]["skew"] is None
    with pytest.raises(ConfigError, match=r"'dirichlet:A' splits by class.*no single class.*use 'iid'"):
        partition(targets, "dirichlet:1", 8, 0)
    grouped = partition(targets, "group:site", 2, 0, groups={"site": np.repeat(["a", "b"], 100)})
    assert [c.id for c in grouped.clients] == ["a", "b"]


def test_one_client_per_group_keeps_the_published_split() -> None:
    writers = np.tile(["ann", "bob", "cy", "dee", "eve"], 1200)
    found = partition(LABELS, "group:writer", 3, 1, split=SPLIT, groups={"writer": writers}, unseen=1)
    assert len({c.id for c in found.clients}) == 4
    assert found.notes == ("1 of 5 groups of 'writer' have no client: 1,200 samples unused",)
    for client in found.clients:
        assert (writers[client.train] == client.id).all()
        assert (SPLIT[client.test] == "test").all() and len(client.test) == 200
        assert (SPLIT[client.val] == "train").all() and len(client.val) == 150


def test_groups_on_one_side_of_the_published_split_are_cut_themselves() -> None:
    writers = np.where(SPLIT == "test", "tess", "tom")
    split = np.where(SPLIT == "test", "val", "train")
    found = partition(LABELS, "group:writer", 2, 0, split=split, groups={"writer": writers})
    assert [len(c.train) for c in found.clients] == [700, 3500]
    assert [len(c.test) for c in found.clients] == [150, 750]
    assert "the published split is not used: 2 of 2 clients have no samples" in found.notes[0]


def test_a_published_split_by_person_is_kept() -> None:
    """Persons of the test part are never participants; without unseen clients nobody has their samples."""
    writers = np.array([f"w{i % 10}" for i in range(6000)])
    split = np.where(np.isin(writers, ["w7", "w8", "w9"]), "test", "train")
    given = {"split": split, "groups": {"writer": writers}}
    found = partition(LABELS, "group:writer", 7, 0, unseen=2, **given)
    assert [c.id for c in found.participants] == [f"w{i}" for i in range(7)]
    assert {c.id for c in found.clients if c.unseen} < {"w7", "w8", "w9"}
    assert all(len(c.train) and len(c.test) for c in found.clients)
    assert any("participants are of its training part, the 2 unseen clients of its test part" in n for n in found.notes)
    alone = partition(LABELS, "group:writer", 7, 0, **given)
    assert len(alone.unused) == 1800
    more = partition(LABELS, "group:writer", 9, 0, unseen=4, **given)  # persons are divided, on their side
    sides = [{c.id[:2] for c in more.clients if c.unseen is unseen} for unseen in (False, True)]
    assert sides == [{f"w{i}" for i in range(7)}, {"w7", "w8", "w9"}]


def test_divided_groups_are_held_out_whole() -> None:
    coarse = np.array([f"c{y}" for y in LABELS])
    found = partition(LABELS, "group:coarse", 40, 3, split=SPLIT, groups={"coarse": coarse}, unseen=10)
    sides = [{c.id[:2] for c in found.clients if c.unseen is unseen} for unseen in (False, True)]
    assert len(sides[0]) == 8 and len(sides[1]) == 2 and not sides[0] & sides[1]
    assert (len(found.participants), len(found.clients)) == (40, 50)


def test_unseen_groups_can_be_named() -> None:
    writers = np.tile(["ann", "bob", "cy", "dee", "eve"], 1200)
    given = {"split": SPLIT, "groups": {"writer": writers}, "unseen_groups": ["dee", "ann"]}
    found = partition(LABELS, "group:writer", 3, 1, **given)
    assert [c.id for c in found.clients] == ["bob", "cy", "eve", "ann", "dee"]
    assert [c.unseen for c in found.clients] == [False] * 3 + [True] * 2
    with pytest.raises(ConfigError, match="Unknown group of 'writer' to hold out 'dea'; did you mean 'dee'"):
        partition(LABELS, "group:writer", 3, 1, **{**given, "unseen_groups": ["dea"]})
    with pytest.raises(ConfigError, match="use 'group:NAME'"):
        partition(LABELS, "iid", 3, 1, **given)
    with pytest.raises(ConfigError, match="give one of the two"):
        partition(LABELS, "group:writer", 3, 1, **given, unseen=2)
    with pytest.raises(ConfigError, match="cannot be both participants and unseen clients"):
        partition(LABELS, "group:writer", 3, 1, **{**given, "unseen_groups": ["ann", "bob", "cy", "dee", "eve"]})


def test_a_sample_of_no_group_is_refused() -> None:
    writers = np.tile(["ann", "bob", ""], 2000)
    with pytest.raises(DataError, match=r"'writer' has no name for 2,000 of 6,000 samples; name one for each"):
        partition(LABELS, "group:writer", 2, 1, groups={"writer": writers})
    assert partition(LABELS, "iid", 2, 1, groups={"writer": writers}).participants


def test_a_label_scheme_tells_that_unseen_clients_share_clients_of_the_data() -> None:
    groups = {"client": np.tile(["ann", "bob"], 3000)}
    assert "share" not in "".join(partition(LABELS, "iid", 3, 1, groups=groups).notes)
    notes = partition(LABELS, "iid", 3, 1, groups=groups, unseen=1).notes
    assert any("samples of 2 groups of 'client' that participants have samples of" in n for n in notes)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["iid", "dirichlet:1", "group:site"]), st.integers(2, 40), st.integers(0, 2), st.integers(0, 99))
def test_samples_that_belong_together_stay_in_one_pool(scheme: str, recordings: int, unseen: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    recording = np.sort(rng.integers(0, recordings, 400)).astype(str)
    groups = {"recording": recording, "site": (recording.astype(int) % 4).astype(str)}
    if scheme == "group:site" and len(set(groups["site"])) < 2 + unseen:
        return
    labels = rng.integers(0, 3, 400)
    found = partition(labels, scheme, 2, seed, groups=groups, unseen=unseen, split_by="recording")
    pools = [np.concatenate([getattr(c, pool) for c in found.clients]) for pool in ("train", "val", "test")]
    held = [set(recording[rows]) for rows in pools]
    moved = any("moved" in note for note in found.notes)
    assert not held[1] & held[2] and (moved or not held[0] & (held[1] | held[2]))
    sides = [
        np.concatenate([np.r_[c.train, c.val, c.test] for c in found.clients if c.unseen is u] or [[]])
        for u in (False, True)
    ]
    assert moved or not set(recording[sides[0].astype(int)]) & set(recording[sides[1].astype(int)])
    if recordings > 20:
        assert 0 < len(pools[1]) < 160 and 0 < len(pools[2]) < 160


@pytest.mark.parametrize("seed", range(5))
def test_recordings_of_one_class_leave_every_class_to_train_on(seed: int) -> None:
    """Two people, three activities, each recorded three times."""
    recording = np.repeat(np.arange(18), 20)
    groups = {"recording": recording.astype(str), "person": (recording // 9).astype(str)}
    labels = recording % 3
    found = partition(labels, "group:person", 2, seed, groups=groups, split_by="recording")
    assert [set(labels[client.train]) for client in found.clients] == [{0, 1, 2}] * 2
    assert all(len(client.val) == len(client.test) == 20 for client in found.clients) and not found.notes
    once = {**groups, "recording": (recording // 9 * 3 + labels).astype(str)}  # one recording of each activity
    (note,) = partition(labels, "group:person", 2, seed, groups=once, split_by="recording").notes
    assert note.startswith("2 of 2 clients are tested on classes that they have no training samples of")


def test_an_unknown_grouping_to_split_by_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown grouping to split by 'recrding'; did you mean 'recording'"):
        partition(LABELS, "iid", 3, 1, groups={"recording": LABELS.astype(str)}, split_by="recrding")


def test_few_groups_are_divided_evenly() -> None:
    coarse = np.array([f"c{y // 5}" for y in LABELS])
    found = partition(LABELS, "group:coarse", 5, 0, split=SPLIT, groups={"coarse": coarse})
    by_group = [[c for c in found.clients if c.id.startswith(g)] for g in ("c0/", "c1/")]
    assert sorted(len(g) for g in by_group) == [2, 3]
    for clients in by_group:
        size = 3000 / len(clients)
        for client in clients:
            own = np.concatenate([client.train, client.val, client.test])
            assert abs(len(own) - size) <= 1
            assert np.ptp(np.bincount(LABELS[own] % 5)) <= 2  # stratified by class
            assert (coarse[own] == client.id[:2]).all()


def test_a_divided_group_that_is_too_small_is_repaired() -> None:
    found = partition(LABELS, "group:g", 6, 0, groups={"g": np.repeat(["big", "small"], [5999, 1])})
    assert all(len(c.train) for c in found.clients)
    assert "2 of 6 participants drew no training samples" in found.notes[0]


def test_summary_of_disjoint_clients() -> None:
    names = np.repeat(["a", "b"], 3000)
    rows = partition(LABELS, "group:half", 2, 0, split=SPLIT, groups={"half": names}).summary(LABELS)
    assert rows[0] == {
        "id": "a",
        "unseen": False,
        "train": 2125,
        "val": 375,
        "test": 500,
        "classes": 5,
        "largest": 0.2,
        "skew": 0.5,
    }


def test_schemes_describe_themselves() -> None:
    usages = [s.usage for s in schemes()]
    assert usages[:3] == ["iid", "classes:K", "shards:K"] and "group:NAME" in usages
    assert all(s.about.endswith(".") for s in schemes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": 0}, r"Got 0 clients; ask for at least 1\."),
        (
            {"scheme": "classes:11"},
            r"more classes per client \(11\) than classes in the data \(10\); use 'classes:10'",
        ),
        (
            {"scheme": "classes:two"},
            r"Got 'two' in scheme 'classes:two'; expected a whole number of at least 1",
        ),
        ({"scheme": "shards:0"}, r"Got '0' in scheme 'shards:0'; expected a whole number of at least 1"),
        ({"scheme": "dirichlet:0"}, r"Got '0' in scheme 'dirichlet:0'; expected a concentration above 0"),
        ({"scheme": "dirichlet:-1"}, r"Got '-1' .*expected a concentration above 0"),
        ({"scheme": "dirichlet:nan"}, r"Got 'nan' .*expected a concentration above 0"),
        ({"scheme": "dirichlet-class:much"}, r"Got 'much' .*expected a concentration above 0"),
        ({"scheme": "classes"}, r"Got scheme 'classes' without its parameter; write 'classes:K'\."),
        ({"scheme": "iid:3"}, r"Got scheme 'iid:3', but 'iid' takes no parameter; write 'iid'\."),
        ({"scheme": "clases:2"}, r"Unknown partition scheme 'clases:2'; did you mean 'classes:K'"),
        (
            {"unseen_scheme": "dirchlet:1"},
            r"Unknown partition scheme 'dirchlet:1'; did you mean 'dirichlet:A'",
        ),
        ({"scheme": "group:writer"}, r"Unknown group 'writer'. Choose from: alphabet, coarse\."),
        (
            {"scheme": "group:writer", "groups": {}},
            r"'group:writer', but this dataset has no natural groups; use a",
        ),
        (
            {"scheme": "group:coarse", "unseen_scheme": "iid"},
            r"hold out whole groups; leave the unseen scheme out",
        ),
        ({"clients": 7000}, r"Got more clients \(7,000\) than training samples \(4,200\); ask for fewer"),
        (
            {"scheme": "group:coarse", "clients": 7000},
            r"Got more clients \(7,000\) than training samples \(6,000\)",
        ),
        ({"unseen": -1}, r"Got unseen=-1; give a whole number of clients, or a share"),
        (
            {"unseen": 1.5},
            r"Got unseen=1.5; give a whole number of clients, or a share of all clients below 1\.",
        ),
        ({"val_share": -0.1}, r"Got val_share=-0.1 and test_share=0.15; neither may be negative"),
        ({"val_share": 0.5, "test_share": 0.5}, r"together they must stay below 1"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    groups = {"coarse": LABELS.astype(str), "alphabet": LABELS.astype(str)}
    arguments: dict[str, Any] = {"labels": LABELS, "scheme": "iid", "clients": 5, "seed": 0, "groups": groups}
    with pytest.raises(ConfigError, match=message):
        partition(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LABELS.astype(str)}, r"Got labels of type <U21 .*expected one integer class per sample"),
        ({"split": SPLIT[:9]}, r"The split names 9 samples of 6000; give one of"),
        (
            {"split": np.where(SPLIT == "test", "dev", SPLIT)},
            r"The split holds 'dev'; give 'train', 'val' or 'test'",
        ),
        (
            {"scheme": "group:g", "groups": {"g": SPLIT[:9]}},
            r"Group 'g' names 9 samples of 6000; give one name",
        ),
    ],
)
def test_data_errors(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"labels": LABELS, "scheme": "iid", "clients": 5, "seed": 0}
    with pytest.raises(DataError, match=message):
        partition(**(arguments | change))
