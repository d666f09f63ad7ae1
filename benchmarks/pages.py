# SPDX-License-Identifier: Apache-2.0
"""The numbers of the documents, from the files in ``results/``: run this when a file there has changed.

    python benchmarks/pages.py

Every page has its tables between ``<!-- generated: KIND ARGUMENT -->`` and ``<!-- end -->``; what stands there is
written anew. The kinds are the functions marked ``@block``. The figures of newcomers are drawn too.
``tests/test_pages.py`` fails while a page says something else than the files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedloom.reports.measured import FIRST, Cell, Line, Made, Measured, board, in_words, interval, markdown
from fedloom.reports.tables import Cells

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
BLOCK = re.compile(
    r"(?<=<!-- generated: )(?P<kind>\w+)(?: (?P<argument>[^\n]*?))?(?P<mark> -->\n).*?(?=<!-- end -->)", re.S
)
SHIFTS = ("blur", "rotation", "brightness", "contrast", "saturation")
PER_CENT = 100.0
METHODS = {"fedavg": "FedAvg", "pfedhn": "pFedHN", "mh_pfedhn": "MH-pFedHN"}

Block = Callable[[str], str]
BLOCKS: dict[str, Block] = {}


def block(function: Block) -> Block:
    """Make a kind of block of it, of its name."""
    BLOCKS[function.__name__] = function
    return function


def measured(name: str) -> Measured:
    """The results of a recipe."""
    return Measured.read(RESULTS / f"{name}.json")


def all_measured() -> list[Measured]:
    """Of every recipe that was run."""
    papers = ("pfedhn", "mh-pfedhn", "it-pfl-hn", "hypergenfl", "hyperfedzero", "")
    order = {
        path: next(i for i, paper in enumerate(papers) if path.stem.startswith(paper))
        for path in RESULTS.glob("*.json")
    }
    return [Measured.read(path) for path in sorted(order, key=lambda path: (order[path], path.stem))]


def with_provenance(cells: Cells, *lines: str) -> str:
    return f"{markdown(cells)}\n\n" + "\n".join(lines) + "\n"


def numbers(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Cells:
    return Cells(columns, rows, "")


# ---- tables of recipes


@block
def table(name: str) -> str:
    """All that was measured of a recipe, but for rows of shifted images."""
    found = measured(name)
    rows = [line.name for line in found.rows if not any(shift in line.name for shift in SHIFTS)]
    return with_provenance(found.cells(rows), found.provenance(rows))


@block
def shifts(name: str) -> str:
    """Rows of shifted images: shifts by methods."""
    found = measured(name)
    methods = ["FedAvg", "FedAvg + prior", "IT-PFL-HN as written", "IT-PFL-HN, standardised"]
    looked_up = {method: f"{method}{{}}" for method in methods} | {
        f"pFedHN, {mode}": f"pFedHN{{}}, {mode}" for mode in ("sampled", "ensemble", "nearest")
    }
    body = [
        [shift or "none", *(_shown(found.cell(row.format(f", {shift}" if shift else ""), "unseen"))
                            for row in looked_up.values())]
        for shift in ("", *SHIFTS)
    ]  # fmt: skip
    return with_provenance(numbers(["images of newcomers", *looked_up], body), found.provenance())


@block
def privacy(name: str) -> str:
    """Newcomers' accuracy by epsilon and number of samples."""
    found = measured(name)
    counts = (10, 30, 100, 300, 425)
    body = [
        [
            f"{epsilon:g}",
            *(_shown(found.cell(f"standardised, epsilon = {epsilon:g}, n = {n}", "unseen")) for n in counts),
        ]
        for epsilon in (0.1, 0.3, 1, 3)
    ]
    body.append(["hardly any noise", *["–"] * 4, _shown(found.cell("standardised, hardly any noise", "unseen"))])
    return with_provenance(numbers(["epsilon", *(f"n = {n}" for n in counts)], body), found.provenance())


@block
def side(names: str) -> str:
    """Several recipes with the same rows, side by side: the first column of each, the paper's figure in brackets."""
    several = [measured(name) for name in names.split()]
    rows = dict.fromkeys(line.name for one in several for line in one.rows)
    body = []
    for row in rows:
        cells = [one.cell(row, one.columns[0]) for one in several]
        if any(cells):
            papers = [next((line.paper for line in one.rows if line.name == row), None) for one in several]
            body.append([row, *(_with_choice(c) + ("" if p is None else f" ({p})") for c, p in zip(cells, papers))])
    columns = ["", *(one.setting.removesuffix(f", {one.columns[0]}") for one in several)]
    return with_provenance(numbers(columns, body), *(f"- {one.provenance()}" for one in several))


