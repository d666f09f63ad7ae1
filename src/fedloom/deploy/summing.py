# SPDX-License-Identifier: Apache-2.0
"""A node's part in a secure sum: what it tells in each message, and what it refuses. The messages: ``deploy.pact``.

Every message runs in a process of its own, so what is kept between them lies in the node's folder, ``RUN/sums``. A step
is written down before it is answered and is never done twice. Seeds are gone when the sum is over, or the next begins.

A node does not trust the server with the others' names. It refuses a sum

- of a round that it has unmasked before: two sums that differ by one client would tell that client's change;
- of fewer clients than its own ``min-summed``;
- whose keys are not signed by its ``peers``, where its config has some.

And it never tells both shares of one client, that of its own mask and that of its second key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Algorithm
from fedloom.core.errors import RunError
from fedloom.core.trees import ClientId, Tree, leaves
from fedloom.deploy import masks
from fedloom.deploy.options import NodeOptions, Settings, Sums
from fedloom.deploy.pact import (
    FEWEST,
    LOSS,
    SIGNATURE,
    Advert,
    Identity,
    Sum,
    addressed,
    advertised,
    adverts_in,
    as_text,
    counted,
    digest,
    names_in,
    paired,
    threshold,
    words_in,
)
from fedloom.deploy.store import Refusal, Store
from fedloom.runs.files import to_json, write_file
from fedloom.runs.lock import locked

TOLD = {"num_samples", "loss"}
"""What a reply says besides its change: of the first nothing enters the sum, of the second the sum is told."""


class Notes(NamedTuple):
    """What a node keeps of a sum, and of those before."""

    number: int = 0
    """The last sum that was begun."""
    of: int = 0
    """The round that it is of."""
    step: str = ""
    """The last message of it that was answered; of one that is over, none."""
    seeds: Mapping[str, str] = {}
    adverts: Mapping[ClientId, Advert] = {}
    shares: Mapping[ClientId, str] = {}
    """By whose they are: of the second key, then of the own mask's seed."""
    agreed: tuple[ClientId, ...] = ()
    """Whose changes this node has signed for."""
    round: int = 0
    """The last round that was unmasked: neither it nor one before is summed again."""


def summing(settings: Settings, own: NodeOptions) -> Sums | None:
    """How this node's changes are added up; None: they are told one by one, and the node has nothing against it."""
    sums, wanted = settings.sums, own.min_summed or own.identity or own.peers
    if sums is None and wanted:
        raise Refusal("tells what it learned only in a secure sum (its own config), and secure-aggregation is none.")
    if sums and not sums.signed and (own.identity or own.peers):
        raise Refusal("takes part only in sums whose keys are signed (its own config), and here they are not.")
    if sums and sums.signed and own.role == "participant" and not (own.identity and own.peers):
        raise Refusal("has no identity or no peers in its own config, and the keys of sums are to be signed here.")
    return sums


