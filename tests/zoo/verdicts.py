"""What a result of the zoo says about a model, in one word."""

from __future__ import annotations

from typing import Any

WAYS = ("deploy dynamo", "deploy torchscript", "kept dynamo", "kept torchscript")
FILES = ("deploy .pt", "deploy .pt2")
PLAIN = ("plain dynamo", "plain torchscript")
# The worst first.
ORDER = ("wrong", "fails", "failed", "refused", "stopped", "missing", "right")


def of_way(result: dict[str, Any], name: str) -> str:
    """right; wrong; fails at a size that the file declares; failed or refused to export; stopped; missing; for `kept`, folded too."""
    way = result["ways"].get(name)
    if way is None:
        return "missing"
    found = [way["status"]]
    if "fold" in way:
        found.append(way["fold"]["status"])
    return min(found, key=ORDER.index)


def of_model(result: dict[str, Any]) -> str:
    """The worst of all ways; "unbuilt" where the model could not be built or run."""
    if not result["ways"] and result.get("died"):
        return "unbuilt"
    return min((of_way(result, name) for name in WAYS), key=ORDER.index)


def line(result: dict[str, Any]) -> str:
    """One line for a terminal."""
    ways = " ".join(f"{name.replace(' ', '/')}={of_way(result, name)}" for name in WAYS)
    plain = " ".join(f"{name.replace(' ', '/')}={of_way(result, name)}" for name in PLAIN)
    died = f" died: {result['died'][-200:]!r}" if result.get("died") else ""
    return f"{of_model(result):8} {result['name']} {result.get('wall_seconds')} s: {ways} {plain}{died}"
