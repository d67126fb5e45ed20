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
from collections.abc import Callable, Iterable, Iterator
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
NO_FALL_THROUGH = re.compile(r"(?:jmp|b\s|ret|br\s|ud2|brk)")
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


def components(nodes: Iterable[int], successors: Callable[[int], Iterable[int]]) -> Iterator[set[int]]:
    """The strongly connected components (Tarjan)."""
    inside, index, low = set(nodes), {}, {}
    stack: list[int] = []
    for root in sorted(inside):
        if root in index:
            continue
        work = [(root, iter(successors(root)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, rest = work[-1]
            child = next((child for child in rest if child in inside and (child not in index or child in stack)), None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    yield set(stack[at:])
                    del stack[at:]
            elif child not in index:
                index[child] = low[child] = len(index)
                stack.append(child)
                work.append((child, iter(successors(child))))
            else:
                low[node] = min(low[node], index[child])


def innermost_loops(body: list[tuple[int, str]]) -> list[list[str]]:
    """The instructions of each loop that holds no other loop."""
    position = {address: i for i, (address, _) in enumerate(body)}
    after: list[list[int]] = []
    for i, (_, text) in enumerate(body):
        jump = JUMP.match(text)
        target = position.get(int(jump[1], 16)) if jump else None
        falls = not NO_FALL_THROUGH.match(text) and i + 1 < len(body)
        after.append(([] if target is None else [target]) + ([i + 1] if falls else []))
    starts = sorted({0} | {t for i, s in enumerate(after) if s != [i + 1] for t in (*s, i + 1) if t < len(body)})
    last = dict(zip(starts, [*(start - 1 for start in starts[1:]), len(body) - 1], strict=True))
    before: dict[int, list[int]] = {start: [] for start in starts}
    for start in starts:
        for target in after[last[start]]:
            before[target].append(start)
    found: list[list[str]] = []

    def search(nodes: Iterable[int], headers: frozenset[int]) -> bool:
        any_loop = False

        def successors(node: int) -> list[int]:
            return [target for target in after[last[node]] if target not in headers]

        for loop in list(components(nodes, successors)):
            if len(loop) == 1 and not loop & set(successors(min(loop))):
                continue
            any_loop = True
            entries = [node for node in sorted(loop) if any(source not in loop for source in before[node])]
            if not search(loop, headers | {(entries or sorted(loop))[0]}):
                found.append([body[i][1] for start in sorted(loop) for i in range(start, last[start] + 1)])
        return any_loop

    search(starts, frozenset())
    return found


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
