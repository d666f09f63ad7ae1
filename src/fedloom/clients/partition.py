# SPDX-License-Identifier: Apache-2.0
"""Split the samples of a dataset over clients, and each client's samples into train, val and test.

A partition is a pure function of its arguments and the seed. There are two kinds.

**Label schemes** ("iid", "classes:K", "shards:K", "dirichlet:A", ...). Train, val and test pools come first:
as published where ``split`` says so, else cut at random, stratified by class. A scheme then draws a *share
matrix* (clients x classes): which share of a class's samples each client gets. Every pool is dealt by the
same matrix, so a client's test samples follow the label distribution of its training samples, up to rounding.
Nothing is drawn again until it fits, so a partition always ends. The samples of unseen clients are split off
before that: their share of every class of every pool, stratified. Both parts are then dealt with streams of
their own; hence another ``unseen_scheme`` leaves the participants as they are.

**Natural groups** ("group:NAME"). A client is a group: a writer, an alphabet. With more groups than clients,
the seeded stream chooses which to use; with fewer, a group is divided evenly, stratified by class, among
several clients (pFedHN 5.5: 20 coarse classes, 100 clients). Unseen clients never share a group with a participant:
they are whole groups, drawn or named (``unseen_groups``), and where groups are divided, whole groups are divided among
them. A split that is given is kept. Where it runs between groups and not within them (in QMNIST the test writers are
other people than the training writers) participants are groups of its training part and unseen clients groups of its
test part; each client's own samples are cut, and a note says so.

**Samples that belong together** (``split_by``: the name of a grouping) are all in one pool where pools are cut, and on
one side where unseen clients' samples are split off: windows of one recording, say, which are nearly copies of each
other.

Every participant ends with at least one training sample. Where a scheme left it none, single samples move
from the then largest participant, and a note says how many. Empty val and test sets are allowed and noted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import ConfigError, DataError, unknown
from fedloom.core.random import stream

POOLS = ("train", "val", "test")
TRAIN, VAL, TEST = range(3)
NOBODY = -1

Floats = npt.NDArray[np.float64]
Draw = TypeVar("Draw", bound=Callable[..., Any])


@dataclass(frozen=True)
class ClientSplit:
    """The samples of one client: disjoint, sorted int64 indices into the dataset."""

    id: str
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray
    unseen: bool = False


@dataclass(frozen=True)
class Partition:
    """The clients, participants first; the samples that none of them holds; and what a user should know."""

    clients: tuple[ClientSplit, ...]
    unused: np.ndarray
    notes: tuple[str, ...]

    @property
    def participants(self) -> list[ClientSplit]:
        """The clients that take part in training."""
        return [client for client in self.clients if not client.unseen]

    def summary(self, labels: np.ndarray) -> list[dict[str, Any]]:
        """One row per client: sizes, number of classes, share of the largest class, and skew.

        Skew is the total variation distance between the client's label shares and those of all clients'
        samples pooled: 0 is the same mix, 1 is disjoint. For regression targets the last three are None.
        """
        codes = _codes(labels)
        width = int(codes.max(initial=0)) + 1
        held = [np.concatenate([c.train, c.val, c.test]) for c in self.clients]
        counts = np.stack([np.bincount(codes[own], minlength=width) for own in held])
        pooled = _row_shares(counts.sum(axis=0, keepdims=True))
        shares = _row_shares(counts)
        skew = np.abs(shares - pooled).sum(axis=1) / 2 * (counts.sum(axis=1) > 0)
        by_class = _has_classes(labels)
        return [
            {
                "id": client.id,
                "unseen": client.unseen,
                "train": len(client.train),
                "val": len(client.val),
                "test": len(client.test),
                "classes": int((counts[i] > 0).sum()) if by_class else None,
                "largest": float(shares[i].max()) if by_class else None,
                "skew": float(skew[i]) if by_class else None,
            }
            for i, client in enumerate(self.clients)
        ]


@dataclass(frozen=True)
class Scheme:
    """A way to split samples: its name, the letter of its parameter ("" for none), one line about it."""

    name: str
    parameter: str
    about: str
    draw: Callable[..., Any]

    @property
    def usage(self) -> str:
        """How it is written, e.g. ``classes:K``."""
        return f"{self.name}:{self.parameter}" if self.parameter else self.name


_SCHEMES: dict[str, Scheme] = {}


def _scheme(name: str, parameter: str = "") -> Callable[[Draw], Draw]:
    """Register a scheme; the first line of its docstring is its description."""

    def register(draw: Draw) -> Draw:
        _SCHEMES[name] = Scheme(name, parameter, (draw.__doc__ or "").splitlines()[0], draw)
        return draw

    return register


def schemes() -> tuple[Scheme, ...]:
    """Every scheme that ``partition`` knows, for help texts."""
    return tuple(_SCHEMES.values())


def partition(
    labels: np.ndarray,
    scheme: str,
    clients: int,
    seed: int,
    *,
    split: np.ndarray | None = None,
    groups: Mapping[str, np.ndarray] | None = None,
    unseen: float = 0,
    unseen_scheme: str | None = None,
    unseen_groups: Sequence[str] = (),
    split_by: str | None = None,
    val_share: float = 0.15,
    test_share: float = 0.15,
) -> Partition:
    """Split samples over ``clients`` participants and, in addition, unseen clients.

    ``labels`` holds one integer class per sample; floats are regression targets, which only "iid" and
    "group:NAME" can split. ``split`` holds "train", "val" or "test" per sample as published. A pool that it
    lacks is cut from its training samples by ``val_share`` or ``test_share``; without ``split`` both are.
    ``unseen`` is a number of clients or, below 1, their share of all clients, then at least one client.
    ``unseen_groups`` names them instead, and ``split_by`` a grouping whose samples stay together.
    """
    _check(labels, clients, unseen, val_share, test_share)
    parts = (parse_scheme(scheme), parse_scheme(unseen_scheme or scheme))
    published = None if split is None else _published(split, len(labels))
    if split_by is not None and split_by not in (groups or {}):
        raise unknown("grouping to split by", split_by, groups or ["(this dataset has none)"])
    together = None if split_by is None else _group(split_by, groups or {}, len(labels))[1]
    named = tuple(unseen_groups)
    if named and unseen:
        raise ConfigError("Unseen groups are named, and a number of unseen clients is given too; give one of the two.")
    extra = len(named) or _unseen_count(unseen, clients)
    task = _Task(labels, seed, clients, extra, published, val_share, test_share, together, named)
    if "group" not in (parts[0][0].name, parts[1][0].name):
        if named:
            raise ConfigError(f"Got unseen groups with scheme {scheme!r}, which deals all samples; use 'group:NAME'.")
        _check_labels(labels, parts)
        return _with_untrained(_with_shared(_by_label(task, parts), groups or {}), labels, split_by)
    if parts[0] != parts[1]:
        raise ConfigError(
            f"Got scheme {scheme!r} with unseen scheme {unseen_scheme!r}, but natural groups hold out whole "
            "groups; leave the unseen scheme out, or use label schemes for both."
        )
    return _with_untrained(_by_group(task, parts[0][1], groups or {}), labels, split_by)


@dataclass(frozen=True)
class _Task:
    """The checked arguments of ``partition``."""

    labels: np.ndarray
    seed: int
    clients: int
    extra: int
    published: np.ndarray | None
    val_share: float
    test_share: float
    together: np.ndarray | None = None
    """The number of the group of samples that belong together."""
    unseen_groups: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.clients + self.extra

    def start(self) -> tuple[np.ndarray, list[tuple[int, float]]]:
        """The pool of each sample as published, and the pools to be cut from the training samples."""
        wanted = [(TEST, self.test_share), (VAL, self.val_share)]
        if self.published is None:
            return np.full(len(self.labels), TRAIN), wanted
        return self.published.copy(), [w for w in wanted if w[0] not in self.published]


# ---- schemes: each draws a share matrix (clients, classes); columns sum to 1, or to 0 if nobody holds them


@_scheme("iid")
def _iid(clients: int, sizes: Floats, _: None, rng: np.random.Generator) -> Floats:
    """Every client gets an equal share of every class."""
    return np.full((clients, len(sizes)), 1 / clients)


@_scheme("classes", "K")
def _classes(clients: int, sizes: Floats, k: int, rng: np.random.Generator) -> Floats:
    """K classes per client, of each a share drawn from U(.4, .6) and normalised over its holders.

    pFedHN (Shamsian et al. 2021) section 5.1. Each client takes the K classes with the fewest holders so far,
    ties at random: no class twice, and the numbers of holders of any two classes differ by one at most.
    """
    if k > len(sizes):
        raise ConfigError(
            f"Got more classes per client ({k}) than classes in the data ({len(sizes)}); "
            f"use 'classes:{len(sizes)}' or less."
        )
    alpha = np.zeros((clients, len(sizes)))
    holders = np.zeros(len(sizes), dtype=np.int64)
    for client in range(clients):
        mine = np.lexsort((rng.random(len(sizes)), holders))[:k]
        holders[mine] += 1
        alpha[client, mine] = rng.uniform(0.4, 0.6, size=k)
    per_class: Floats = np.maximum(alpha.sum(axis=0), 0.4)  # 0.4 at least where anybody holds it
    return alpha / per_class


@_scheme("shards", "K")
def _shards(clients: int, sizes: Floats, k: int, rng: np.random.Generator) -> Floats:
    """K shards per client of the training samples sorted by label and cut into equal shards.

    McMahan et al. (2017) section 3. The matrix says which shares of its classes a client's shards cover.
    """
    ends = np.cumsum(sizes)
    cuts = np.linspace(0, ends[-1], clients * k + 1)[:, None]
    overlap = np.minimum(cuts[1:], ends) - np.maximum(cuts[:-1], ends - sizes)  # (shards, classes)
    shards: Floats = rng.permutation(np.maximum(overlap, 0) / sizes)
    shares: Floats = shards.reshape(clients, k, -1).sum(axis=1)
    return shares


@_scheme("dirichlet", "A")
def _dirichlet(clients: int, sizes: Floats, alpha: float, rng: np.random.Generator) -> Floats:
    """Per client class proportions drawn from Dir(A), fitted so that clients are of nearly equal size.

    As IT-PFL-HN section 6.3. No finite pool can give every client exactly its drawn proportions and yet be
    used up. The choice here: the proportions are scaled by row and by column (Sinkhorn) until every sample is
    allocated and clients have equal totals, which keeps the odds ratios that were drawn. After a fixed number
    of sweeps the allocation is exact and the totals are nearly equal; less so for A far below 0.01.
    """
    plan = _log_dirichlet((clients, len(sizes)), alpha, rng)
    for _ in range(100):
        plan -= _log_sum(plan, axis=1)
        plan += np.log(sizes) - _log_sum(plan, axis=0)
    return np.exp(plan - np.log(sizes))


@_scheme("dirichlet-class", "A")
def _dirichlet_class(clients: int, sizes: Floats, alpha: float, rng: np.random.Generator) -> Floats:
    """Per class shares over the clients drawn from Dir(A); clients differ in size.

    Yurochkin et al. (2019), Hsu et al. (2019).
    """
    return np.exp(_log_dirichlet((len(sizes), clients), alpha, rng)).T


@_scheme("dirichlet-normalised", "A")
def _dirichlet_normalised(clients: int, sizes: Floats, alpha: float, rng: np.random.Generator) -> Floats:
    """Per client class proportions drawn from Dir(A), normalised over clients; clients differ in size.

    pFedHN section 5.3.
    """
    drawn = _log_dirichlet((clients, len(sizes)), alpha, rng)
    return np.exp(drawn - _log_sum(drawn, axis=0))


def _log_dirichlet(shape: tuple[int, int], alpha: float, rng: np.random.Generator) -> Floats:
    """Logarithms of one symmetric Dirichlet draw per row.

    In logarithms a tiny alpha cannot underflow, so no column is ever lost: Gamma(a) is Gamma(a + 1) times
    U^(1/a) (Marsaglia and Tsang 2000). By symmetry, a class that nobody wanted goes to a uniformly drawn
    client.
    """
    log_gamma = np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha
    return log_gamma - _log_sum(log_gamma, axis=1)


def _log_sum(logs: Floats, axis: int) -> Floats:
    """Logarithm of the sum of exponentials."""
    top: Floats = logs.max(axis=axis, keepdims=True)
    total: Floats = np.exp(logs - top).sum(axis=axis, keepdims=True)
    return top + np.log(total)


# ---- label schemes -------------------------------------------------------------------------------------


def _by_label(task: _Task, parts: tuple[tuple[Scheme, Any], ...]) -> Partition:
    """Draw the pools, split off the unseen clients' samples, deal each part by its own scheme."""
    codes = _codes(task.labels)
    pool, wanted = task.start()
    _hold_out(pool, codes, np.arange(len(codes)), wanted, stream(task.seed, "partition", "pools"), task.together)
    _check_enough(int((pool == TRAIN).sum()), task.total)
    held_out = _split_off(codes, pool, task.extra / task.total, stream(task.seed, "partition", "unseen"), task.together)
    members = (
        ("participant", ~held_out, 0, task.clients),
        ("unseen client", held_out, task.clients, task.extra),
    )
    owner = np.full(len(codes), NOBODY)
    for (who, part, first, count), (scheme, parameter) in zip(members, parts):
        if count == 0:
            continue
        rng = stream(task.seed, "partition", who)
        # sizes weigh the classes; one without training samples weighs next to nothing, yet has an owner
        sizes = np.maximum(_sizes(codes[part & (pool == TRAIN)], int(codes.max()) + 1), 1e-3)
        shares = scheme.draw(count, sizes, parameter, rng)
        for kind in range(len(POOLS)):
            mine = part & (pool == kind)
            dealt = _deal(codes[mine], shares, rng)
            owner[mine] = np.where(dealt < count, first + dealt, NOBODY)
    training = (pool == TRAIN) & ~held_out
    notes = _repair(owner, training, task.clients, stream(task.seed, "partition", "repair"))
    for who, part, _, _ in members:
        notes += _note_unheld(task.labels, part & (owner == NOBODY), who)
    return _assemble(owner, pool, [str(i) for i in range(task.total)], task.clients, notes)


