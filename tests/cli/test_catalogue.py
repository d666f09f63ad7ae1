# SPDX-License-Identifier: Apache-2.0
from fedloom import algorithms
from fedloom.clients.partition import schemes
from fedloom.data import names
from fedloom.models.spec import networks


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def test_methods_lists_the_folder(cli):
    out = cli("methods").out
    lines = {line.split()[1]: line for line in out.splitlines() if len(line.split()) > 2}
    assert set(algorithms.names()) <= set(lines)
    assert "same model" in lines["fedavg"] and lines["fedavg"].rstrip().endswith("without labels")
    assert lines["local"].rstrip().endswith(" no")
    assert lines["pfedhn"].rstrip().endswith(" with labels") and lines["pfedhn"].startswith(" loom")
    assert "unlabelled server data" in lines["feddf"] and "server data" not in lines["fedavg"]


def test_methods_are_narrowed_by_words_in_their_lines(cli):
    looms = {line.split()[1] for line in cli("methods", "LOOM").out.splitlines() if line.startswith(" loom")}
    assert {"pfedhn", "hypergenfl"} <= looms and "fedavg" not in looms
    assert "it_pfl_hn" in cli("methods", "loom", "without labels").out
    refused = cli("methods", "xyzzy")
    assert refused.code == 2 and "No method's line has all of 'xyzzy'" in refused.err


def test_datasets_lists_datasets_and_partitions(cli):
    out = cli("datasets").out
    assert {*names(), *(scheme.usage for scheme in schemes())} <= set(first_words(out))
    assert "installed" in out and "no data root given" in out


def test_datasets_says_what_is_missing(cli, tmp_path):
    out = cli("datasets", "--data-root", tmp_path).out
    assert "missing" in out and "no data root given" not in out


def test_models_lists_the_zoo(cli):
    out = cli("models").out
    assert set(networks()) <= set(first_words(out))
    assert "kernels=16" in out