@block
def rows(labels: str) -> str:
    """Where methods stand in all tables, by their names on the board, with a semicolon between them."""
    body = []
    for label in labels.split("; "):
        before = len(body)
        for one in all_measured():
            for line in one.rows:
                cell = one.cell(line.name, one.columns[0])
                if one.setting and cell is not None and label == _label(line):
                    paper = "–" if line.paper is None else str(line.paper)
                    body.append([one.setting, line.name, _with_choice(cell), paper, one.length or "all"])
        if len(body) == before:
            raise ValueError(f"No file in {RESULTS} has a number of {label!r}; take it out of the page.")
    return markdown(numbers(["setting", "row", "test accuracy, %", "the paper", "of the training"], body)) + "\n"


# ---- overviews


@block
def headline(_: str) -> str:
    """One line for each table of a paper."""
    body = []
    for one in all_measured():
        published = [line for line in one.rows if isinstance(line.paper, int | float)]
        if one.setting and published:
            best = max(published, key=lambda line: float(line.paper or 0))
            ours = _best(one)
            controls = [_shown(one.cell(_row(one, name), one.columns[0])) for name in ("Local", "FedAvg + prior")]
            body.append([
                one.setting, one.length or "all", f"{best.paper} ({_label(best) or best.name})",
                f"{_shown(one.cell(ours.name, one.columns[0]))} ({_label(ours)})", *controls, verdict(one),
            ])  # fmt: skip
    columns = [
        "setting",
        "of the paper's training",
        "best published",
        "our best row",
        "Local",
        "FedAvg + prior",
        "verdict",
    ]
    return markdown(numbers(columns, body)) + "\n"


def verdict(one: Measured) -> str:
    """How the best row here stands to the best published figure and to the controls, in a sentence."""
    column, ours = one.columns[0], _best(one)
    published = max(float(line.paper) for line in one.rows if isinstance(line.paper, int | float))
    cell = one.cell(ours.name, column)
    assert cell is not None
    mean, low, high = (None if x is None else PER_CENT * x for x in cell.interval)
    assert mean is not None
    if low is None or high is None:
        first = f"{'Above' if mean > published else 'Below'} the best published figure with one seed"
    elif low <= published <= high:
        first = "Level with the best published figure"
    else:
        first = f"{'Above' if mean > published else 'Below'} the best published figure"
    controls = {name: found for name in FIRST if (found := one.cell(_row(one, name), column))}
    if _label(ours) in FIRST:
        return f"{first}, by a control."
    if not controls:
        return f"{first}; the control is not measured."
    name, control = max(controls.items(), key=lambda item: item[1].interval.mean)
    ahead = mean - PER_CENT * control.interval.mean
    apart = (cell.interval.low or 0) > (control.interval.high or 1)
    return f"{first}; {ahead:.1f} points above {name}{'' if apart else ', intervals overlap'}."


def _best(one: Measured) -> Line:
    """The row of the board with the highest mean, of those that were measured with most seeds."""
    known = [(line, one.cell(line.name, one.columns[0])) for line in one.rows if _label(line)]
    there = [(line, cell) for line, cell in known if cell is not None]
    seeds = max(cell.seeds for _, cell in there)
    return max((pair for pair in there if pair[1].seeds == seeds), key=lambda pair: pair[1].interval.mean)[0]


def _row(one: Measured, label: str) -> str:
    """The row that has this name on the board, the first that was measured if there are several."""
    named = [line.name for line in one.rows if _label(line) == label]
    return next((name for name in named if one.cell(name, one.columns[0])), label)


@block
def all_methods(_: str) -> str:
    """The board, and what each of its columns was made with."""
    found = [one for one in all_measured() if one.setting]
    sources = [f"- {one.setting}: {one.provenance()}" for one in found]
    return f"{markdown(board(found))}\n\n" + "\n".join(sources) + "\n"


@block
def unmeasured(_: str) -> str:
    """The recipes that were not run, and those of which only some rows were."""
    known, parts, never = {path.stem for path in RESULTS.glob("*.json")}, [], []
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        if path.stem not in known:
            never.append(f"`{path.stem}`")
            continue
        one = measured(path.stem)
        there = sum(one.cell(line.name, one.columns[0]) is not None for line in one.rows)
        if there < len(one.rows):
            parts.append(f"`{path.stem}` ({there} of {len(one.rows)} rows)")
    return f"Recipes that have not been run: {', '.join(never)}. Run in part: {', '.join(parts)}.\n"


