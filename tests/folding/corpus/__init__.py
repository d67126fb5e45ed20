"""Graphs that fold, and graphs that stay, by table and name: for the folder and for the proof."""

from __future__ import annotations

from tests.folding.corpus import branches, constants, opsets, producers, quantized, readers, scopes, takers, traps
from tests.folding.corpus.case import Case

TABLES: dict[str, dict[str, Case]] = {
    "producer": producers.CASES,
    "reader": readers.CASES,
    "refused": readers.REFUSED,
    "taker": takers.CASES,
    "lone": constants.LONE,
    "padded": constants.PADDED,
    "leftover": constants.LEFTOVER,
    "merged": constants.MERGED,
    "unmerged": constants.UNMERGED,
    "branches": branches.CASES,
    "opset": opsets.CASES,
    "quantized": quantized.CASES,
    "scope": scopes.CASES,
    "trap": traps.CASES,
    "number": traps.NUMBERS,
}
CORPUS = {f"{table}-{name}": case for table, cases in TABLES.items() for name, case in cases.items()}
FOLDED = {name: case for name, case in CORPUS.items() if case.left}
