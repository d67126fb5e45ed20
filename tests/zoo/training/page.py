"""The training zoo: a step of each architecture (`python -m tests.campaign zoo-training`), and its page, docs/zoo_training.md.

--ways step,compile measures torch.compile, too; --ways faults plants faults into the graphs.
"""

import collections
import functools
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.page import table
from tests.campaign.table import Campaign
from tests.zoo import catalogue
from tests.zoo import page as zoo
from tests.zoo.page import TITLES, cell
from tests.zoo.training.networks import find, networks

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[3] / "docs" / "zoo_training.md"
ORDER = ("wrong", "refused", "failed", "stopped", "died")
Result = dict[str, Any]


def verdict(result: Result) -> str:
    """right, wrong, refused, failed, stopped, died; "untrained" where torch itself does not train it."""
    if "does_not_train" in result:
        return "untrained"
    way = result["ways"].get("step")
    if way is None:
        return "died" if result.get("died") else "missing"
    return str(way["status"])


def jumped(result: Result) -> bool:
    """Whether plain float64 did not settle it."""
    return "followed" in result["ways"]["step"]


def errors(result: Result) -> tuple[float, float]:
    """Medians of the gradients' error and torch's own, as they were judged."""
    way = result["ways"]["step"]
    ours, own, *_ = zip(*way.get("followed", way["errors"]))
    return statistics.median(ours), statistics.median(own)


def line(result: Result) -> str:
    """One line for a terminal."""
    way = result["ways"].get("step", {})
    shown = {key: way[key] for key in ("verification", "errors", "wrong", "error", "ratio") if key in way}
    more = {key: value for key, value in result["ways"].items() if key != "step"}
    why = str(result.get("does_not_train") or result.get("died", ""))[-300:]
    return f"{verdict(result):9} {result['name']} {result.get('wall_seconds')} s: {shown} {more} {why}"


def _share(count: int, of: int) -> str:
    return f"{count} of {of} ({100 * count / max(of, 1):.1f} %)"


def _spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}" if values else "none"


def summary(results: list[Result]) -> str:
    trained = [each for each in results if verdict(each) not in ("untrained", "missing")]
    right = [each for each in trained if verdict(each) == "right"]
    passed = [each for each in trained if each["ways"].get("step", {}).get("verification") == "passed"]
    silent = [each for each in passed if verdict(each) == "wrong"]
    undecided = [each for each in right if each["ways"]["step"].get("verification") == "not_verified"]
    ratios = [each["ways"]["step"]["ratio"] for each in right]
    compiled = [each for each in right if "ratio" in each["ways"].get("compile", {})]
    against = [each["ways"]["step"]["ratio"] / each["ways"]["compile"]["ratio"] for each in compiled]
    slower = sorted((each for each in right if each["ways"]["step"]["ratio"] > 1.0), key=lambda each: each["name"])
    exports = [each["ways"]["step"]["export_processor_seconds"] for each in right]
    faults = [fault for each in right for fault in each["ways"].get("faults", {}).get("found", {}).values()]
    planted = sum(1 for each in right if each["ways"].get("faults", {}).get("found"))
    losses = collections.Counter(each.get("loss", "") for each in right)
    rows = [
        f"Networks that have run: {len(results)} of {len(networks())} in the catalogue; torch trains {len(trained)} of them.",
        f"Exported and right: {_share(len(right), len(trained))}, {sum(map(jumped, right))} of them with jumps.",
        f"Silently wrong (verification passed, and the gradients are wrong): {len(silent)}.",
        f"Verification of the right ones: {len(passed) - len(silent)} passed, {len(undecided)} not verified, "
        f"{len(right) - len(passed) + len(silent) - len(undecided)} by an earlier version and not recorded; refused as "
        f"different though torch trains them: {sum(_refused_as_different(each) for each in trained)}.",
        f"Planted faults that verification does not pass: {_share(sum(fault != 'passed' for fault in faults), len(faults))}, in "
        f"{planted} networks."
        if planted
        else "Planted faults (`--ways faults`): not run yet.",
        f"Time of a step over torch eager's: {_spread(ratios)}; above 1: {len(slower)}"
        + (f" ({', '.join(each['name'] for each in slower)})." if slower else "."),
        f"Over torch.compile's, {len(against)} networks: {_spread(against)}."
        if against
        else "Over torch.compile's (`--ways compile`): not measured yet.",
        f"Export with verification, seconds of processor time: {_spread(exports)}.",
        "Losses of the right ones: " + ", ".join(f"{count} {name}" for name, count in sorted(losses.items())) + ".",
    ]
    return "\n".join(f"- {row}" for row in rows)


