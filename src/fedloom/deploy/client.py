# SPDX-License-Identifier: Apache-2.0
"""The client's half of a Flower app. Each message is answered by a process of its own, so imports are few.

What a node may be told (``flower-supernode --node-config``): ``client`` (its name), ``folder`` (where its secret and
memory lie), ``role`` (participant or newcomer), ``device``, whatever the user's two functions read, and any option of
the method that this client wants otherwise, e.g. ``descriptor-epsilon``, but for those that are the federation's.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedloom import algorithms
from fedloom.adaptation.calibration import Privacy
from fedloom.clients.federation import SPLITS, Client, Federation
from fedloom.core.config import build
from fedloom.core.contract import predict_with_target
from fedloom.core.trees import Tree
from fedloom.core.wire import encode
from fedloom.deploy.options import Settings, read
from fedloom.deploy.store import Refusal, Store
from fedloom.engines.engine import SPOILT, ClientFault
from fedloom.engines.flower.codec import Malformed, facts_of, pack, program_of, tree_of
from fedloom.engines.flower.node import Node
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.runs.export import export
from fedloom.runs.files import write_file
from fedloom.runs.machine import device_of, set_precision, task_named
from fedloom.runs.trainer import algorithm_of

COMMON = {"preset", "local_steps", "local_epochs", "batch_size", "encoder_steps"}
"""Options that a node cannot have otherwise: what they say comes with the server's message, ready made."""

NodeConfig = Mapping[str, Any]
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
        client = Participant(read(context.run_config), context.node_config, load_data, build_model)
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


