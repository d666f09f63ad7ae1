# SPDX-License-Identifier: Apache-2.0
"""The server's part in a secure sum: it passes messages on, adds up what is masked, and takes the masks off the sum.

The messages: ``deploy.pact``. What comes out is the mean of the changes, each client counted once, which the method
gets as if every client had replied with it.

A sum goes through the steps of the table there, from ``_keys`` to ``_unmasked``. Who does not answer a step, or answers
with what cannot be, is left out of those that follow, by name. The sum is given up, and the round with it, where fewer
are left than a quorum, than Shamir's threshold, or than ``FEWEST``.

Nobody can look into a masked change, so each client's own bound is all there is on it: changes are shortened before
they are masked. A mean that is longer than the bound gives away that some client did not. Which one, nobody can tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median_high
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from flwr.app import RecordDict

from fedloom.core.errors import DivergedError, NeedsError, RoundError
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map, unflatten
from fedloom.deploy import masks
from fedloom.deploy.codec import Malformed, facts_of, pack, tree_of
from fedloom.deploy.pact import (
    FEWEST,
    LOSS,
    SIGNATURE,
    SUM,
    Advert,
    Sum,
    advert_in,
    as_text,
    digest,
    paired,
    threshold,
    words_in,
)
from fedloom.deploy.summing import TOLD, in_order
from fedloom.engines.acceptance import NOT_FINITE
from fedloom.engines.job import Dropped, Job, Outcome

if TYPE_CHECKING:
    from fedloom.deploy.engine import Flower

ROUNDING = 1e-6
"""By how much a mean may seem to be longer than all that it is of."""

Answer = TypeVar("Answer")


class SpentRound(RoundError):
    """Clients have unmasked a sum of this round before, which they do once; the run can go on with a later one."""

    def __init__(self, text: str, last: int) -> None:
        super().__init__(text)
        self.last = last
        """The last round that they unmasked."""


class Collector:
    """One secure sum, from the keys to the mean."""

    def __init__(self, engine: Flower, job: Job, number: int) -> None:
        assert engine.rules.sums is not None
        if not isinstance(job.moment.stage, int):
            raise NeedsError(f"{job.program.name} needs individual replies here, and secure-aggregation hides them.")
        self._engine, self._job, self._sums = engine, job, engine.rules.sums
        self._sum = Sum(engine.run, job.moment.stage, number)
        self._dropped: list[Dropped] = []
        self._like = job.program.expects(job.shared, job.mine[job.clients[0]])
        means = engine.algorithm.means
        more = sorted(set(self._like) - {*means, *TOLD})
        if more or not set(means) <= set(self._like):
            raise NeedsError(
                f"Clients of {engine.algorithm.name} reply with {', '.join(more) or 'no change'} here, which no secure "
                "sum is made of. With BatchNorm, leave running statistics with the clients: set batchnorm to local."
            )
        self._parts = in_order(self._like, means)
        self._size = sum(leaf.numel() for _, leaf in self._parts) + 2
        """Numbers of a change, then the loss, and whether the change was longer than it may be."""

    def outcome(self) -> Outcome:
        """The mean as the reply of each client whose change is in it."""
        adverts = self._keys()
        letters = self._letters(adverts)
        vectors, memories = self._vectors(adverts, letters)
        seconds = {c: taken for c, taken in self._engine.waited().items() if c in vectors}
        signatures = self._signatures(adverts, vectors) if self._sums.signed else {}
        total = self._unmasked(adverts, letters, vectors, signatures)
        mean = self._mean(masks.Scale(self._sums.norm, len(adverts)).numbers(total) / len(vectors), len(vectors))
        clients = [client for client in self._job.clients if client in vectors]
        stacked = tree_map(lambda leaf: leaf.expand(len(clients), *leaf.shape), mean)
        return Outcome(PerClient([(clients, stacked)]), PerClient.of(memories), self._dropped, seconds, 4 * self._size)

    def _keys(self) -> dict[ClientId, Advert]:
        """Step 1: each client's public keys for this sum, and its commitment to the seed of its own mask.

        A client that has unmasked a sum of this round says so instead. Where too few are left for that, the round is
        spent (``SpentRound``), up to the median of what clients name if half of those asked do: one could name any.
        """
        spent: dict[ClientId, int] = {}

        def read(client: ClientId, facts: Mapping[str, Any]) -> Advert:
            if "spent" in facts:
                last = self._sum.round + self._job.rounds_left  # none can have been unmasked after it
                spent[client] = min(max(int(str(facts["spent"])), self._sum.round), last)
                raise Malformed(f"has unmasked the sum of round {spent[client]} before, and does so once")
            advert = advert_in(json.loads(str(facts["keys"])))
            if len(set(advert[:3])) < 3 or not all(masks.is_key(bytes.fromhex(key)) for key in advert[:2]):
                raise Malformed("gave keys that are none")  # for which all others would refuse the sum
            return advert

        asked = self._job.clients
        adverts = self._hear({client: self._content(client, "keys") for client in asked}, read)
        if spent and len(adverts) < self._fewest(adverts):
            known = 2 * len(spent) >= len(asked)  # of few, one that lies could end the run
            text = f"Round {self._sum.round} was summed before, and is not summed again: {self._reasons()}."
            raise SpentRound(text, median_high(spent.values()) if known else self._sum.round)
        self._check_enough(adverts, adverts, "their keys")
        return adverts

    def _letters(self, adverts: Mapping[ClientId, Advert]) -> dict[ClientId, dict[ClientId, bytes]]:
        """Step 2: the shares of each client's seeds, sealed, by whom they are for. The server can open none."""
        told = json.dumps(adverts)

        def read(client: ClientId, facts: Mapping[str, Any]) -> dict[ClientId, bytes]:
            letters = words_in(facts["letters"])
            if letters.keys() != adverts.keys() - {client}:
                raise Malformed("gave shares of its masks to others than it was asked to")
            return letters

        found = self._hear({client: self._content(client, "shares", adverts=told) for client in adverts}, read)
        self._check_enough(found, adverts, "shares of their masks")
        return found

    def _vectors(
        self, adverts: Mapping[ClientId, Advert], letters: Mapping[ClientId, Mapping[ClientId, bytes]]
    ) -> tuple[dict[ClientId, masks.Whole], dict[ClientId, Tree]]:
        """Step 3: what each client masked, (numbers,) modulo 2^32, and the memory that goes with it.

        This is the ask itself: clients train here, once they have opened the letters of the others.
        """
        engine, job = self._engine, self._job
        contents = {}
        for client in letters:
            own = as_text({sender: given[client] for sender, given in letters.items() if sender != client})
            contents[client] = engine.content(job, client, self._sum.number, number=self._sum.number, letters=own)

        def read(client: ClientId, answer: RecordDict) -> tuple[masks.Whole, Tree]:
            facts = engine.facts_of(job, client, answer)
            tree = tree_of(answer, "reply", torch.device("cpu"), most=8 * self._size + (1 << 20))
            if set(tree) != {"masked"} or tree["masked"].dtype != torch.int32 or tree["masked"].shape != (self._size,):
                raise Malformed("replied with something that is not a change under a mask")
            return tree["masked"].numpy().view(np.uint32), engine.memory_after(job, client, self._sum.number, facts)

        found = self._hear_of(contents, read, kind="train")
        self._check_enough(found, adverts, "a masked change")
        return {c: vector for c, (vector, _) in found.items()}, {c: memory for c, (_, memory) in found.items()}

    def _signatures(self, adverts: Mapping[ClientId, Advert], clients: Collection[ClientId]) -> dict[ClientId, bytes]:
        """Step 4, where keys are signed: each client signs whose changes came, so that all unmask one sum."""

        def read(client: ClientId, facts: Mapping[str, Any]) -> bytes:
            return words_in(json.dumps({client: facts["signature"]}), SIGNATURE)[client]

        names = json.dumps(sorted(clients))
        found = self._hear({client: self._content(client, "agree", clients=names) for client in clients}, read)
        self._check_enough(found, adverts, "their signature for whose changes there are")
        return found

    def _unmasked(
        self,
        adverts: Mapping[ClientId, Advert],
        letters: Collection[ClientId],
        vectors: Mapping[ClientId, masks.Whole],
        signatures: Mapping[ClientId, bytes],
    ) -> masks.Whole:
        """Step 5: the sum of the changes, without masks.

        Of those whose change came the own mask is taken off; of those who left after their shares the masks that they
        have in common with the others, which have nobody to cancel them. Nobody tells both of one client.
        """
        gone = set(letters) - set(vectors)

        def read(client: ClientId, facts: Mapping[str, Any]) -> dict[str, dict[ClientId, bytes]]:
            shares = {name: words_in(facts[name]) for name in ("own", "mask")}
            told = {len(share) for given in shares.values() for share in given.values()}
            if shares["own"].keys() != vectors.keys() or shares["mask"].keys() != gone or told != {masks.SEED}:
                raise Malformed("told shares of other masks than it was asked for")
            return shares

        about = {"clients": json.dumps(sorted(vectors)), "signatures": as_text(signatures)}
        last = signatures if self._sums.signed else vectors
        shares = self._hear({client: self._content(client, "unmask", **about) for client in last}, read)
        self._check_enough(shares, adverts, "shares of the masks that are left")
        pact, place = digest(self._sum, adverts), {client: row for row, client in enumerate(sorted(adverts))}

        def seed(name: str, client: ClientId, fits: Callable[[bytes], bool]) -> bytes:
            given = [(place[teller], told[name][client]) for teller, told in sorted(shares.items())]
            for start in range(
                len(given)
            ):  # one that lies is left out by one of them, where there are more than enough
                found = masks.joined(dict([*given[start:], *given[:start]][: threshold(len(adverts))]))
                if fits(found):
                    return found
            raise RoundError(
                f"The masks of round {self._sum.round} cannot be taken off: shares of that of client {client} do not "
                "fit its keys: somebody changed them. The last checkpoint is intact: see to the clients, then resume."
            )

        total = np.zeros(self._size, np.uint32)
        for vector in vectors.values():
            total += vector
        for client in vectors:
            own = seed("own", client, lambda s, c=client: masks.commitment(s).hex() == adverts[c].own)  # type: ignore[misc]
            total -= masks.mask(masks.derived(own, pact), self._size)
        for other in gone:
            key = seed("mask", other, lambda s, c=other: masks.public_key(s).hex() == adverts[c].mask)  # type: ignore[misc]
            for client in vectors:
                pair = masks.agreed(key, bytes.fromhex(adverts[client].mask), paired(pact, client, other))
                mask = masks.mask(pair, self._size)
                total = total - mask if client < other else total + mask
        return total

    def _mean(self, numbers: np.ndarray, clients: int) -> Tree:
        """The mean as a reply, from (change, loss, clients that were shortened), each of them a mean over clients.

        A mean longer than the bound on each of its parts cannot be: a client lied. Where all were shortened and the
        change is zero, none of them was finite.
        """
        engine, bound = self._engine, self._sums.norm
        change, (loss, longer) = numbers[:-2], numbers[-2:].tolist()
        norm = float(np.linalg.norm(change))
        if norm > bound * (1 + ROUNDING):
            raise RoundError(
                f"The mean change of round {self._sum.round} has norm {norm:.3g}, and none may be longer than "
                f"{bound:g}: a client lied, and which one a sum does not tell. The last checkpoint is intact: see to "
                "the clients, then resume."
            )
        if round(longer * clients / bound) == clients and not change.any():  # what is shortened is not 0
            raise DivergedError(
                f"Round {self._sum.round} has no secure sum: the changes of all clients have {NOT_FINITE}. The last "
                "checkpoint is intact: see to the clients, then resume."
            )
        if round(longer * clients / bound):
            engine.note(f"some clients shorten their changes to norm {bound:g}")
        device, dtype = engine.federation.device, engine.federation.dtype
        sizes = [leaf.numel() for _, leaf in self._parts]
        rows = torch.split(torch.from_numpy(change), sizes)
        flat = {path: row.reshape(leaf.shape) for (path, leaf), row in zip(self._parts, rows)}
        told = {"num_samples": torch.ones(()), "loss": torch.tensor(loss / bound * LOSS)}
        reply = {**unflatten(flat), **{name: leaf for name, leaf in told.items() if name in self._like}}
        ordered: Tree = tree_map(lambda _, leaf: leaf.to(device, dtype), self._like, reply)
        return ordered

    def _content(self, client: ClientId, part: str, **facts: str) -> RecordDict:
        """A message of this sum."""
        return pack({**self._engine.ticket(self._job, client), "number": self._sum.number, "part": part, **facts})

    def _hear(
        self, contents: Mapping[ClientId, RecordDict], read: Callable[[ClientId, Mapping[str, Any]], Answer]
    ) -> dict[ClientId, Answer]:
        """As ``_hear_of``, of answers that are facts alone."""
        return self._hear_of(contents, lambda client, answer: read(client, facts_of(answer)), SUM)

    def _hear_of(
        self, contents: Mapping[ClientId, RecordDict], read: Callable[[ClientId, RecordDict], Answer], kind: str
    ) -> dict[ClientId, Answer]:
        """What clients answered, in their order; who gave no proper answer is left out of what follows."""
        answers = self._engine.exchange(kind, contents, self._engine.rules.timeout)
        found: dict[ClientId, Answer] = {}
        for client in contents:
            answer = answers.get(client, "is gone")
            try:
                if isinstance(answer, str):
                    raise Malformed(answer)
                facts = facts_of(answer)
                if "error" in facts:
                    raise Malformed(str(facts["error"]))
                found[client] = read(client, answer)
            except Malformed as fault:
                self._drop(client, str(fault))
            except Exception as error:  # whatever a stranger made of it
                self._drop(client, f"sent a reply that cannot be used ({type(error).__name__})")
        return found

    def _drop(self, client: ClientId, reason: str) -> None:
        self._dropped.append(Dropped(client, self._job.program.name, reason))

    def _fewest(self, adverts: Collection[ClientId]) -> int:
        """How many clients must be there at every step."""
        quorum = self._engine.rules.quorum * len(self._job.clients)
        return max(FEWEST, threshold(len(adverts)), -int(-(quorum - 1e-9) // 1))

    def _check_enough(self, found: Collection[ClientId], adverts: Collection[ClientId], what: str) -> None:
        """Give the sum up where fewer than ``_fewest`` gave ``what``; the error names who was left out, and why."""
        least = self._fewest(adverts)
        if len(found) >= least:
            return
        raise RoundError(
            f"Round {self._sum.round} has no secure sum: {len(found)} of {len(self._job.clients)} clients gave {what}, "
            f"and {least} are needed{': ' if self._dropped else ''}{self._reasons()}. The last checkpoint is intact: "
            "see to the clients, then resume."
        )

    def _reasons(self) -> str:
        return "; ".join(_short(self._dropped))


def _short(dropped: Iterable[Dropped], most: int = 3) -> list[str]:
    return [f"client {one.client} {one.reason.rstrip('.')}" for one in dropped][-most:]