# ---- attacks and rules


def attacks_of(name: str) -> tuple[list[dict[str, Any]], str]:
    """What ``benchmarks/attacks.py`` wrote, and how it was made."""
    found = json.loads((RESULTS / "attacks" / f"{name}.json").read_text())
    return found["rows"], f"`{found['command']}`: {in_words([Made(**found['made'])])}."


@block
def left_out(which: str) -> str:
    """Rules without an attack, or with some."""
    rows, made = attacks_of("left-out")
    quiet = which == "quiet"
    columns = ["", "last", "worst tenth", "honest left out", "their most skewed third"]
    columns += [] if quiet else ["liars left out", "back door open"]
    body = []
    for one in rows:
        if (one["attack"] == "none") != quiet or (quiet and one["rule"] == "mean"):
            continue
        groups = [one["left_out"].get(who) for who in ("honest", "honest, most skewed third", "liars")]
        told = [
            one["accuracy"],
            one["worst_tenth"],
            *groups[: 2 if quiet else 3],
            *([] if quiet else [one["back_door"]]),
        ]
        name = one["rule"] if quiet else f"{one['attack']}, {one['rule']}"
        body.append([name, *("–" if value is None else f"{PER_CENT * value:.1f}" for value in told)])
    return with_provenance(numbers(columns, body), made)


@block
def closed_door(_: str) -> str:
    """How often triggered samples are taken for the target where nobody lies."""
    rows, _made = attacks_of("left-out")
    (control,) = (one for one in rows if (one["attack"], one["rule"]) == ("none", "mean"))
    return f"Where nobody lies, {PER_CENT * control['back_door']:.1f}% of triggered samples are taken for class 0.\n"


@block
def inversion(_: str) -> str:
    """Replies of one small step and of many, by method."""
    rows, made = attacks_of("inversion")
    columns = ["", "reply of the run", "chance", f"one step on {rows[0]['batch']}", "chance", "control", "chance"]
    body = []
    for one in rows:
        steps = f"{one['steps']} step{'s' * (one['steps'] > 1)} of {one['batch']}"
        whole, small = one["measures"]
        sides = [whole["run"], small["run"], whole["control"]]
        cells = [text for side in sides for text in (_decibels(side), f"{side['chance']:.1f}")]
        body.append([f"{METHODS[one['method']]}, {steps}", *cells])
    return with_provenance(numbers(columns, body), made)


def _decibels(side: dict[str, Any]) -> str:
    return f"{side['value']:.1f} ({side['low']:.1f} to {side['high']:.1f})"


# ---- newcomers without labels


def newcomers_of(name: str) -> dict[str, Any]:
    """What ``benchmarks/newcomers.py`` wrote about a setting."""
    found: dict[str, Any] = json.loads((RESULTS / "newcomers" / f"{name}.json").read_text())
    return found


def newcomers_all() -> Iterator[dict[str, Any]]:
    """All settings, images of many classes first."""
    for name in sorted(path.stem for path in (RESULTS / "newcomers").glob("*.json")):
        yield newcomers_of(name)


@block
def newcomers(_: str) -> str:
    """Settings by what is known of a newcomer."""
    body = []
    for one in newcomers_all():
        at = [one["numbers"].index(n) if n in one["numbers"] else None for n in (10, 100)]
        curves = {
            name: [None if i is None else _spread(curve, one, i) for i in at] for name, curve in one["curves"].items()
        }
        body.append([
            one["title"], _spread(one["curves"]["FedAvg"], one, 0), *(cell or "–" for cell in curves["FedAvg + prior"]),
            curves["plain EM"][0] or "–", _spread(one["levels"]["true prior"], one),
        ])  # fmt: skip
    columns = ["", "FedAvg", "+ prior, 10 samples", "+ prior, 100 samples", "plain EM, 10 samples", "true prior"]
    return with_provenance(numbers(columns, body), *_newcomers_made())


@block
def newcomers_shifts(_: str) -> str:
    """Settings by shifts: FedAvg, and with the prior."""
    body = []
    for one in newcomers_all():
        found = [one["shifts"].get(shift) for shift in ("none", *SHIFTS)]
        body.append([one["title"], *(
            "–" if s is None else f"{s['raw']['mean']:.1f} → {s['checked']['mean']:.1f}" for s in found
        )])  # fmt: skip
    return markdown(numbers(["", "none", *SHIFTS], body)) + "\n"


