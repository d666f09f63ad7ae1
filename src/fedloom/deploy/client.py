# SPDX-License-Identifier: Apache-2.0
"""The client's half of a Flower app. Each message is answered by a process of its own, so imports are few.

The server may be hostile. A message names a program and brings tensors; everything else comes from this machine: the
method's code, its config, the data, the memory. What a message goes through, in this order (``Participant.answer``):

1. The program must be one that this method has for this role, made from this node's own config.
2. Raw samples are prepared as the server says, in the form that the node's own config has.
3. What training spends of the samples' privacy is written down, and refused beyond ``max-epsilon``; so is what an
   answer with noise spends, before it is told.
4. The program runs on the memory of the version that the server names, or on a fresh one.
5. Nothing is told of fewer samples than ``min-batch``, unless noise hides each of them.
6. An answer with noise is drawn once: asked the same again, the node gives the same answer, not another draw.
7. In a secure sum the change is masked. The memory is kept under the new version.

A node runs the programs of its method, made from its own config, and refuses anything else by name
(``programs.allowed``). What it decides for itself is in ``NodeOptions``; besides, ``flower-supernode --node-config``
may hold whatever the user's two functions read, and any option of the method that this client wants otherwise, e.g.
``descriptor-epsilon``.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedloom.clients.batching import steps_of
from fedloom.clients.federation import SPLITS
from fedloom.core.contract import Home, Program
from fedloom.core.errors import NeedsError
from fedloom.core.noised import hides_samples
from fedloom.core.trees import ClientId, Tree, leaves
from fedloom.core.wire import encode
from fedloom.data.preparation import Preparation
from fedloom.deploy import node
from fedloom.deploy.codec import Malformed, facts_of, pack, tree_of
from fedloom.deploy.options import NodeOptions, Settings, read
from fedloom.deploy.own_config import NodeConfig, OwnConfig, check_code, own_config, own_options, own_privacy
from fedloom.deploy.own_data import OwnSamples
from fedloom.deploy.pact import SUM
from fedloom.deploy.store import Limit, Refusal, Store
from fedloom.deploy.summing import Member, summing, unlearned
from fedloom.engines.acceptance import SPOILT
from fedloom.engines.job import TRIED, ClientFault
from fedloom.engines.machine import Machine
from fedloom.engines.sequential import Sequential
from fedloom.models.load import is_one_network
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.privacy.ledger import Release
from fedloom.programs.allowed import Evaluation, allowed
from fedloom.programs.evaluation import EVALUATION
from fedloom.programs.preparing import PREPARING, preparing
from fedloom.runs.export import export
from fedloom.runs.files import write_file
from fedloom.training.config import algorithm_of
from fedloom.training.machine import device_of

log = logging.getLogger(__name__)

LoadData = Callable[[NodeConfig], Mapping[str, tuple[Any, Any]] | tuple[Any, Any]]
BuildModel = Callable[[NodeConfig], str | type[nn.Module]]


def client_app(load_data: LoadData, build_model: BuildModel) -> ClientApp:
    """The app of a client with these data and this model.

    ``load_data(node)`` gives ``{"train": (x, y), "val": (x, y), "test": (x, y)}``, or ``(x, y)``, all for training;
    labels that are not known are None. ``build_model(node)`` gives a network's name or an ``nn.Module`` class.
    """
    app = ClientApp()

    def respond(message: Message, context: Context) -> Message:
        content = answer(message.metadata.message_type, message.content, context, load_data, build_model)
        return Message(content, reply_to=message)

    app.query("hello")(respond)
    app.query("deploy")(respond)
    app.query("sum")(respond)
    app.train()(respond)
    return app


def answer(
    kind: str, content: RecordDict, context: Context, load_data: LoadData, build_model: BuildModel
) -> RecordDict:
    """The reply to a message of that type. What fails is told in a sentence, without anything of the data.

    The text of an error can hold samples, so only its type and where it came up are told, unless the text is fedloom's.
    """
    try:
        asked = facts_of(content)
        settings = read(context.run_config)
        check_code(settings, context.node_config)
        if kind == SUM:
            return pack(part_in_sum(settings, context.node_config, asked))
        told, raw = str(asked.get("preparation", "")), asked.get("program") == PREPARING
        client = Participant(settings, context.node_config, load_data, build_model, told, raw=raw)
        if kind == "query.hello":
            return client.hello(str(asked["run"]))
        if kind == "query.deploy":
            return client.deploy(asked, content)
        return client.answer(asked, content)
    except (Refusal, Malformed) as error:
        return pack({"error": str(error)})
    except Exception as error:
        traceback.print_exc()  # for the node's own log
        return pack({"error": _told(error, kind)})


def _told(error: Exception, kind: str) -> str:
    """An error without its text."""
    if str(error) == SPOILT:
        return SPOILT
    at = re.match(r"raised \w+ in (init|step|final)\b", str(error)) if isinstance(error, ClientFault) else None
    return f"{at[0] if at else f'failed with {type(error).__name__} in {kind}'}; its own log says why"


def part_in_sum(settings: Settings, about: NodeConfig, asked: Mapping[str, Any]) -> Mapping[str, str]:
    """The answer to a message of a secure sum; for these, neither data nor a model are needed."""
    own = own_options(about)
    sums, (store, _) = summing(settings, own), folder_of(own)
    if sums is None or own.role == "newcomer":
        raise Refusal("was asked for a part in a secure sum, which its own config has none of.")
    return Member(sums, own, store, asked).respond(asked)


def folder_of(own: NodeOptions) -> tuple[Store, ClientId]:
    """The node's folder, and who the node is."""
    store = Store(Path(own.folder or Path.home() / ".fedloom" / "node"))
    name = own.client or store.name
    store.claim(name)
    return store, name


