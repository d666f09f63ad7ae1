# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from fedloom.core.errors import ConfigError, RunError
from fedloom.reports import several as module
from fedloom.reports.figures import figure
from fedloom.reports.report import chart, page, write
from fedloom.reports.several import cells, several
from fedloom.reports.vega import spec_of
from made import broken, made_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two methods with three seeds; pFedHN's clients are 0.1 better."""
    for seed in range(3):
        for method, lift in (("fedavg", 0.0), ("pfedhn", 0.1)):
            made_run(tmp_path / f"{method}-{seed}", method=method, seed=seed, lift=lift)
    return tmp_path


def test_the_baseline_is_the_first_or_the_one_that_is_named(runs: Path) -> None:
    assert several([runs]).baseline.label == "FedAvg"
    found = several([runs], "pfedhn")
    assert (found.baseline.label, [m.label for m in found.others]) == ("pFedHN", ["FedAvg"])
    with pytest.raises(ConfigError, match="Unknown baseline 'nobody'"):
        several([runs], "nobody")


def test_rows_of_one_method_are_named_by_what_differs(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        made_run(tmp_path / str(rate), local_lr=rate)
    found = several([tmp_path])
    assert [m.label for m in found.methods] == ["pFedHN, local lr 0.1", "pFedHN, local lr 0.2"]
    assert several([tmp_path], "pFedHN, local lr 0.2").baseline is not found.methods[0]
    with pytest.raises(ConfigError, match="is 2 rows"):
        several([tmp_path], "pfedhn")


def test_the_table_and_the_sentences_say_the_same(runs: Path) -> None:
    """The same seed draws the same clients and noise: every difference is 0.1 but where a score is cut off at 1."""
    found = several([runs])
    (sentence,) = found.verdicts()
    assert sentence.startswith("pFedHN is better than FedAvg by ")
    table = cells(found)
    columns = dict(zip(table.columns, table.rows[1]))
    size = f"{100 * found.paired()[0].interval.mean:.1f}"
    assert columns["difference to FedAvg"].startswith(f"+{size} ± ")
    assert size in sentence
    assert table.rows[0][table.columns.index("difference to FedAvg")] == "baseline"


def test_one_seed_says_nothing_of_the_method(tmp_path: Path) -> None:
    for method, lift in (("fedavg", 0.0), ("pfedhn", 0.2)):
        made_run(tmp_path / method, method=method, lift=lift)
    told = several([tmp_path]).verdicts()
    assert told[-1].startswith("One seed: nothing is said about the methods")
    made = page([tmp_path])
    assert any("nothing is said about a method" in text for text in made.warnings)
    assert "±" not in made.tiles[0].value


def test_runs_of_other_federations_are_not_compared(tmp_path: Path) -> None:
    made_run(tmp_path / "a", method="fedavg")
    made_run(tmp_path / "b", method="pfedhn", partition="iid")
    found = several([tmp_path])
    assert found.paired() == [] and found.verdicts() == []
    made = page([tmp_path])
    assert "These runs are not of one federation" in made.refusal
    assert "pairs" not in [section.id for section in made.sections]


def test_a_method_is_not_flattered_by_clients_that_it_lost(tmp_path: Path) -> None:
    for method, lost in (("fedavg", 0), ("pfedhn", 4)):
        broken(made_run(tmp_path / method, method=method), lost)
    made = page([tmp_path])
    assert any("no finite number: pFedHN: 4." in text for text in made.warnings)
    assert [tile.value == "–" for tile in made.tiles] == [False, True]


def test_another_split_is_not_paired(tmp_path: Path) -> None:
    made_run(tmp_path / "a", method="fedavg", clients=["a", "b"])
    made_run(tmp_path / "b", method="pfedhn", clients=["c", "d"])
    assert several([tmp_path]).paired() == []
    assert any("hence no difference" in text for text in page([tmp_path]).warnings)


def test_unequal_budgets_and_late_bests_are_said(tmp_path: Path) -> None:
    made_run(tmp_path / "a", method="fedavg", rounds=4)
    made_run(tmp_path / "b", method="pfedhn", rounds=8)
    told = page([tmp_path]).warnings
    assert any(
        text.startswith("The methods did not ask clients equally often: FedAvg: 20; pFedHN: 40") for text in told
    )


def test_a_sweep_of_one_option_and_of_two(tmp_path: Path) -> None:
    for noise in (0.0, 0.1, 0.2):
        made_run(tmp_path / "one" / str(noise), laplace_noise=noise)
    made = chart([tmp_path / "one"], "sweep")
    assert (made.kind, made.data["value"]) == ("lines", [0.0, 0.1, 0.2])
    for rate in (0.1, 0.2):
        for steps in (5, 10):
            made_run(tmp_path / "two" / f"{rate}-{steps}", local_lr=rate, local_steps=steps)
    made = chart([tmp_path / "two"], "sweep")
    assert (made.kind, len(made.data["metric"])) == ("heat", 4)
    with pytest.raises(RunError, match="three runs or more that differ in one option"):
        chart([tmp_path / "one" / "0.0", tmp_path / "one" / "0.1"], "sweep")


def test_every_chart_draws(runs: Path) -> None:
    for name in module.CHARTS:
        if name != "sweep":
            assert chart([runs], name).rows


def test_who_gains_and_loses_is_sorted_for_each_method(runs: Path) -> None:
    made = chart([runs], "winners", "fedavg")
    assert made.data["difference"] == sorted(made.data["difference"])
    assert len(made.data["client"]) == 30


def test_a_report_of_several_lies_where_all_of_them_lie(runs: Path) -> None:
    assert write([runs]) == runs / "report.html"
    assert write([runs / "fedavg-0", runs / "pfedhn-0"], runs / "other.html") == runs / "other.html"
    with pytest.raises(ConfigError, match="--baseline is for several runs"):
        write([runs / "fedavg-0"], baseline="fedavg")


def test_what_goes_with_a_swept_option_is_no_axis(tmp_path: Path) -> None:
    """Noise comes with a bound: the runs without either are the first point, not a row of a table of colours."""
    for noise in (0.0, 0.5, 1.0, 2.0):
        run = made_run(tmp_path / str(noise), dp_noise=noise, dp_clip=float(noise > 0))
        if not noise:
            run.write_summary({**(run.summary() or {}), "name": "FedAvg"})
    made = chart([tmp_path], "sweep")
    assert (made.kind, made.x.title, made.data["value"]) == ("lines", "dp noise", [0.0, 0.5, 1.0, 2.0])
    assert "Along with it changes: dp clip." in made.caption
    lines = [layer["mark"] for layer in spec_of(made)["layer"] if layer["mark"]["type"] == "line"]
    assert [mark["point"] for mark in lines] == [True]  # FedAvg's line has a single point


def test_the_numbers_of_a_small_sweep_are_written_down(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for steps in (5, 10):
            made_run(tmp_path / f"{rate}-{steps}", local_lr=rate, local_steps=steps)
    made = chart([tmp_path], "sweep")
    texts = {text.get_text() for text in figure(made).axes[0].texts}
    assert texts == {f"{value:.1%}" for value in made.data["metric"]}
    assert "text" in [layer["mark"]["type"] for layer in spec_of(made)["layer"]]


def test_a_label_names_one_row_though_it_is_the_method_of_others(tmp_path: Path) -> None:
    """A private run of FedAvg has another name than FedAvg, and the same method."""
    made_run(tmp_path / "plain", method="fedavg")
    private = made_run(tmp_path / "private", method="fedavg", dp_noise=1.0)
    private.write_summary({**(private.summary() or {}), "name": "FedAvg, private clients"})
    assert several([tmp_path], "FedAvg").baseline.label == "FedAvg"
    assert several([tmp_path], "fedavg, private clients").baseline.label == "FedAvg, private clients"


def test_differences_are_drawn_in_points(runs: Path) -> None:
    found = several([runs], "fedavg")
    (one,) = found.paired()
    made = chart([runs], "differences", "fedavg")
    assert made.data["difference"][0] == pytest.approx(100 * one.interval.mean)
    assert chart([runs], "winners", "fedavg").data["difference"][-1] == pytest.approx(
        100 * max(seed.differences.max() for seed in one.seeds)
    )


def test_a_figure_of_one_run_is_not_of_several(runs: Path) -> None:
    with pytest.raises(ConfigError, match="The figure mix is of one run; give that run alone"):
        chart([runs], "mix")
    with pytest.raises(ConfigError, match="The figure means is of several runs; give more than one"):
        chart([runs / "fedavg-0"], "means")


def test_the_number_of_a_partition_is_swept(tmp_path: Path) -> None:
    """Such runs are not compared, but the metric against how unlike clients are is a figure of many papers."""
    for alpha in (10, 0.1, 1):
        made_run(tmp_path / "alpha" / str(alpha), partition=f"dirichlet:{alpha}")
    made = chart([tmp_path / "alpha"], "sweep")
    assert (made.kind, made.x.title, made.data["value"]) == ("lines", "partition, dirichlet", [0.1, 1.0, 10.0])
    for partition in ("dirichlet:0.1", "classes:2", "iid"):
        made_run(tmp_path / "kinds" / partition.replace(":", "-"), partition=partition)
    with pytest.raises(RunError, match="differ in one option with numbers"):
        chart([tmp_path / "kinds"], "sweep")


def test_runs_with_other_metrics_share_no_axis(tmp_path: Path) -> None:
    made_run(tmp_path / "shares", method="fedavg", unseen=0)
    broken(made_run(tmp_path / "errors", method="pfedhn", unseen=0), 0)
    made = page([tmp_path])
    assert "metric (rmse, accuracy)" in made.refusal
    assert [block["type"] for part in made.sections for block in part.blocks if block["type"] == "chart"] == []
    assert cells(several([tmp_path])).columns[2] == "test rmse or accuracy"
    assert [tile.note for tile in made.tiles] == ["", ""]  # nobody was held out
    with pytest.raises(RunError, match="nothing for the figure means: their metrics differ"):
        chart([tmp_path], "means")


def test_methods_with_the_same_cells_have_a_table_each(tmp_path: Path) -> None:
    """Two numbers in one cell would hide each other. Colours mean the same number in each of the tables."""
    for method, lift in (("fedavg", 0.0), ("pfedhn", 0.1)):
        for rate in (0.1, 0.2):
            for steps in (5, 10):
                made_run(
                    tmp_path / f"{method}-{rate}-{steps}", method=method, lift=lift, local_lr=rate, local_steps=steps
                )
    made = chart([tmp_path], "sweep")
    assert [list(switch.options) for switch in made.switches] == [["FedAvg", "pFedHN"]]
    for variant in made.variants().values():
        assert variant.only is not None
        spec = spec_of(variant)
        assert variant.only[1] in spec["transform"][0]["filter"]
        scale = spec["layer"][0]["encoding"]["color"]["scale"]
        assert scale["domain"] == [min(made.data["metric"]), max(made.data["metric"])]
    assert len(figure(made, choices=["pFedHN"]).axes[0].texts) == 4


def test_an_option_that_a_method_settles_is_no_axis(tmp_path: Path) -> None:
    """Local keeps its optimiser, whatever else is swept."""
    for method, keep in (("fedavg", False), ("local", True)):
        for alpha in (0.1, 1, 10):
            made_run(tmp_path / f"{method}-{alpha}", method=method, keep_optimiser=keep, partition=f"dirichlet:{alpha}")
    made = chart([tmp_path], "sweep")
    assert (made.kind, made.x.title) == ("lines", "partition, dirichlet")
    assert "Each method has its own: keep optimiser." in made.caption


def test_runs_that_ended_early_are_said(tmp_path: Path) -> None:
    made_run(tmp_path / "a", method="fedavg")
    run = made_run(tmp_path / "b", method="pfedhn")
    run.write_summary({**(run.summary() or {}), "stopped": "paused after 6 rounds of 12"})
    assert "Ended before the last round: pFedHN (paused after 6 rounds of 12)." in page([tmp_path]).warnings


def test_rows_that_differ_in_the_machine_alone_have_names_of_their_own(tmp_path: Path) -> None:
    for engine in ("sequential", "vectorised"):
        made_run(tmp_path / engine, method="fedavg", engine=engine)
    found = several([tmp_path], "FedAvg, engine vectorised")
    assert [m.label for m in found.methods] == ["FedAvg, engine sequential", "FedAvg, engine vectorised"]
    assert len(found.paired()) == 1


def test_newcomers_are_paired_too(runs: Path) -> None:
    found = several([runs], "fedavg")
    (one,) = found.paired("unseen")
    made = chart([runs], "differences", "fedavg")
    assert [list(switch.options) for switch in made.switches] == [["participants", "newcomers"]]
    assert made.data["difference"][made.data["of"].index("newcomers")] == pytest.approx(100 * one.interval.mean)
    (ends,) = figure(made, choices=["newcomers"]).axes[0].collections[:1]
    low, high = sorted(ends.get_segments()[0][:, 0])
    assert (low, high) == pytest.approx((100 * one.interval.low, 100 * one.interval.high))