@block
def newcomers_told(_: str) -> str:
    """Settings by shifts: how many are told not to fit, and what checks lose or save."""
    body = []
    for one in newcomers_all():
        found = [one["shifts"].get(shift) for shift in ("none", *SHIFTS)]
        body.append([one["title"], *(
            "–" if s is None
            else f"{PER_CENT * s['flagged']['mean']:.0f}%, {s['checked']['mean'] - s['unchecked']['mean']:+.1f}"
            for s in found
        )])  # fmt: skip
    return markdown(numbers(["", "none", *SHIFTS], body)) + "\n"


@block
def newcomers_tried(_: str) -> str:
    """Settings by what newcomers with all their samples gain, with the federation's trial and without it."""
    files = {path: json.loads(path.read_text()) for path in sorted((RESULTS / "trial").glob("*.json"), reverse=True)}
    body = []
    settings = [({"seeds": made["seeds"]}, one) for made in files.values() for one in made["settings"].values()]
    for seeds, one in settings:
        row = one["all"]
        worst = min(run["guarded"] - run["plain"] for number in ("10", "all") for run in one[number]["runs"])
        told = "–" if row["change_of_corrected"] is None else f"{row['change_of_corrected']:+.1f}"
        body.append([
            one["title"], _spread(row["plain"], seeds),
            *(_gained(row[name], seeds) for name in ("untried_gain", "gain")),
            f"{worst:+.1f}", f"{row['corrected']['mean']:.0f}%", told,
        ])  # fmt: skip
    columns = ["", "FedAvg", "gain without the trial", "gain with it", "worst seed", 'told "corrected"', "their gain"]
    lines = [
        f"`{found['command']} --out results/trial/{path.name}`: {in_words([Made(**found['made'])])}."
        for path, found in files.items()
    ]
    return with_provenance(numbers(columns, body), *(lines if len(lines) == 1 else [f"- {one}" for one in lines]))


@block
def rates(_: str) -> str:
    """Test accuracies with a method's own rate, with one by short trials and with a tuned one."""
    files = {path: json.loads(path.read_text()) for path in sorted((RESULTS / "rates").glob("*.json"))}
    body = []
    for title, one in (pair for found in files.values() for pair in found["settings"].items()):
        means = {name: PER_CENT * sum(one[name]) / len(one[name]) for name in ("own", "auto", "tuned")}
        used = dict.fromkeys(f"{rate:g}" for rate in one["rates"]["auto"])
        body.append([
            title, *(f"{mean:.1f}" for mean in means.values()), f"{means['auto'] - means['tuned']:+.1f}",
            f"{one['rates']['own']:g}", ", ".join(used), f"{one['rates']['tuned']:g}",
        ])  # fmt: skip
    columns = ["", "own rate", "auto", "tuned", "auto less tuned", "the rates: own", "auto", "tuned"]
    lines = [
        f"`{found['command']} --out results/rates/{path.name}`: {in_words([Made(**found['made'])])}."
        for path, found in files.items()
    ]
    return with_provenance(numbers(columns, body), *(lines if len(lines) == 1 else [f"- {one}" for one in lines]))


def _gained(found: dict[str, float], one: dict[str, Any]) -> str:
    """A mean difference in points, with half of its 95% interval over seeds."""
    cell = interval(found["mean"] / PER_CENT, found["std"] / PER_CENT, len(one["seeds"]))
    assert cell.low is not None and cell.high is not None
    return f"{found['mean']:+.1f} ± {PER_CENT * (cell.high - cell.low) / 2:.1f}"


def _newcomers_made() -> list[str]:
    """The commands, each with what it ran on."""
    lines: dict[tuple[str, str], list[str]] = {}
    for one in newcomers_all():
        lines.setdefault((one["command"], in_words([Made(**one["made"])])), []).append(one["name"])
    return [f"- `{command} --settings {' '.join(names)}`: {made}." for (command, made), names in lines.items()]


def _spread(found: dict[str, Any], one: dict[str, Any], at: int | None = None) -> str:
    """A mean with its interval."""
    mean, std = (found["mean"], found["std"]) if at is None else (found["mean"][at], found["std"][at])
    return str(Cell(interval(mean / PER_CENT, std / PER_CENT, len(one["seeds"])), len(one["seeds"]), {}))