def _split_off(
    codes: np.ndarray, pool: np.ndarray, share: float, rng: np.random.Generator, together: np.ndarray | None
) -> np.ndarray:
    """A mask over a share of each class of each pool; or of the groups of samples that belong together."""
    mask = np.zeros(len(codes), dtype=bool)
    for kind in range(len(POOLS)):
        members = np.flatnonzero(pool == kind)
        mask[members] = _pick_some(codes[members], share, rng, None if together is None else together[members])
    return mask


def _with_shared(found: Partition, groups: Mapping[str, np.ndarray]) -> Partition:
    """The partition, with a note where unseen clients have samples of a participant's own clients."""
    unseen = [c for c in found.clients if c.unseen]
    if not unseen or "client" not in groups:
        return found
    sides = [
        np.concatenate([r for c in part for r in (c.train, c.val, c.test)]) for part in (unseen, found.participants)
    ]
    shared = set(groups["client"][sides[0]].tolist()) & set(groups["client"][sides[1]].tolist())
    if not shared:
        return found
    note = (
        f"unseen clients have samples of {len(shared):,} groups of 'client' that participants have samples of, too: "
        "newcomers would fare worse; --partition group:client holds whole groups out"
    )
    return replace(found, notes=(*found.notes, note))


def _with_untrained(found: Partition, labels: np.ndarray, split_by: str | None) -> Partition:
    """The partition, with a note where samples that stay together leave clients no training samples of a class."""
    if split_by is None or not _has_classes(labels):
        return found
    number = sum(
        bool(set(labels[np.r_[c.val, c.test]].tolist()) - set(labels[c.train].tolist())) for c in found.clients
    )
    if not number:
        return found
    note = (
        f"{number:,} of {len(found.clients):,} clients are tested on classes that they have no training samples of: "
        f"each group of {split_by!r} stays whole, and there are too few of them"
    )
    return replace(found, notes=(*found.notes, note))