class Participant:
    """A client on its own machine, for the one message that this process answers.

    What lasts is in the node's folder (``deploy.store``). To make one reads the data and builds the network; who must
    not take part is refused here, before anything is computed.
    """

    def __init__(
        self,
        settings: Settings,
        about: NodeConfig,
        load_data: LoadData,
        build_model: BuildModel,
        preparation: str = "",
        *,
        raw: bool = False,
    ) -> None:
        """``preparation``: how the server says that samples are prepared. ``raw``: they are to be left as they are."""
        self.settings, self.own = settings, own_options(about)
        self.raw, self.preparation = raw and settings.preparation is not None, self._preparation(preparation)
        options = own_privacy(settings.run, self.own)
        if options.threads:
            torch.set_num_threads(options.threads)
        self.config = own_config(settings.config, about)
        self.algorithm = algorithm_of(settings.method, options)
        self.sums = summing(settings, self.own)
        self.store, self.name = folder_of(self.own)
        device, dtype = device_of(self.own.device), getattr(torch, options.dtype)
        told = OwnConfig(about)
        network, data = build_model(told), load_data(told)
        told.check_all_read(settings)
        name = network if isinstance(network, str) else f"{network.__module__}:{network.__qualname__}"
        spec = parse(name, settings.deploy.shape, settings.deploy.num_outputs, settings.tokens)
        narrow = torch.bfloat16 if options.precision == "bf16" else dtype
        self.model = Model(spec, device, dtype, training_dtype=narrow)
        self.task = settings.task
        samples = OwnSamples(settings, self.preparation, self.raw)
        self.federation = samples.federation(self.name, self.model, data)
        self.programs = self._own_programs()
        """All that this client may be asked, by name."""
        if self.own.max_epsilon and not self._is_limited():
            raise Refusal(
                "wants max-epsilon, and tells what it learns without noise; give sample-dp-noise and its clip."
            )

    @property
    def newcomer(self) -> bool:
        """Whether it only wants a model."""
        return self.own.role == "newcomer"

    def _own_programs(self) -> dict[str, Program]:
        """All that this client may be asked, by name, made from its own method file and config."""
        evaluation = Evaluation(self.own.evaluation, self.own.evaluation_noise)
        found = allowed(self.algorithm, self.config, self.model, self.newcomer, evaluation)
        if self.settings.preparation and not self.newcomer:
            found[PREPARING] = preparing(self.settings.preparation)
        return {name: self._in_large_batches(program) for name, program in found.items()}

    def _preparation(self, told: str) -> Preparation | None:
        """How raw samples are prepared, of the form that this client's own config has; until it is told, roughly."""
        given = self.settings.preparation
        if given is None or not told:
            return given
        found = Preparation.of_text(told)
        if found.form != given.form:
            raise Refusal("was told to prepare its samples in another way than its own config has.")
        return found

    def _in_large_batches(self, program: Program) -> Program:
        """The program with no batch below ``min-batch`` samples: what a pass leaves joins the batch before."""
        if program.batches is None:
            return program
        if program.batches.size < self.own.min_batch:
            raise Refusal(
                f"computes on batches of at least {self.own.min_batch} samples (its own min-batch); "
                f"{program.name} has {program.batches.size}. Set a larger batch-size, or have it set min-batch."
            )
        return replace(program, batches=replace(program.batches, least=self.own.min_batch))

    def _is_enough(self, split: str) -> bool:
        """Whether a split has so many samples that what is told of it is of none of them alone."""
        return len(self.federation.roster[self.name].rows[split]) >= self.own.min_batch

    def hello(self, run: str) -> RecordDict:
        """Who this is. Of the model no more than the method needs; of the data, in which splits it can be asked, and
        how many training samples it has, by which a participant weighs."""
        rows = self.federation.roster[self.name].rows
        facts: dict[str, str | int] = {
            "client": self.name,
            "mark": self.store.mark(run),
            "role": self.own.role,
            "splits": " ".join(split for split in SPLITS if len(rows[split]) and self._may_tell_of(split)),
        }
        if not self.newcomer:
            if not self._is_enough("train"):
                raise Refusal(f"has {len(rows['train'])} training samples, fewer than its own min-batch.")
            facts["samples"] = 1 if self.sums else len(rows["train"])  # in a sum each client counts once
        if self.algorithm.told == "size":
            return pack({**facts, "size": self.model.size})
        return pack({**facts, "model": json.dumps([self.model.spec.name, self.model.spec.options])})

    def answer(self, asked: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Run a program; remember what it says to remember. The order of the steps is that of the module's docstring.

        What the answer spends of privacy is written down before anything is computed; the memory is kept last, when
        there is an answer that can be told.
        """
        run, start, end = str(asked["run"]), int(asked["from_version"]), int(asked["to_version"])
        program = self._program(str(asked["program"]))
        self._check_told(asked)
        masking = self._masking(asked)
        shared, mine = (tree_of(content, name, self.federation.device) for name in ("shared", "mine"))
        name = str(asked["client"])
        self._spend(program)
        silent = self.sums is not None and not program.name.startswith(EVALUATION)
        try:
            reply, after, noised = node.answer(self._engine(name), name, program, asked["stage"], int(asked["ask"]),
                                               shared, mine, self._memory(run, start), silent=silent)  # fmt: skip
        except NeedsError as error:  # which says nothing of the data
            raise Refusal(f"cannot answer: {error}") from error
        self._check_enough(program, reply)
        if silent and not masking:
            reply = unlearned(reply)
        if noised:
            question, most = _question(program, asked, shared, mine), self.own.max_answers
            with self.store.alone():
                reply = _on(self.store.once(run, question, reply, most, self._spent_beside(program), self._limit),
                            self.federation.device)  # fmt: skip
        if masking:
            reply = masking(reply)
        if after is not None:
            kept = {start, *map(int, str(asked["kept_versions"]).split())}
            self.store.save(run, end, after, kept)
        ticket = {part: asked[part] for part in ("run", "client", "stage", "ask")}
        return pack({**ticket, "remembers": after is not None}, reply=reply)

    def _spend(self, program: Program) -> None:
        """Write down what the program's answer spends of the samples' privacy, before it is worked out."""
        batches, samples = program.batches, len(self.federation.roster[self.name].rows["train"])
        if not hides_samples(self.config) or batches is None or batches.split in TRIED:
            return
        noise, size = self.config.sample_dp_noise, min(self.config.batch_size, samples)
        one = Release(0, program.name, noise, "poisson", samples, size, secrets.token_hex(8),
                      steps_of(samples, batches), "sample", (self.name,))  # fmt: skip
        with self.store.alone():
            self.store.release(one, self._limit)

    @property
    def _limit(self) -> Limit:
        return Limit(self.own.max_epsilon, self.own.dp_delta)

    def _is_limited(self) -> bool:
        """Whether there is noise on what it tells: of a participant, on what it learns in training."""
        noisy = self.own.evaluation == "noised" or any(one.noise for one in self.programs.values())
        return hides_samples(self.config) or (self.newcomer and noisy)

    def _spent_beside(self, program: Program) -> Release | None:
        """What an answer with noise spends of samples' privacy where nothing is trained."""
        if program.noise and program.noise.mechanism == "gaussian":
            # a bound on all that a client tells lets one sample move it by two
            noise = program.noise.scale / (1 if program.noise.unit == "sample" else 2)
        elif program.name.startswith(EVALUATION):  # a sample moves three sums
            noise = self.own.evaluation_noise / math.sqrt(3)
        else:
            return None
        assert program.batches is not None
        samples = len(self.federation.roster[self.name].rows[program.batches.split])
        return Release(0, program.name, noise, "poisson", samples, samples, secrets.token_hex(8), unit="sample",
                       who=(self.name,), split=program.batches.split)  # fmt: skip

    def _program(self, name: str) -> Program:
        """The program of that name, from this client's own method file and config."""
        if name not in self.programs:
            role = "newcomer" if self.newcomer else "participant"
            asked = "".join(letter for letter in name if letter.isprintable())[:100]
            log.warning("Refused to run %r: it is not what a %s of %s does here", asked, role, self.algorithm.name)
            raise Refusal(f"was asked for {asked!r}, which its own config does not allow a {role}.")
        return self.programs[name]

    def _masking(self, asked: Mapping[str, Any]) -> Callable[[Tree], Tree] | None:
        """How what is asked for is masked, if it is to be: once, so it is written down that it was."""
        if "letters" not in asked:
            return None
        if self.sums is None:
            raise Refusal("was asked for a part in a secure sum, which its own config has none of.")
        member = Member(self.sums, self.own, self.store, asked)
        return partial(member.masked, self.algorithm, member.taking_part(asked))

    def _may_tell_of(self, split: str) -> bool:
        """Of training data the program decides: a newcomer's need not tell anything."""
        return split == "train" or self.own.evaluation == "noised" or self._is_enough(split)

    def _check_told(self, asked: Mapping[str, Any]) -> None:
        """Refuse to use samples of which nobody has said how they are prepared."""
        if self.settings.preparation and not self.raw and not asked.get("preparation"):
            raise Refusal("was not told how its samples are prepared.")

    def _check_enough(self, program: Program, reply: Tree) -> None:
        """Refuse to tell something of few samples, unless noise hides each of them."""
        split = program.batches.split if program.batches else ""
        noised = program.name.startswith(EVALUATION) and self.own.evaluation == "noised"
        some = split and len(self.federation.roster[self.name].rows[split])
        if some and not noised and not self._is_enough(split) and any(leaves(reply)):
            raise Refusal(f"has fewer {split} samples than its own min-batch, {self.own.min_batch}.")

    def deploy(self, asked: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Put the model that was sent together with the client's memory, and write it into the client's folder."""
        self._check_told(asked)
        run, name = str(asked["run"]), str(asked["client"])
        shared, mine = (tree_of(content, part, self.federation.device) for part in ("shared", "mine"))
        engine = self._engine(name)
        memory = self._memory(run, int(asked["from_version"])) or engine.first_memory(engine.federation, name)
        samples = torch.tensor(float(len(self.federation.roster[self.name].rows["train"])), dtype=self.model.dtype)
        home = Home(self.model, self.task, self.config, samples, torch.zeros((), dtype=torch.int64))
        deployed = self.algorithm.client_deploy(home, shared, mine, memory)
        folder = self.store.made_for(run) / "model"
        module = self.algorithm.module(home, deployed)
        if is_one_network(module):
            names = self.settings.deploy.class_names
            spec, method = self.model.spec, self.algorithm.name
            export(folder, name, module, spec, method, classes=names, preparation=self.preparation)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / "deployed.safetensors", encode(deployed))
        return pack({"run": run, "client": name})

    def _engine(self, name: str) -> Sequential:
        """``name`` is who the server takes this client for: with keys, who its key belongs to."""
        roster = {name: replace(self.federation.roster[self.name], id=name)}
        federation = replace(self.federation, roster=roster)
        machine = Machine(precision=self.settings.run.precision)
        return Sequential(federation, self.algorithm, self.config, self.settings.run.seed, machine)

    def _memory(self, run: str, version: int) -> Tree | None:
        """What this client kept in that version; None before its first ask."""
        found = self.store.load(run, version)
        return None if found is None else _on(found, self.federation.device)


def _question(program: Program, asked: Mapping[str, Any], shared: Tree, mine: Tree) -> bytes:
    """All that an answer follows from besides the client's data: two asks with one question have one answer."""
    facts = [program.name, str(asked.get("preparation", ""))]
    if not program.of_data_alone:
        facts.append(str(asked["from_version"]))
        if program.batches and program.batches.shuffle:  # else the moment decides nothing
            facts += [str(asked["stage"]), str(asked["ask"])]
    return b"\0".join([json.dumps(facts).encode(), encode(shared), encode(mine)])


def _on(tree: Any, device: torch.device) -> Any:
    return {k: _on(v, device) for k, v in tree.items()} if isinstance(tree, Mapping) else tree.to(device)