def _refused_as_different(result: Result) -> bool:
    way = result["ways"].get("step", {})
    return way.get("status") == "refused" and way["error"].startswith("VerificationError")


def libraries(results: list[Result]) -> str:
    rows = []
    for key, title in TITLES.items():
        members = [each for each in results if each["name"].startswith(f"{key}:") and verdict(each) != "untrained"]
        if members:
            right = [each for each in members if verdict(each) == "right"]
            rows.append(
                [title, str(len(members)), str(len(right)), _spread([each["ways"]["step"]["ratio"] for each in right])]
            )
    return table(["library", "torch trains", "right", "time over eager"], rows)


def others(results: list[Result]) -> str:
    """Networks that are not right, with the message."""
    rows = []
    for each in results:
        word = verdict(each)
        if word in ("right", "missing"):
            continue
        said = each.get("does_not_train") or each["ways"].get("step", {}).get("error") or each.get("died")
        said = said or f"gradients off: {each['ways']['step'].get('wrong') or each['ways']['step']['errors']}"
        rows.append([each["name"], "torch does not" if word == "untrained" else word, cell(str(said))])
    return table(["network", "", "message"], rows, left=3) if rows else "None."


def steps(results: list[Result]) -> str:
    rows = []
    for each in results:
        if verdict(each) != "right":
            continue
        way, compiled = each["ways"]["step"], each["ways"].get("compile", {}).get("ratio")
        ours, own = errors(each)
        rows.append(
            [
                each["name"],
                each["loss"],
                each["optimizer"],
                "right, jumps" if jumped(each) else "right",
                way.get("verification", "").replace("_", " "),
                f"{ours:.1e}",
                f"{own:.1e}",
                f"{way['eager_ms']:.0f}",
                f"{way['ms']:.0f}",
                f"{way['ratio']:.2f}",
                "" if compiled is None else f"{compiled:.2f}",
                f"{way['export_processor_seconds']:.0f}",
            ]
        )
    header = ["network", "loss", "optimizer", "", "verification", "error", "torch's own", "eager, ms", "ms", "ratio"]
    return table([*header, "torch.compile", "export, s"], rows, left=5)


def render(results: dict[str, Result]) -> str:
    shown = [each for _, each in sorted(results.items())]
    text = Path(__file__).with_name("page.md").read_text()
    return text.format(**{each.__name__: each(shown) for each in (summary, libraries, others, steps)})


@functools.cache
def _exports() -> dict[str, Result]:
    return zoo.CAMPAIGN.load()


def cost(name: str, _: dict[str, Result]) -> tuple[bool, float]:
    """What comes first: small models, and of these the ones whose exports took the least time."""
    entry = find(name).entry
    ways = _exports().get(entry.name, {"ways": {}})["ways"].values()
    return catalogue.is_large(entry.name), sum(way.get("total_seconds", 0.0) for way in ways) or 1e3


CAMPAIGN = Campaign(
    cases=lambda: [network.name for network in networks()],
    trial="tests.zoo.training.trial",
    results=RESULTS,
    ways=("step",),
    more_ways=("faults", "compile"),
    environment="frameworks",
    verdict=verdict,
    line=line,
    bad=("wrong",),
    page=lambda: PAGE.write_text(render(json.loads(RESULTS.read_text()))),
    cost=cost,
)