class Participant:
    """A client on its own machine."""

    def __init__(self, settings: Settings, node: NodeConfig, load_data: LoadData, build_model: BuildModel) -> None:
        self.settings, self.node = settings, node
        options = settings.run
        if options.threads:
            torch.set_num_threads(options.threads)
        set_precision(options.precision)
        self.config = own_config(settings.config, node)
        self.plain, self.algorithm = algorithms.get(settings.method), algorithm_of(settings.method, options)
        self.store = Store(Path(str(node.get("folder", Path.home() / ".fedloom" / "node"))))
        self.name = str(node.get("client", "")) or self.store.name
        self.store.claim(self.name)
        device, dtype = device_of(str(node.get("device", "auto"))), getattr(torch, options.dtype)
        network = build_model(node)
        name = network if isinstance(network, str) else f"{network.__module__}:{network.__qualname__}"
        spec = parse(name, settings.deploy.shape, settings.deploy.num_outputs)
        narrow = torch.bfloat16 if options.precision == "bf16" else dtype
        self.model = Model(spec, device, dtype, training_dtype=narrow)
        self.task = task_named(options.task if options.task != "auto" else "classification")
        self.federation = self._federation(load_data(node), device, dtype)

    def hello(self, run: str) -> RecordDict:
        """Who this is. Of the model no more than the method needs; of the data, which splits there are."""
        facts: dict[str, str | int] = {
            "client": self.name,
            "mark": self.store.mark(run),
            "role": str(self.node.get("role", "participant")),
            "splits": " ".join(split for split in SPLITS if len(self.federation.roster[self.name].rows[split])),
        }
        if self.algorithm.told == "size":
            return pack({**facts, "size": self.model.size})
        return pack({**facts, "model": json.dumps([self.model.spec.name, self.model.spec.options])})

    def answer(self, asked: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Run a program; remember what it says to remember."""
        run, start, end = str(asked["run"]), int(asked["from_version"]), int(asked["to_version"])
        privacy = Privacy(self.settings.run.adapt_clip, self.settings.run.adapt_noise)
        program = program_of(asked["program"], self.plain, self.algorithm, privacy, self.model)
        shared, mine = (tree_of(content, name, self.federation.device) for name in ("shared", "mine"))
        memory = self._memory(run, start)
        reply, after = self._engine(str(asked["client"])).answer(
            program, asked["stage"], int(asked["ask"]), shared, mine, memory
        )
        if after is not None:
            self.store.save(run, end, after, {start, int(asked["saved_version"])})
        ticket = {name: asked[name] for name in ("run", "client", "stage", "ask")}
        return pack({**ticket, "remembers": after is not None}, reply=reply)

    def deploy(self, asked: Mapping[str, Any], content: RecordDict) -> RecordDict:
        """Put the model that was sent together with the client's memory, and write it into the client's folder."""
        run, name = str(asked["run"]), str(asked["client"])
        shared, mine = (tree_of(content, part, self.federation.device) for part in ("shared", "mine"))
        engine = self._engine(name)
        memory = self._memory(run, int(asked["from_version"]))
        if memory is not None:
            engine.memory[name] = memory
        home = engine.home(name, engine.num_samples([name])[0], torch.zeros((), dtype=torch.int64))
        deployed = self.algorithm.client_deploy(home, shared, mine, engine.recall(name))
        folder = self.store.of_run(run) / "model"
        if self.plain.predict is predict_with_target:
            export(folder, name, deployed, self.model.spec, self.algorithm.name)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / "deployed.safetensors", encode(deployed))
        return pack({"run": run, "client": name})

    def _engine(self, name: str) -> Node:
        """``name`` is who the server takes this client for: with keys, who its key belongs to."""
        roster = {name: replace(self.federation.roster[self.name], id=name)}
        federation = replace(self.federation, roster=roster)
        return Node(federation, self.algorithm, self.config, self.settings.run.seed, name)

    def _memory(self, run: str, version: int) -> Tree | None:
        found = self.store.load(run, version)
        return None if found is None else _on(found, self.federation.device)

    def _federation(self, data: Any, device: torch.device, dtype: torch.dtype) -> Federation:
        parts = data if isinstance(data, Mapping) else {"train": data}
        rows: dict[str, np.ndarray] = {}
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        start = 0
        for split in SPLITS:
            if split in parts:
                x, y = self._checked(split, *parts[split])
                xs.append(x.to(device, dtype))
                ys.append(y.to(device, dtype if y.is_floating_point() else torch.int64))
            length = len(xs[-1]) if split in parts else 0
            rows[split] = np.arange(start, start + length)
            start += length
        if not start:
            raise Refusal("has no samples: load_data gave none.")
        client = Client(self.name, self.model, rows)
        return Federation(torch.cat(xs), torch.cat(ys), self.task, {self.name: client})

    def _checked(self, split: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Samples and labels of a split, checked against what the federation is for."""
        shape, outputs = self.settings.deploy.shape, self.settings.deploy.num_outputs
        x = torch.as_tensor(x)
        if tuple(x.shape[1:]) != shape:
            raise Refusal(f"has {split} samples of shape {tuple(x.shape[1:])}; this federation's have {shape}.")
        if not x.isfinite().all():
            raise Refusal(f"has {split} samples with NaN or infinite values.")
        if y is None:  # no program may read these: any use of them as classes fails
            y = torch.full((len(x),), -1)
        y = torch.as_tensor(y)
        if len(y) != len(x):
            raise Refusal(f"has another number of {split} labels than of {split} samples.")
        if self.task.class_scores and len(y) and (int(y.min()) < -1 or int(y.max()) >= outputs):
            raise Refusal(f"has {split} labels outside of 0 to {outputs - 1}.")
        return x, y


def own_config(config: Any, node: NodeConfig) -> Any:
    """The method's config with the options that this node was given."""
    names = {field.name for field in fields(config)}
    given = {name.replace("-", "_"): value for name, value in node.items()}
    own = {name: value for name, value in given.items() if name in names}
    if own.keys() & COMMON:
        raise Refusal(
            f"was given {', '.join(sorted(own.keys() & COMMON)).replace('_', '-')}, which is the same for the whole "
            "federation. Set it in the app's table."
        )
    made = build(type(config), own)
    changed = replace(config, **{name: getattr(made, name) for name in own})
    if getattr(changed, "private", None) != getattr(config, "private", None):
        raise Refusal(
            f"is to use other privacy than the federation ({', '.join(own)}): the encoder is made for one of the two. "
            "Set it for all, then a node can set it lower."
        )
    return changed


def _on(tree: Any, device: torch.device) -> Any:
    return {k: _on(v, device) for k, v in tree.items()} if isinstance(tree, Mapping) else tree.to(device)
