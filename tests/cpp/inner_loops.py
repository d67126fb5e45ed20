"""Find vectors that the inner loops of the kernels keep on the stack: python inner_loops.py OBJDUMP SET OBJECT...

A kernel that holds more vectors than the instruction set has registers, or vectors of another size than its
registers, still gives the right result, up to ten times slower. This reads the disassembly of the object files of one
set, finds the innermost loops of each kernel, and fails when one stores a vector on the stack or loads one from there,
or when a kernel has no vector loop at all. Prints the number of instructions of the loops with --print.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

TYPES = ("Float32", "Float16", "BFloat16", "Float64")
BATCH_NORM = (
    "pivot_sums", "block_gradient_sums", "normalise", "gradient", "column_moments", "column_normalise",
    "column_gradient_sums", "column_gradient",
)  # fmt: skip
TRAINING = ("relu_gradient", "adam", "sgd", "tile", "correlate", "correlations")
KERNELS = {f"{name}<{dtype}>" for name in BATCH_NORM for dtype in TYPES} | set(TRAINING)

# Without instructions for float16 the constants of its conversion alone fill the registers of baseline x86-64. Its
# tile of 4 x 12 sums fills 12 of 16, and its products take two more than there are.
ALLOWED = {"baseline": lambda kernel: kernel.endswith("<Float16>") or kernel == "tile"}

JUMP = re.compile(r"(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s+(?:[wx]\d+,\s*)?(?:#\w+,\s*)?([0-9a-f]+) <")
ALWAYS = re.compile(r"jmp|b\s")  # back from a block that was moved behind the loop
ARITHMETIC = re.compile(r"v?(?:add|sub|mul|cmp\w*|fn?m(?:add|sub)\d+)p[sd]\b|f(?:add|sub|mul|mla|mls|cm\w\w)\s+v")
STACK = re.compile(r"\(%rsp\)|\[(?:sp|x29)[],]")
FRAME = re.compile(r"\(%rbp\)")
VECTOR = re.compile(r"%[xyz]mm|\bq\d+|\bv\d+\.")


@dataclass(frozen=True)
class Loop:
    kernel: str
    instructions: list[str]
    on_stack: list[str]


def functions(listing: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Names and bodies, (address, instruction), of the functions of a disassembly."""
    name, body = "", []
    for line in listing.splitlines():
        if start := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            if body:
                yield name, body
            name, body = start[1], []
        elif instruction := re.match(r"\s+([0-9a-f]+):\s+(.+?)\s*$", line):
            body.append((int(instruction[1], 16), instruction[2]))
    if body:
        yield name, body


def innermost_loops(body: list[tuple[int, str]]) -> list[list[str]]:
    """The instructions from the target of each conditional jump backwards to the jump, where no other loop lies inside."""
    position = {address: i for i, (address, _) in enumerate(body)}
    jumps = [
        (position.get(int(jump[1], 16)), i)
        for i, (_, text) in enumerate(body)
        if (jump := JUMP.match(text)) and not ALWAYS.match(text)
    ]
    loops = sorted(
        {(first, last) for first, last in jumps if first is not None and first <= last}, key=lambda it: it[1]
    )
    inner = [one for one in loops if not any(one[0] <= a and b <= one[1] for a, b in loops if (a, b) != one)]
    return [[text for _, text in body[first : last + 1]] for first, last in inner]


def kernel_of(name: str) -> str | None:
    """The kernel whose code a function with this demangled name holds; lambdas belong to the function around them."""
    plain = re.sub(r"bnexport::|cpu::|\(anonymous namespace\)::", "", name).split("(")[0]
    function = re.sub(r"^\w+ (?=\w+<)", "", plain)  # without its result's type
    bare = function.split("<")[0].removesuffix("_of")
    return next((known for known in (function, bare) if known in KERNELS), None)


def kernel_loops(listing: str) -> Iterator[Loop]:
    """The innermost loops of the kernels that do arithmetic with vectors."""
    for name, body in functions(listing):
        kernel = kernel_of(name)
        if kernel is None:
            continue
        stack = STACK
        if any(re.match(r"mov\s+%rsp,%rbp", text) for _, text in body[:16]):
            stack = re.compile(f"{STACK.pattern}|{FRAME.pattern}")
        for instructions in innermost_loops(body):
            texts = [re.split(r"\s*(?:#|//|<)", text)[0] for text in instructions]
            calls = any(re.match(r"(?:call|bl)\b", text) for text in texts)
            if not calls and sum(bool(ARITHMETIC.match(text)) for text in texts) >= 2:
                yield Loop(kernel, texts, [text for text in texts if VECTOR.search(text) and stack.search(text)])


def main(objdump: str, name: str, *objects: str) -> int:
    show = "--print" in objects
    loops: list[Loop] = []
    for path in objects:
        if path == "--print":
            continue
        command = [objdump, "-dC", "--no-show-raw-insn", path]
        loops += kernel_loops(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    failures = [f"{kernel}: no vector loop" for kernel in sorted(KERNELS - {loop.kernel for loop in loops})]
    allowed = ALLOWED.get(name, lambda _: False)
    for loop in loops:
        if show:
            print(f"{name:9} {loop.kernel:32} {len(loop.instructions):4} instructions")
        if loop.on_stack and not allowed(loop.kernel):
            lines = "\n    ".join(loop.on_stack)
            failures.append(
                f"{loop.kernel}: {len(loop.on_stack)} of {len(loop.instructions)} on the stack:\n    {lines}"
            )
    for failure in failures:
        print(f"{name}: {failure}", file=sys.stderr)
    print(f"{name}: {len(loops)} inner loops of {len(KERNELS)} kernels")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
