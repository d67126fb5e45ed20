"""Runs the training zoo: python -m tests.zoo.training [--workers N] [--minutes M] [--only TEXT] [--again VERDICT|all].

Each network runs in a process of its own; what is in the results does not run again. Needs the environment of the
zoo (`make campaign RUN=zoo-training` makes it). --ways step,compile measures torch.compile, too.
"""

from __future__ import annotations

import json
import re
from typing import Any

import bnexport
from tests.zoo import catalogue, runner
from tests.zoo import page as zoo
from tests.zoo.training import page
from tests.zoo.training.networks import Network, networks


def _cost(network: Network, exports: dict[str, Any]) -> tuple[bool, float]:
    """What comes first: small models, and of these the ones whose exports took the least time."""
    ways = exports.get(network.entry.name, {"ways": {}})["ways"].values()
    return catalogue.is_large(network.entry), sum(way.get("total_seconds", 0.0) for way in ways) or 1e3


def main() -> None:
    options = runner.parser(__doc__, page.RESULTS, ("step",)).parse_args()
    chosen = [network for network in networks() if re.search(options.only, network.name)]
    results = runner.load(options, [network.name for network in chosen], page.verdict)
    waiting = []
    for network in chosen:
        done = results.get(network.name, {"ways": {}})
        ways = [way for way in options.ways.split(",") if way not in done["ways"]]
        if ways and not done.get("died") and "does_not_train" not in done:
            waiting.append((network, ways))
    exports: dict[str, Any] = json.loads(zoo.RESULTS.read_text())
    waiting.sort(key=lambda each: _cost(each[0], exports))
    print(f"{len(waiting)} of {len(networks())} to run, bnexport {bnexport.__version__}", flush=True)
    trials = [(network.name, ways) for network, ways in waiting]
    runner.run(options, "tests.zoo.training.trial", results, trials, page.line)


if __name__ == "__main__":
    main()