class Member:
    """A node among those whose changes are added up."""

    def __init__(self, sums: Sums, own: NodeOptions, store: Store, asked: Mapping[str, Any]) -> None:
        self.client, self._store = str(asked["client"]), store
        if type(asked["stage"]) is not int or type(asked["number"]) is not int:
            raise Refusal("was asked for a part in a sum that is of no round.")
        self.sum = Sum(str(asked["run"]), asked["stage"], asked["number"])
        self._sums, self._least = sums, max(FEWEST, own.min_summed)
        self._identity = Identity(own.identity, own.peers) if sums.signed else None
        if self._identity and not self._identity.is_of(self.client):
            raise Refusal(f"is asked as client {self.client!r}, whose key among its peers' is not its own.")

    def respond(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """The answer to any message but that to train."""
        steps: dict[str, Callable[[Mapping[str, Any], Notes], tuple[Notes, dict[str, str]]]] = {
            "keys": self._keys, "shares": self._shares, "agree": self._agree, "unmask": self._unmask,
        }  # fmt: skip
        step = steps.get(str(asked.get("part")))
        if step is None:
            raise Refusal("was asked for a part of a sum that there is not.")
        with self._kept() as kept:
            notes, told = self._said_well(step, asked, kept())
            self._keep(notes)
        return told

    def taking_part(self, asked: Mapping[str, Any]) -> Notes:
        """What a change is masked by: to be used once, which is written down here."""
        with self._kept() as kept:
            notes, _ = self._said_well(self._letters, asked, kept())
            self._keep(notes)
        return notes

    def masked(self, algorithm: Algorithm, notes: Notes, reply: Tree) -> Tree:
        """A reply under masks: whole numbers of which nothing can be told but their sum with the others'."""
        pact, seeds = digest(self.sum, notes.adverts), _seeds(notes)
        scale = masks.Scale(self._sums.norm, len(notes.adverts))
        total = scale.whole(shortened(algorithm, reply, scale))
        total += masks.mask(masks.derived(seeds["own"], pact), len(total))
        for other in notes.shares:
            if other == self.client:
                continue
            key = masks.agreed(
                seeds["mask"], bytes.fromhex(notes.adverts[other].mask), paired(pact, self.client, other)
            )
            mask = masks.mask(key, len(total))
            total = total + mask if self.client < other else total - mask
        return {"masked": torch.from_numpy(total.view(np.int32))}

    # Each step takes a message and what was kept, and gives what is to be kept and what is told: it is kept first.

    def _keys(self, asked: Mapping[str, Any], before: Notes) -> tuple[Notes, dict[str, str]]:
        """Begin a sum: new seeds, and the public half of each. Whatever was left of one before is forgotten."""
        if self.sum.number <= before.number:
            raise Refusal("was asked to begin a sum that it has begun before.")
        if self.sum.round <= before.round:
            return before, {"spent": str(before.round)}
        seeds = {name: masks.seed() for name in ("seal", "mask", "own")}
        keys = [masks.public_key(seeds["seal"]), masks.public_key(seeds["mask"]), masks.commitment(seeds["own"])]
        advert = Advert(*(key.hex() for key in keys))
        if self._identity:
            advert = advert._replace(signature=self._identity.sign(advertised(self.sum, self.client, advert)))
        known = {name: seed.hex() for name, seed in seeds.items()}
        notes = Notes(self.sum.number, self.sum.round, "keys", known, {self.client: advert}, round=before.round)
        return notes, {"keys": json.dumps(advert)}

    def _shares(self, asked: Mapping[str, Any], before: Notes) -> tuple[Notes, dict[str, str]]:
        """Share the seeds of both masks with all others, each share sealed for one of them.

        The keys are looked at first: the own ones must be among them, none may be there twice, or the server could
        stand for several clients, and each must be signed by its client where there are ``peers``.
        """
        self._check_step(before, "keys")
        adverts = adverts_in(asked["adverts"])
        self._check_many(adverts)
        if adverts.get(self.client) != before.adverts[self.client]:
            raise Refusal("was shown keys of a sum among which its own are not.")
        if len({key for advert in adverts.values() for key in advert[:3]}) < 3 * len(adverts):
            raise Refusal("was shown a key of a sum twice.")
        for client, advert in adverts.items():
            if self._identity and not self._identity.has_signed(
                client, advert.signature, advertised(self.sum, client, advert)
            ):
                raise Refusal(f"was shown keys of client {client} that its own list of peers does not bear out.")
        pact, seeds, least = digest(self.sum, adverts), _seeds(before), threshold(len(adverts))
        parts = zip(*(masks.shares_of(seeds[name], least, len(adverts)) for name in ("mask", "own")))
        given = {client: b"".join(pair) for client, pair in zip(sorted(adverts), parts)}
        letters = {
            client: masks.sealed(self._seal(seeds, adverts[client], pact, client), share,
                                 addressed(pact, self.client, client))
            for client, share in given.items() if client != self.client
        }  # fmt: skip
        notes = before._replace(step="shares", adverts=adverts, shares={self.client: given[self.client].hex()})
        return notes, {"letters": as_text(letters)}

    def _letters(self, asked: Mapping[str, Any], before: Notes) -> tuple[Notes, dict[str, str]]:
        """Open what the others shared with this node. From here on it trains, and masks its change, once."""
        self._check_step(before, "shares")
        letters = words_in(asked["letters"])
        self._check_many({*letters, self.client}, among=before.adverts)
        pact, seeds, found = digest(self.sum, before.adverts), _seeds(before), dict(before.shares)
        for client in sorted(letters.keys() - {self.client}):
            key = self._seal(seeds, before.adverts[client], pact, client)
            try:
                share = masks.opened(key, letters[client], addressed(pact, client, self.client))
            except masks.Unsealed:
                share = b""
            if len(share) != 2 * masks.SEED:
                raise Refusal(f"got a letter from client {client} that was changed, or that is none.")
            found[client] = share.hex()
        return before._replace(step="train", shares=found), {}

    def _agree(self, asked: Mapping[str, Any], before: Notes) -> tuple[Notes, dict[str, str]]:
        """Sign for the clients whose changes came, as the server says: it must not tell others differently."""
        self._check_step(before, "train")
        if self._identity is None:
            raise Refusal("was asked to sign for clients of a sum, and has no identity.")
        clients = self._changed(asked, before)
        signature = self._identity.sign(counted(digest(self.sum, before.adverts), clients))
        return before._replace(step="agree", agreed=tuple(sorted(clients))), {"signature": signature}

    def _unmask(self, asked: Mapping[str, Any], before: Notes) -> tuple[Notes, dict[str, str]]:
        """Tell, of clients whose changes came, the share of their own mask, and of the others that of their second key.

        Then the sum is over: nothing of it is kept but its number and its round, which is never summed again.
        """
        self._check_step(before, "agree" if self._identity else "train")
        clients = self._changed(asked, before)
        if self._identity:
            self._check_signed(words_in(asked["signatures"], SIGNATURE), clients, before)
        shares = {client: bytes.fromhex(share) for client, share in before.shares.items()}
        told = {
            "own": as_text({client: share[masks.SEED :] for client, share in shares.items() if client in clients}),
            "mask": as_text({client: share[: masks.SEED] for client, share in shares.items() if client not in clients}),
        }
        return Notes(before.number, round=self.sum.round), told

    def _check_step(self, notes: Notes, wanted: str) -> None:
        """Refuse a message that does not follow on the last one answered: no step is done twice, and none left out."""
        if (notes.number, notes.of, notes.step) != (self.sum.number, self.sum.round, wanted):
            raise Refusal("was asked for a part of a sum that it has not begun, has told before, or has left.")

    def _check_many(self, clients: Collection[ClientId], among: Collection[ClientId] | None = None) -> None:
        """Refuse a sum of few clients: than this node wants, or of those who began it."""
        if among is not None and not set(clients) <= set(among):
            raise Refusal("was asked for a part of a sum with clients whose keys it was not shown.")
        least = max(self._least, threshold(len(among)) if among is not None else 0)
        if len(clients) < least:
            raise Refusal(f"takes part in sums of at least {least} clients here; this one has {len(clients)}.")

    def _changed(self, asked: Mapping[str, Any], notes: Notes) -> set[ClientId]:
        """Whose changes came, as the server says."""
        clients = names_in(asked["clients"])
        if not clients <= set(notes.shares) or self.client not in clients:
            raise Refusal("was asked to unmask a sum of others than have shared their masks with it.")
        self._check_many(clients, among=notes.adverts)
        return clients

    def _check_signed(self, signatures: Mapping[ClientId, bytes], clients: set[ClientId], notes: Notes) -> None:
        """Refuse to unmask what a threshold of the clients have not signed for: two sums cannot both have as many."""
        assert self._identity is not None
        text = counted(digest(self.sum, notes.adverts), clients)
        good = [c for c, one in signatures.items() if c in clients and self._identity.has_signed(c, one.hex(), text)]
        if tuple(sorted(clients)) != notes.agreed or len(good) < threshold(len(notes.adverts)):
            raise Refusal("was asked to unmask a sum for which too few of its clients have signed.")

    def _seal(self, seeds: Mapping[str, bytes], advert: Advert, pact: bytes, client: ClientId) -> bytes:
        """The key for letters between this node and that client, the same in both directions."""
        return masks.agreed(seeds["seal"], bytes.fromhex(advert.seal), addressed(pact, *sorted([self.client, client])))

    def _said_well(
        self, step: Callable[[Mapping[str, Any], Notes], tuple[Notes, dict[str, str]]],
        asked: Mapping[str, Any], notes: Notes,
    ) -> tuple[Notes, dict[str, str]]:  # fmt: skip
        """A step; words that it cannot read are refused like what it will not do."""
        try:
            return step(asked, notes)
        except (KeyError, ValueError, TypeError) as error:
            raise Refusal("was asked for a part of a sum in words that cannot be read.") from error

    @contextmanager
    def _kept(self) -> Iterator[Callable[[], Notes]]:
        """What is kept, while nobody else changes it."""
        folder = self._store.made_for(self.sum.run) / "sums"
        folder.mkdir(exist_ok=True, mode=0o700)
        try:
            with locked(folder):
                yield self._read
        except Refusal:
            raise
        except RunError as error:
            raise Refusal("is at work on another part of a sum.") from error

    def _read(self) -> Notes:
        """What is kept; nothing before the first sum of a run."""
        file = self._store.of_run(self.sum.run) / "sums" / "notes.json"
        if not file.is_file():
            return Notes()
        notes = Notes(**json.loads(file.read_text()))
        adverts = {client: Advert(*advert) for client, advert in notes.adverts.items()}
        return notes._replace(adverts=adverts, agreed=tuple(notes.agreed))

    def _keep(self, notes: Notes) -> None:
        write_file(self._store.of_run(self.sum.run) / "sums" / "notes.json", to_json(notes._asdict()))


def shortened(algorithm: Algorithm, reply: Tree, scale: masks.Scale) -> np.ndarray:
    """The numbers of a reply that are added up: its change, no longer than the bound; its loss; whether it was longer.

    Rounding to whole numbers makes it no longer than the bound either. A change that is not finite counts as none at
    all that was longer: to refuse would tell of it by itself.
    """
    more = sorted(set(reply) - {*algorithm.means, *TOLD})
    if more or not set(algorithm.means) <= set(reply):
        raise Refusal(f"would tell {', '.join(more) or 'no change'}, which no secure sum is made of.")
    parts = [leaf for _, leaf in in_order(reply, algorithm.means)]
    change = torch.cat([leaf.detach().cpu().double().reshape(-1) for leaf in parts]).numpy()
    loss = float(reply["loss"])
    if not (np.isfinite(change).all() and np.isfinite(loss)):
        return np.concatenate([np.zeros(len(change)), np.full(2, scale.bound)])
    norm, room = float(np.linalg.norm(change)), scale.bound - scale.step * len(change) ** 0.5 / 2
    if norm > room:
        change = change * (room / norm)
    more_numbers = [np.clip(loss / LOSS, -1, 1), float(norm > room)]
    return np.concatenate([change, np.array(more_numbers) * scale.bound])


def unlearned(reply: Tree) -> Tree:
    """A reply that is asked for by itself: that it is there, and nothing besides."""
    if not set(reply) <= TOLD:
        raise Refusal("tells what it learned only in a secure sum, and was asked for it by itself.")
    return {name: torch.full_like(leaf, float(name == "num_samples")) for name, leaf in reply.items()}


def in_order(tree: Tree, branches: Collection[str]) -> list[tuple[str, Tensor]]:
    """The tensors of these branches, in an order that both sides have."""
    return sorted(leaves({name: tree[name] for name in branches}))


def _seeds(notes: Notes) -> dict[str, bytes]:
    return {name: bytes.fromhex(seed) for name, seed in notes.seeds.items()}