def _deal(codes: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The client of each sample of a pool, by the share matrix; one past the last client for nobody."""
    clients, classes = shares.shape
    sizes = _sizes(codes, classes)
    counts = _counts(shares, sizes, rng)
    # (clients + 1, classes), read class by class as the samples are ordered
    runs = np.vstack([counts, sizes - counts.sum(axis=0)]).T.ravel()
    dealt = np.empty(len(codes), dtype=np.int64)
    order = np.lexsort((rng.random(len(codes)), codes))
    dealt[order] = np.repeat(np.tile(np.arange(clients + 1), classes), runs)
    return dealt


def _counts(shares: Floats, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How many samples of each class each client gets: shares times sizes, rounded so that no sample is lost.

    Largest remainders, class by class. What rounding took from a client so far is added to its remainder, so
    that many small classes do not all round in favour of the same clients.
    """
    exact: Floats = shares * sizes  # (clients, classes)
    counts: np.ndarray = np.floor(exact + 1e-9).astype(np.int64)
    left = np.rint(exact.sum(axis=0)).astype(np.int64) - counts.sum(axis=0)
    owed = rng.random(len(shares)) * 1e-6  # breaks ties at random
    for c in range(len(sizes)):
        # a share of less than a millionth of a sample is none: it must not win a sample of a foreign class
        claim = np.where(exact[:, c] > 1e-6, exact[:, c] - counts[:, c] + owed, -np.inf)
        counts[np.argsort(-claim, kind="stable")[: left[c]], c] += 1
        owed += exact[:, c] - counts[:, c]
    return counts


# ---- natural groups ------------------------------------------------------------------------------------


@_scheme("group", "NAME")
def _by_group(task: _Task, name: str, groups: Mapping[str, np.ndarray]) -> Partition:
    """One client per natural group of the dataset, e.g. per writer; few groups are divided among clients."""
    codes, total = _codes(task.labels), task.total
    names, group = _group(name, groups, len(codes))
    _check_enough(len(codes), total)
    held = _held_out(task, name, names, group)
    rng = stream(task.seed, "partition", "groups")
    if held is None:
        copies = _spread(total, len(names), rng)  # clients per group
        order = _participants_first(total, task.extra, stream(task.seed, "partition", "unseen"))
    else:
        copies = np.zeros(len(names), dtype=np.int64)
        for side, count in ((~held, task.clients), (held, task.extra)):
            copies[side] = _spread(count, int(side.sum()), rng)
        order = np.argsort(np.repeat(held, copies), kind="stable")
    pool, wanted = task.start()
    slot = _divide(group, codes * len(POOLS) + pool, copies, rng)
    owner = np.append(np.argsort(order), NOBODY)[slot]  # the last entry is for slot -1
    notes = _note_spare(name, copies, owner)

    lacking = _lacking(owner, pool, total)
    if not task.unseen_groups and apart_groups(group, task.published).any():
        notes.append(
            f"the published split is by {name!r}: participants are of its training part, "
            + (f"the {task.extra:,} unseen clients" if task.extra else "and unseen clients would be")
            + " of its test part; each client's own samples are cut"
        )
        pool, wanted = replace(task, published=None).start()
    elif lacking == total and task.published is not None:  # a split by clients, not within them
        notes.append(
            f"the published split is not used: {lacking:,} of {total:,} clients have no samples in one of "
            "its pools, so each client's own samples are cut"
        )
        pool, wanted = replace(task, published=None).start()
    rng = stream(task.seed, "partition", "pools")
    for own in _by_owner(owner, total):
        _hold_out(pool, codes, own, wanted, rng, task.together)
    training = (pool == TRAIN) & (owner != NOBODY) & (owner < task.clients)
    _check_enough(int(training.sum()), task.clients)
    notes += _repair(owner, training, task.clients, stream(task.seed, "partition", "repair"))
    ids = [f"{g}/{k}" if n > 1 else str(g) for g, n in zip(names, copies) for k in range(n)]
    return _assemble(owner, pool, [ids[i] for i in order], task.clients, notes)


def apart_groups(group: np.ndarray, published: np.ndarray | None) -> np.ndarray:
    """A mask over the groups that a split by groups has in its test part alone; none, if it runs within groups.

    ``group`` are the numbers of the samples' groups, ``published`` those of their pools.
    """
    number = int(group.max(initial=-1)) + 1
    if published is None:
        return np.zeros(number, dtype=bool)
    tested = np.bincount(group[published == TEST], minlength=number) > 0
    trained = np.bincount(group[published != TEST], minlength=number) > 0
    apart: np.ndarray = tested & ~trained
    return apart if trained.any() and not (tested & trained).any() else np.zeros(number, dtype=bool)


def _held_out(task: _Task, name: str, names: np.ndarray, group: np.ndarray) -> np.ndarray | None:
    """A mask over the groups that are unseen clients; None where every client is a group, to be drawn from all."""
    number, apart = len(names), apart_groups(group, task.published)
    if task.unseen_groups:
        strange = sorted(set(task.unseen_groups) - set(names.tolist()))
        if strange:
            raise unknown(f"group of {name!r} to hold out", strange[0], names.tolist())
        held = np.isin(names, task.unseen_groups)
    elif apart.any():
        held = apart
    elif task.extra and task.total > number:
        rng, share = stream(task.seed, "partition", "unseen"), task.extra / task.total
        held = np.zeros(number, dtype=bool)
        held[rng.permutation(number)[: min(max(1, round(share * number)), task.extra, number - 1)]] = True
    else:
        return None
    if held.all() or not held.any():
        raise ConfigError(
            f"The {number} groups of {name!r} cannot be both participants and unseen clients, which share no group; "
            "hold fewer out, or split by another grouping."
        )
    return held


def _spread(clients: int, groups: int, rng: np.random.Generator) -> np.ndarray:
    """How many clients each group is divided among, as evenly as can be; none for groups that are not used."""
    copies = np.full(groups, clients // groups)
    copies[rng.permutation(groups)[: clients % groups]] += 1
    return copies


def _participants_first(total: int, extra: int, rng: np.random.Generator) -> np.ndarray:
    """All slots, with ``extra`` of them, drawn at random, at the end as unseen clients."""
    is_unseen = np.zeros(total, dtype=bool)
    is_unseen[rng.permutation(total)[:extra]] = True
    return np.argsort(is_unseen, kind="stable")


def _divide(group: np.ndarray, strata: np.ndarray, copies: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The slot of each sample: a group's samples go round its slots in turn, stratified; -1 without slots."""
    order = np.lexsort((rng.random(len(group)), strata, group))
    sizes = np.bincount(group, minlength=len(copies))
    rank = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    of = group[order]
    slot = np.empty(len(group), dtype=np.int64)
    first = np.cumsum(copies) - copies
    slot[order] = np.where(copies[of] > 0, first[of] + rank % np.maximum(copies[of], 1), NOBODY)
    return slot


def _lacking(owner: np.ndarray, pool: np.ndarray, total: int) -> int:
    """How many clients lack samples in one of the pools that there are."""
    held = owner != NOBODY
    counts = _sizes(owner[held] * len(POOLS) + pool[held], total * len(POOLS))
    table = counts.reshape(total, len(POOLS))[:, np.unique(pool)]
    return int(((table == 0).any(axis=1) & (table > 0).any(axis=1)).sum())


def _group(name: str, groups: Mapping[str, np.ndarray], samples: int) -> tuple[np.ndarray, np.ndarray]:
    """The names of the groups, and the number of each sample's group."""
    if not groups:
        raise ConfigError(f"Got scheme 'group:{name}', but this dataset has no natural groups; use a label scheme.")
    if name not in groups:
        raise unknown("group", name, groups)
    if len(groups[name]) != samples:
        raise DataError(f"Group {name!r} names {len(groups[name])} samples of {samples}; give one name per sample.")
    nameless = int((np.asarray(groups[name]).astype(str) == "").sum())
    if nameless:
        raise DataError(
            f"Group {name!r} has no name for {nameless:,} of {samples:,} samples; name one for each, or leave them out."
        )
    return np.unique(np.asarray(groups[name]).astype(str), return_inverse=True)


def _note_spare(name: str, copies: np.ndarray, owner: np.ndarray) -> list[str]:
    spare, unused = int((copies == 0).sum()), int((owner == NOBODY).sum())
    if spare == 0:
        return []
    return [f"{spare:,} of {len(copies):,} groups of {name!r} have no client: {unused:,} samples unused"]


# ---- what both kinds share -----------------------------------------------------------------------------


def _hold_out(
    pool: np.ndarray,
    codes: np.ndarray,
    members: np.ndarray,
    wanted: list[tuple[int, float]],
    rng: np.random.Generator,
    together: np.ndarray | None,
) -> None:
    """Turn shares of the training samples among ``members`` into val and test samples, in place."""
    left = 1.0
    for kind, share in wanted:
        train = members[pool[members] == TRAIN]
        pool[train[_pick_some(codes[train], share / left, rng, None if together is None else together[train])]] = kind
        left -= share


def _pick_some(codes: np.ndarray, share: float, rng: np.random.Generator, together: np.ndarray | None) -> np.ndarray:
    """A mask over a share of the samples: of whole groups, where some belong together."""
    return _pick(codes, share, rng) if together is None else _pick_groups(codes, together, share, rng)


def _pick_groups(codes: np.ndarray, together: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A mask over whole groups with about a share of the samples; one at least if there are two, and never all.

    No class is taken whole, unless every group has a class of its own.
    """
    _, inverse, sizes = np.unique(together, return_inverse=True, return_counts=True)
    chosen, wanted = np.zeros(len(sizes), dtype=bool), share * len(together)
    if share == 0 or len(sizes) < 2:
        return chosen[inverse]
    order = rng.permutation(len(sizes))
    held = np.zeros((len(sizes), codes.max() + 1), dtype=np.int64)
    np.add.at(held, (inverse, codes), 1)
    left = held.sum(axis=0)
    for one in order:
        keeps_all = not ((held[one] > 0) & (held[one] == left)).any()
        if keeps_all and sizes[chosen].sum() + sizes[one] / 2 <= wanted:
            chosen[one] = True
            left -= held[one]
    if not chosen.any():
        chosen[order[sizes[order].argmin()]] = True
    if chosen.all():
        chosen[order[-1]] = False
    return chosen[inverse]


def _pick(codes: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A mask over a rounded share of the samples, stratified by class; it never takes them all.

    Every (1/share)-th of the samples sorted by class, in random order of classes and within a class.
    """
    mask = np.zeros(len(codes), dtype=bool)
    if len(codes) == 0:
        return mask
    order = np.lexsort((rng.random(len(codes)), rng.permutation(codes.max() + 1)[codes]))
    mask[order] = np.diff(np.floor(share * np.arange(len(codes) + 1) + 0.5 + 1e-9)) > 0
    if mask.all():
        mask[order[0]] = False
    return mask


def _repair(owner: np.ndarray, training: np.ndarray, clients: int, rng: np.random.Generator) -> list[str]:
    """Give each participant without training samples one from the then largest, in place; return the note."""
    sizes = np.bincount(owner[training & (owner != NOBODY)], minlength=clients)
    empty = np.flatnonzero(sizes == 0)
    for client in empty:
        richest = int(sizes.argmax())
        # where nobody has two, samples are left that no client holds
        donor = richest if sizes[richest] > 1 else NOBODY
        owner[rng.choice(np.flatnonzero(training & (owner == donor)))] = client
        sizes[client] += 1
        sizes[richest] -= donor == richest
    if len(empty) == 0:
        return []
    return [
        f"{len(empty):,} of {clients:,} participants drew no training samples: one moved to each from the then largest"
    ]


def _assemble(owner: np.ndarray, pool: np.ndarray, ids: list[str], clients: int, notes: list[str]) -> Partition:
    """The partition from the owner and the pool of each sample."""
    splits = []
    for i, own in enumerate(_by_owner(owner, len(ids))):
        train, val, test = (own[pool[own] == kind] for kind in range(len(POOLS)))
        splits.append(ClientSplit(ids[i], train, val, test, unseen=i >= clients))
    for kind in POOLS:
        lacking = sum(len(getattr(s, kind)) == 0 for s in splits)
        if lacking:
            notes.append(f"{lacking:,} of {len(splits):,} clients have no {kind} samples")
    return Partition(tuple(splits), np.flatnonzero(owner == NOBODY).astype(np.int64), tuple(notes))


def _by_owner(owner: np.ndarray, total: int) -> list[np.ndarray]:
    """The sorted sample indices of each owner."""
    order = np.argsort(owner, kind="stable").astype(np.int64)
    edges = np.searchsorted(owner[order], np.arange(total + 1))
    return [order[a:b] for a, b in pairwise(edges)]


def _note_unheld(labels: np.ndarray, unheld: np.ndarray, who: str) -> list[str]:
    classes = np.unique(labels[unheld])
    if len(classes) == 0:
        return []
    listed = ", ".join(str(c) for c in classes[:10]) + (", ..." if len(classes) > 10 else "")
    subject = f"class {listed} is" if len(classes) == 1 else f"{len(classes):,} classes ({listed}) are"
    return [f"{subject} held by no {who}: {int(unheld.sum()):,} samples unused"]


def _sizes(codes: np.ndarray, length: int) -> np.ndarray:
    return np.bincount(codes, minlength=length)


def _row_shares(counts: np.ndarray) -> Floats:
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _has_classes(labels: np.ndarray) -> bool:
    return labels.dtype.kind in "iub"


def _codes(labels: np.ndarray) -> np.ndarray:
    """Classes numbered from 0 without gaps; one class for regression targets."""
    if not _has_classes(labels):
        return np.zeros(len(labels), dtype=np.int64)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


# ---- arguments -----------------------------------------------------------------------------------------


def _check(labels: np.ndarray, clients: int, unseen: float, val_share: float, test_share: float) -> None:
    if labels.dtype.kind not in "iubf" or (labels.ndim != 1 and _has_classes(labels)):
        raise DataError(
            f"Got labels of type {labels.dtype} and shape {labels.shape}; expected one integer class per "
            "sample, or real numbers for regression: encode the labels first."
        )
    if clients < 1:
        raise ConfigError(f"Got {clients} clients; ask for at least 1.")
    if not (0 <= unseen < 1 or unseen == int(unseen) > 0):
        raise ConfigError(f"Got unseen={unseen}; give a whole number of clients, or a share of all clients below 1.")
    if not (min(val_share, test_share) >= 0 and val_share + test_share < 1):
        raise ConfigError(
            f"Got val_share={val_share} and test_share={test_share}; neither may be negative, and together "
            "they must stay below 1 so that training samples are left."
        )


def _check_labels(labels: np.ndarray, parts: tuple[tuple[Scheme, Any], ...]) -> None:
    for scheme, _ in parts:
        if scheme.name != "iid" and not _has_classes(labels):
            raise ConfigError(
                f"Scheme {scheme.usage!r} splits by class, but samples have no single class (they have "
                "targets, or several labels); use 'iid' or 'group:NAME'."
            )


def _check_enough(training: int, clients: int) -> None:
    if training < clients:
        raise ConfigError(
            f"Got more clients ({clients:,}) than training samples ({training:,}); ask for fewer clients, "
            "unseen ones included, or hold out less for validation and test."
        )


def _unseen_count(unseen: float, clients: int) -> int:
    """A count as it is; a share s of all clients: s / (1 - s) per participant, at least one client."""
    if unseen >= 1 or unseen == 0:
        return int(unseen)
    return max(1, round(unseen * clients / (1 - unseen)))


def _published(split: np.ndarray, samples: int) -> np.ndarray:
    """The published split as pool numbers."""
    if len(split) != samples:
        raise DataError(f"The split names {len(split)} samples of {samples}; give one of {POOLS} per sample.")
    found, inverse = np.unique(np.asarray(split).astype(str), return_inverse=True)
    if strange := [str(f) for f in found if f not in POOLS]:
        raise DataError(f"The split holds {strange[0]!r}; give 'train', 'val' or 'test' per sample.")
    return np.array([POOLS.index(f) for f in found], dtype=np.int64)[inverse]


def parse_scheme(spec: str) -> tuple[Scheme, Any]:
    """A scheme and its parameter from e.g. "classes:2"."""
    name, colon, text = spec.partition(":")
    if name not in _SCHEMES:
        raise unknown("partition scheme", spec, (s.usage for s in schemes()))
    scheme = _SCHEMES[name]
    if not scheme.parameter and colon:
        raise ConfigError(f"Got scheme {spec!r}, but {name!r} takes no parameter; write {name!r}.")
    if scheme.parameter and not text:
        raise ConfigError(f"Got scheme {spec!r} without its parameter; write {scheme.usage!r}.")
    return scheme, _READERS[scheme.parameter](spec, text)


def _whole(spec: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"Got {text!r} in scheme {spec!r}; expected a whole number of at least 1, as in 'classes:2'.")
    return int(text)


def _alpha(spec: str, text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = 0.0
    # beyond these bounds floats say "one client each" and "iid" exactly
    if not 1e-6 <= alpha <= 1e6:
        raise ConfigError(
            f"Got {text!r} in scheme {spec!r}; expected a concentration above 0 (from 1e-6 to 1e6), "
            "as in 'dirichlet:0.1'."
        )
    return alpha


_READERS: dict[str, Callable[[str, str], Any]] = {
    "": lambda spec, text: None,
    "K": _whole,
    "A": _alpha,
    "NAME": lambda spec, text: text,
}
