# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import registry

TINY = ("--clients", 4, "--rounds", 2, "--local-steps", 2, "--model", "mlp")


def test_resume_goes_further(cli, own_copy):
    outcome = cli("resume", own_copy, "--rounds", 3)
    assert outcome.code == 0
    assert "round 3/3" in outcome.err
    assert [json.loads(line)["round"] for line in (own_copy / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_resume_as_json(cli, own_copy):
    record, summary = map(json.loads, cli("resume", own_copy, "--rounds", 3, "--json").out.splitlines())
    assert (record["round"], summary["rounds"]) == (3, 3)
    assert cli("resume", own_copy, "--rounds", 4, "--quiet") == (0, f"{own_copy}\n", "")


CHANGED = {
    "config": ("config.yaml", ("resume", "evaluate", "export --all", "admit --data own.npz")),
    "roster": ("roster.json", ("resume", "evaluate", "export --all", "admit --data own.npz")),
    "data": ("own.npz", ("resume", "evaluate")),
    "metrics": ("metrics.jsonl", ("resume",)),
}


@pytest.mark.parametrize(("what", "words"), [(what, words) for what in CHANGED for words in CHANGED[what][1]])
def test_what_was_changed_since_is_refused_and_forced(cli, refused, what, words):
    rng = np.random.default_rng(0)
    x, y = rng.random((80, 5), dtype=np.float32), np.arange(80) % 4
    np.savez("own.npz", x=x, y=y)
    assert cli("run", "fedavg", *TINY, "--dataset", "own.npz", "--out", "run", "--quiet").code == 0
    file = Path("run") / CHANGED[what][0]
    if what == "config":
        file.write_text(file.read_text().replace("local_lr: 0.005", "local_lr: 0.05"))
    elif what == "roster":
        content = json.loads(file.read_text())
        content["clients"][0]["train"] += 1
        file.write_text(json.dumps(content))
    elif what == "data":
        order = rng.permutation(80)
        np.savez("own.npz", x=x[order], y=y[order])
    else:
        file.write_text("")
    command, *more = words.split()
    further = ("--rounds", 3, "--quiet") if command == "resume" else ()
    told = refused(command, "run", *more, *further)
    sentences = {
        "config": "run/config.yaml was changed since round",
        "roster": "run/roster.json was changed since round",
        "data": "The data were changed since round",
        "metrics": "run/metrics.jsonl lacks the record of round 1 of 2",
    }
    assert told.startswith(sentences[what]) and told.endswith("give --force to go on all the same.")
    assert cli(command, "run", *more, *further, "--force").code == 0


def test_data_that_have_moved_are_given_their_place(cli, refused, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.random((80, 5), dtype=np.float32), np.arange(80) % 4
    np.savez("own.npz", x=x, y=y)
    assert cli("run", "fedavg", *TINY, "--dataset", "own.npz", "--out", "run", "--quiet").code == 0
    Path("own.npz").rename("moved here.npz")
    further = ("resume", "run", "--rounds", 3, "--quiet")
    assert "Where they have moved: `fedloom resume run --dataset PATH`" in refused(*further)
    np.savez("others.npz", x=1 - x, y=y)
    assert refused(*further, "--dataset", "others.npz").startswith("The data were changed since round 2 was saved")
    assert cli(*further, "--dataset", "moved here.npz").code == 0
    assert json.loads(Path("run/summary.json").read_text())["rounds"] == 3

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedloom.api.resume", interrupt)
    told = cli("resume", "run", "--rounds", 4, "--dataset", "moved here.npz", "--data-root", "/d").err
    assert "`fedloom resume run --rounds 4 --dataset 'moved here.npz' --data-root /d`" in told


def test_published_files_that_have_moved_are_found_by_their_root(cli, own_copy, monkeypatch):
    roots = []

    def load(name: str, root: str | None, roles: object) -> object:
        roots.append(root)
        return registry.load(name, root, roles)

    monkeypatch.setattr("fedloom.training.again.load_data", load)
    assert cli("resume", own_copy, "--rounds", 3, "--data-root", "elsewhere", "--quiet").code == 0
    assert roots == ["elsewhere"]


def test_ctrl_c_while_resuming_further(cli, own_copy, monkeypatch):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedloom.api.resume", interrupt)
    outcome = cli("resume", own_copy, "--rounds", 9)
    assert outcome.code == 130
    assert f"`fedloom resume {own_copy} --rounds 9`" in outcome.err


def test_evaluate_shows_clients_and_means(cli, trained):
    out = cli("evaluate", trained, "--which", "last").out
    assert [line.split()[0] for line in out.splitlines()[3:7]] == ["0", "1", "2", "3"]
    assert "deployed/participants/test/accuracy_worst10" in out
    assert "after round 2" in out


def test_evaluate_as_json_agrees_with_the_summary(cli, trained):
    found = json.loads(cli("evaluate", trained, "--which", 2, "--json").out)
    summary = json.loads((trained / "summary.json").read_text())
    assert found["clients"] == summary["clients"]
    assert found["metrics"].items() <= summary["last"].items()
    assert json.loads(cli("evaluate", trained, "--split", "val", "--json").out)["split"] == "val"


def test_evaluate_unseen(cli):
    cli("run", "fedavg", *TINY, "--unseen", 2, "--out", "a", "--quiet")
    found = json.loads(cli("evaluate", "a", "--which", "last", "--unseen", "--json").out)
    assert found["metrics"] == json.loads(Path("a/summary.json").read_text())["unseen"]
    assert "deployed/unseen/test/accuracy" in cli("evaluate", "a", "--unseen").out


def test_evaluate_unseen_is_of_the_checkpoint_that_serves_newcomers(cli):
    cli("run", "it_pfl_hn", *TINY, "--finetune-after", 1, "--unseen", 2, "--out", "a", "--quiet")
    found = json.loads(cli("evaluate", "a", "--unseen", "--json").out)
    assert found["round"] == 2 and found["metrics"] == json.loads(Path("a/summary.json").read_text())["unseen"]
    assert json.loads(cli("evaluate", "a", "--json").out)["round"] == 1


def test_evaluate_unseen_by_participants_models(cli, refused):
    cli("run", "pfedhn", *TINY, "--unseen", 2, "--admit-rounds", 1, "--out", "a", "--quiet")
    for mode in ("sampled", "ensemble", "nearest"):
        metrics = json.loads(cli("evaluate", "a", "--unseen", "--mode", mode, "--split", "all", "--json").out)[
            "metrics"
        ]
        assert 0 <= metrics["deployed/unseen/all/accuracy"] <= 1
    assert "Unknown mode 'neerest'; did you mean 'nearest'" in refused("evaluate", "a", "--unseen", "--mode", "neerest")
    told = refused("evaluate", "a", "--unseen", "--split", "all")
    assert "pFedHN admits newcomers by training on their labelled samples" in told
    assert "is for admission" in refused("evaluate", "a", "--unseen", "--mode", "sampled", "--samples", 3)
    cli("evaluate", "a", "--unseen", "--samples", 3)


def test_evaluate_unseen_on_their_whole_data(cli):
    cli("run", "fedavg", *TINY, "--unseen", 2, "--out", "a", "--quiet")
    found = json.loads(cli("evaluate", "a", "--unseen", "--split", "all", "--json").out)
    assert "deployed/unseen/all/accuracy" in found["metrics"]


def test_a_run_says_when_its_method_cannot_serve_unseen_clients(cli):
    outcome = cli("run", "local", *TINY, "--unseen", 2)
    assert outcome.code == 0
    assert "Local cannot serve clients that took no part in training" in outcome.out


def test_evaluate_refuses_unseen_where_the_method_cannot(refused, trained):
    assert "Local cannot serve clients that took no part" in refused("evaluate", trained, "--unseen")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--split", "tst"], "Unknown split 'tst'; did you mean 'test'"),
        (["--which", "first"], "--which is 'first'; give best, last or the number of a round."),
        (["--which", "7"], "has no checkpoint of round 7; choose from: 1, 2."),
        (["--mode", "nearest"], "--mode and --samples are about clients held out of training; give --unseen too."),
        (["--samples", "3"], "--mode and --samples are about clients held out of training; give --unseen too."),
    ],
)
def test_evaluate_refuses(refused, trained, words, sentence):
    assert sentence in refused("evaluate", trained, *words)


def test_evaluate_refuses_unseen_where_there_are_none(refused, cli):
    cli("run", "fedavg", *TINY, "--val-share", 0, "--out", "a", "--quiet")
    assert "a held no clients out of training" in refused("evaluate", "a", "--unseen")
    assert "No client of a has val data" in refused("evaluate", "a", "--split", "val")


def test_a_corrupt_checkpoint(refused, own_copy):
    state = own_copy / "checkpoints/round-000002/memory.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    for command in ("evaluate", "resume"):
        words = ("--which", "last") if command == "evaluate" else ()
        assert "memory.safetensors is damaged" in refused(command, own_copy, *words)


@pytest.mark.parametrize("words", [["resume"], ["evaluate"], ["export", "--all"], ["compare"]])
def test_not_a_run_directory(refused, words):
    Path("empty").mkdir()
    assert "empty is not a run directory: it has no config.yaml" in refused(*words, "empty")


def test_resume_refuses_a_bad_number_of_rounds(refused, trained):
    assert "--rounds is -1; it must be at least 0" in refused("resume", trained, "--rounds", -1)


def test_export_writes_files_that_load(cli, trained):
    outcome = cli("export", trained, "--client", 0, "--client", 3, "--out", "models")
    assert outcome.out == "models/client-0.safetensors\nmodels/client-3.safetensors\n"
    loaded: dict = {"__file__": str(Path("models/client-3.py").absolute())}
    exec(Path("models/client-3.py").read_text(), loaded)
    assert sum(p.numel() for p in loaded["model"].parameters()) > 0


def test_export_all_goes_into_the_run(cli, own_copy):
    cli("export", own_copy, "--all")
    assert len(list((own_copy / "export").glob("client-*.safetensors"))) == 4


def test_export_refuses(refused, trained):
    assert "Unknown client '17'" in refused("export", trained, "--client", 17)
    assert "give one of --client ID, once or more, --all, and --global" in refused("export", trained)
    assert "give one of --client ID, once or more, --all, and --global" in refused(
        "export", trained, "--all", "--client", 1
    )


def test_compare_is_a_table_or_json(cli, trained):
    cli("run", "fedavg", *TINY, "--seeds", 2, "--out", "many", "--quiet")
    table = cli("compare", "many", trained).out
    assert [line.split()[0] for line in table.splitlines()[4:6]] == ["fedavg", "local"]
    (line,) = cli("compare", "many", trained, "--json").out.splitlines()
    rows = json.loads(line)["comparison"]
    assert [row["method"] for row in rows] == ["fedavg", "local"]
    assert set(rows[0]["best"]) == {"mean", "std"}
    assert rows[1]["unseen"] is None


def test_compare_says_what_it_leaves_out(cli, trained, own_copy):
    (own_copy / "summary.json").unlink()
    outcome = cli("compare", trained, own_copy)
    assert outcome.code == 0
    assert f"fedloom: {own_copy} is left out: it has not finished" in outcome.err


def test_a_global_model_is_evaluated_and_exported(cli, refused):
    cli("run", "mh_pfedhn_gd", *TINY, "--chunk", 512, "--unseen", 1, "--out", "a", "--quiet")
    found = json.loads(cli("evaluate", "a", "--global", "--json").out)
    assert 0 <= found["metrics"]["global/participants/test/accuracy"] <= 1 and set(found["clients"]) == set("0123")
    assert cli("export", "a", "--global", "--out", "models").out == "models/global.safetensors\n"
    assert "model = load_model" in Path("models/global.py").read_text()
    found = json.loads(cli("evaluate", "a", "--global", "--unseen", "--split", "all", "--json").out)
    assert 0 <= found["metrics"]["global/unseen/all/accuracy"] <= 1 and set(found["clients"]) == {"4"}
    assert "--global is there without" in refused("evaluate", "a", "--global", "--unseen", "--samples", 3)
    assert "Say whose models to write" in refused("export", "a", "--global", "--all")


def test_a_method_without_a_global_model_says_so(refused, trained):
    for command in ("evaluate", "export"):
        assert "Local has no global model apart from what its clients deploy" in refused(command, trained, "--global")


def test_resume_says_what_had_finished_and_not_what_was_paused(cli, own_copy):
    assert "had finished" in cli("resume", own_copy, "--quiet").err
    config = own_copy / "config.yaml"
    config.write_text(config.read_text().replace("rounds: 2", "rounds: 3"))
    assert "had finished" not in cli("resume", own_copy, "--quiet", "--force").err
