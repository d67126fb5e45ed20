"""The driver of atheris: libFuzzer chooses inputs by the lines of bnexport that they reach.

A program of its own, since libFuzzer ends the process: python -m tests.fuzz.coverage_guided TARGET SECONDS SEED FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["bnexport"]):
    from tests.fuzz import seeds, targets
    from tests.fuzz.mutations import LARGEST, mutate


def main(name: str, seconds: str, seed: str, folder: str) -> None:
    target = targets.TARGETS[name]
    corpus = Path(folder) / f"corpus-{name}"
    seeds.write(corpus, target.seeds())
    target.prepare()
    others = [data for _, data in target.seeds()]

    def mutated(data: bytes, largest: int, seed: int) -> bytes:
        generator = random.Random(seed)
        if generator.random() < 0.2:
            return atheris.Mutate(data, min(largest, LARGEST))
        return mutate(data, generator, others)[:largest]

    with targets.work_folder() as work:
        arguments = [
            *(sys.argv[0], f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LARGEST}"),
            *(
                f"-timeout={targets.SECONDS:.0f}",
                f"-rss_limit_mb={(targets.MEMORY >> 20) + 1024}",
                "-print_final_stats=1",
            ),
            *("-verbosity=0", f"-artifact_prefix={folder}/{name}-", str(corpus)),
        ]

        def one_input(data: bytes) -> None:
            target.run(data, work)

        atheris.Setup(arguments, one_input, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