LOOKS = {
    "FedAvg": "tab:gray",
    "plain EM": "tab:orange",
    "FedAvg + prior": "tab:blue",
    "without calibration": "tab:purple",
}
LEVELS = {"true prior": "black", "FedAvg + prior, labelled participants": "tab:green"}
FIGURES = {"newcomers": None, "newcomers-cifar10-path": "cifar10-path"}
"""Files in docs/img, and the setting that each shows; None: all of them."""


def shown_in(name: str) -> list[dict[str, Any]]:
    """What a figure is made from."""
    setting = FIGURES[name]
    return list(newcomers_all()) if setting is None else [newcomers_of(setting)]


def digest(name: str) -> str:
    """Of the numbers in a figure, which says so of itself: drawn anew it has other bytes with another matplotlib."""
    return hashlib.sha256(json.dumps(shown_in(name), sort_keys=True).encode()).hexdigest()


def draw(name: str) -> None:
    """A figure: accuracy against the number of unlabelled samples; lines for what does not depend on it."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = name  # the same bytes for the same numbers
    settings = shown_in(name)
    across = 3 if len(settings) > 1 else 1
    down = -(-len(settings) // across)
    figure = Figure(figsize=(3.4 * across + 0.6, 2.6 * down + 0.8), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, one in zip(panels, settings):
        at = one["numbers"]
        for method, found in one["curves"].items():
            cells = [interval(m, s, len(one["seeds"])) for m, s in zip(found["mean"], found["std"])]
            axes.plot(at, found["mean"], color=LOOKS[method], label=method, marker="o", markersize=2.5, linewidth=1)
            axes.fill_between(
                at, [c.low for c in cells], [c.high for c in cells], color=LOOKS[method], alpha=0.12, linewidth=0
            )
        for method, colour in LEVELS.items():
            axes.axhline(one["levels"][method]["mean"], color=colour, label=method, linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_xticks(at[:: 2 if across > 1 else 1], [str(n) for n in at[:: 2 if across > 1 else 1]])
        axes.minorticks_off()
        plain, most = one["curves"]["FedAvg"]["mean"][0], one["levels"]["true prior"]["mean"]
        axes.set_ylim(max(0, plain - 25), most + 6)  # plain EM with one sample would squeeze the rest
        axes.set_title(one["title"], fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.2)
    for axes in panels[len(settings) :]:
        axes.set_axis_off()
    figure.supxlabel("unlabelled samples of the newcomer", fontsize=9)
    figure.supylabel("accuracy of newcomers, %", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3 if across > 1 else 2, fontsize=8)
    figure.savefig(ROOT / "docs" / "img" / f"{name}.svg", metadata={"Date": None, "Description": digest(name)})


# ---- performance


@block
def performance(name: str) -> str:
    """A table of measured times."""
    found = json.loads((RESULTS / "performance" / f"{name}.json").read_text())
    body = [[f"{x:,}" if isinstance(x, int | float) else x for x in row] for row in found["rows"]]
    made = in_words(Made(**one) for one in found["made"])
    return with_provenance(numbers(found["columns"], body), f"`{found['command']}`: {made}. {found['note']}")


# ---- pages


def _shown(cell: Cell | None) -> str:
    return "–" if cell is None else str(cell)


def _with_choice(cell: Cell | None) -> str:
    """A number, and the value of what was chosen by validation."""
    if cell is None or not cell.chosen:
        return _shown(cell)
    return f"{cell} at {', '.join(f'{value:g}' for value in cell.chosen.values())}"


def _label(line: Line) -> str:
    """The row's name on the board."""
    return line.name if line.board is None else line.board


def pages() -> list[Path]:
    """Those that have blocks."""
    there = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in there if BLOCK.search(path.read_text(encoding="utf-8"))]


def filled(text: str) -> str:
    """A page's text with its blocks written anew."""
    return BLOCK.sub(lambda found: _filled(found), text)


def _filled(found: re.Match[str]) -> str:
    kind, argument = found["kind"], found["argument"] or ""
    head = f"{kind} {argument}" if argument else kind
    return f"{head}{found['mark']}{BLOCKS[kind](argument)}"


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    for name in FIGURES:
        path = ROOT / "docs" / "img" / f"{name}.svg"
        if not path.exists() or digest(name) not in path.read_text(encoding="utf-8"):
            draw(name)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
