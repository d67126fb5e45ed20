"""What holds for every command: what goes where, JSON, -q, -v, NO_COLOR, exit codes, help, completion."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
import typer

from bnexport.cli.application import app
from bnexport.cli.common import EXAMPLES, PLACES
from models.resnet import ResNet
from tests.cli.conftest import smallest
from tests.support import warm
from tests.support.onnx_text import model
from tests.support.terminal import on_terminal


def tiny():
    torch.manual_seed(0)
    print("a factory may print what it likes")
    return ResNet(in_channels=1, widths=(4,), blocks=1)


def chatty():
    print("a factory may print what it likes")
    return smallest()


KEPT = "{folder}/kept.onnx"
# Arguments of a call that succeeds, its messages, and a key of its JSON.
CALLS = {
    "doctor": ("", [], "checks"),
    "inspect": (KEPT, [], "batch_norms"),
    "fold": (f"{KEPT} {{new}}/f.onnx", ["3 of 3 batch norms folded", "verification passed"], "sites"),
    "recalibrate": (f"{KEPT} {{new}}/r.onnx -i x:{{folder}}/x.npy",
        ["3 batch norms re-estimated on 8 rows", "r.onnx written"], "layers"),
    "statistics": (f"{KEPT} -i x:{{folder}}/x.npy", ["3 batch norms measured on 8 rows"], "layers"),
    "inline": (f"{KEPT} {{new}}/i.onnx", ["3 sync batch norms in inference converted", "verification passed"], "calls"),
    "verify": (f"{KEPT} {KEPT}", ["verification passed"], "outputs"),
    "run": (f"{KEPT} -i x:1,1,8,8 -o {{new}}/o.npz", ["o.npz written"], "outputs"),
    "export": ("tests.cli.test_cli_contract:tiny {new}/e.onnx -i x:2,1,8,8", ["e.onnx written", "verification passed"], "report"),
    "train-export": ("tests.cli.test_cli_contract:chatty {new}/s.onnx -i x:4,1,8,8", ["s.onnx", "verification passed"], "inputs"),
}  # fmt: skip
WRITING = ("export", "fold", "inline", "recalibrate", "train-export")
COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)


@pytest.fixture
def folder(small_files):
    return small_files


def arguments_of(command, folder, new):
    return [command, *(text.format(folder=folder, new=new) for text in CALLS[command][0].split())]


def strict(text):
    """JSON as other languages read it."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_command_is_covered():
    assert set(COMMANDS) == set(CALLS)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_goes_where(command, folder, tmp_path, call):
    """JSON alone, or tables, are on stdout, messages on stderr; -q prints nothing but the JSON that is asked for."""
    arguments, (_, messages, key) = arguments_of(command, folder, tmp_path), CALLS[command]
    again = ["--overwrite"] if command in WRITING else []
    _, out, err = call(*arguments, "--json", "-", code=0)
    assert strict(out)["schema_version"] == 1 and key in strict(out)
    assert all(message in err for message in messages)
    _, tables, err = call(*arguments, *again, code=0)
    assert tables.count("\n") >= 3 and "\x1b" not in tables + err
    assert all(message in err and message not in tables for message in messages)
    printed_by_the_factory = "a factory may print what it likes\n" if "export" in command else ""
    for target, option in ((tmp_path / "result.json", "-q"), ("-", "--quiet")):
        _, quiet, err = call(*arguments, *again, option, "--json", target, code=0)
        assert err == printed_by_the_factory
    assert strict(quiet).keys() == strict((tmp_path / "result.json").read_text()).keys() == strict(out).keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_are_one_line_even_when_quiet_and_verbose_says_where(command, call):
    command = [command, "--json", "/nowhere/at/all.json", *FIRST[command].split()]
    _, out, err = call(*command, "-q", code=2)
    assert out == "" and err.startswith("error: --json: ") and err.count("\n") == 1
    _, out, err = call(*command, "-v", code=2)
    assert out == "" and "Traceback" in err and err.splitlines()[-1].startswith("error: --json: ")


# The arguments that a command cannot do without.
FIRST = {
    **{"doctor": "", "inspect": "a.onnx", **dict.fromkeys(("fold", "inline", "verify"), "a.onnx b.onnx")},
    **{"recalibrate": "a.onnx b.onnx -i x:x.npy", "statistics": "a.onnx -i x:x.npy", "run": "a.onnx"},
    **{"export": "a:b c.onnx --input x:1", "train-export": "a:b c.onnx --input x:1"},
}


def test_verbose_says_more(folder, call):
    command = ["verify", folder / "kept.onnx", folder / "kept.onnx"]
    quiet, loud = (call(*command, *more)[2] for more in ([], ["-v"]))
    assert loud.startswith(quiet) and "verified with 11 sets of inputs, seed 0" in loud


ON_A_TERMINAL = """
import shlex, sys
from bnexport.cli import main
for line in sys.stdin.read().splitlines():
    assert main(shlex.split(line)) == 0, line
main(["inspect", "missing.onnx"])
main(["--help"])
"""


def on_a_terminal(calls, tmp_path, width=100, **environment):
    """What a terminal of `width` columns receives on stdout and stderr."""
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    lines = "\n".join(shlex.join(map(str, call)) for call in calls)
    environment = {**variables, "TERM": "xterm-256color", **environment}
    return on_terminal(ON_A_TERMINAL, lines, width=width, cwd=tmp_path, env=environment)


def test_no_color_means_no_escape_sequence(folder, tmp_path):
    text = on_a_terminal([arguments_of(command, folder, tmp_path) for command in COMMANDS], tmp_path, NO_COLOR="1")
    assert "verification passed" in text and "error: " in text
    assert "\x1b" not in text


# What nobody may lose on the way to a terminal.
SAID = [
    *("3 of 3 batch norms folded into convolutions", "verification passed", "registration in ONNX Runtime"),
    *("Exit codes: 0 ok", "3 batch norms measured on 8 rows"),
]


@pytest.mark.parametrize("width", [80, 20])
def test_a_terminal_gets_colours_a_spinner_and_no_wide_lines(width, folder, tmp_path):
    commands = [
        arguments_of(command, folder, tmp_path) for command in ("inspect", "fold", "verify", "statistics", "doctor")
    ]
    text = on_a_terminal([*commands, ["fold", "--help"]], tmp_path, width)
    assert "\x1b[31merror:" in text
    assert "\x1b[?25l" in text, "the spinner hides the cursor"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line for part in text.split("\n") for line in part.split("\r")]
    assert width == 20 or max(map(len, lines)) <= width, max(lines, key=len)
    shown = " ".join(re.sub("[│┃]", " ", text).split())
    assert width == 20 or [said for said in SAID if said not in shown] == []


def test_a_locale_without_utf_8(small_files):
    environment = {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "bnexport", "inspect", small_files / "kept.onnx"],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    assert b"MMCVSyncBatchNorm" in done.stdout and b"\\u" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_without_a_command_help_is_on_stderr(call):
    _, out, err = call(code=2)
    assert out == "" and "Exit codes" in err
    for command in COMMANDS:
        assert f"\n  {command} " in err
    assert "..." not in err.partition("Commands:")[2], "a description is too long for one line"


def test_names_from_a_file_do_not_steer_the_terminal(tmp_path, call):
    made = model("g (float[2] x) => (float[2] y) { y = Relu (x) }", opset=18)
    made.graph.input[0].name = made.graph.node[0].input[0] = "[red]x[/red]\x1b]0;title\x07"
    onnx.save(made, tmp_path / "m.onnx")
    for command, *more in (["inspect"], ["run"], ["run", "-i", "y:1"]):
        _, out, err = call(command, tmp_path / "m.onnx", *more)
        assert "\x1b" not in out + err and "\x07" not in out + err
        assert (command, *more) == ("run",) or "[red]x[/red]\ufffd]0;title\ufffd" in out + err


def test_numbers_that_json_has_not(folder, call):
    _, out, _ = call("run", folder / "kept.onnx", "-i", "x:0,1,8,8", "--json", "-", code=0)
    assert strict(out)["outputs"][0]["max"] is None


ORDER = sorted(PLACES, key=PLACES.__getitem__)


def test_commands_are_listed_in_the_order_of_the_work(call):
    _, text, _ = call("--help", code=0)
    assert re.findall(r"^  ([a-z-]+)  +[A-Z]", text.partition("Commands:")[2], re.MULTILINE) == list(ORDER)
    assert "141 closed pipe" in " ".join(text.split())


@pytest.mark.parametrize("command", ORDER)
def test_help_of_a_command(command, call, monkeypatch):
    """Options have one name in all commands."""
    monkeypatch.setenv("COLUMNS", "80")
    _, text, err = call(command, "--help", code=0)
    assert max(map(len, text.splitlines())) <= 80
    assert err == "" and "<path>" not in text and "{" not in text.partition("Options:")[0]
    examples = re.sub(r" \\\n +", " ", text.partition("Examples:\n")[2].partition("\n\n")[0])
    assert [line.strip() for line in examples.splitlines()] == list(EXAMPLES[command])
    options = ["Exit codes: 0 ok", "--json PATH|-", "-q, --quiet", "-v, --verbose", "-h, --help"]
    options += ["--atol FLOAT", "--rtol FLOAT"] * (command in ("fold", "verify"))
    if command in ("recalibrate", "statistics"):
        options += ["-i, --input NAME:FILE.npy|FOLDER"]
    elif command not in ("doctor", "inspect"):
        options += ["--seed INT"]
        assert re.search(r"-i, --input NAME:\d+,3,224,224\|NAME:FILE.npy", " ".join(text.split()))
    assert [option for option in options if option not in text] == []


@pytest.mark.parametrize("example", [each for examples in EXAMPLES.values() for each in examples])
def test_examples_parse(example):
    name, *arguments = shlex.split(example)[1:]
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, arguments)  # raises for an option that is none


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, tmp_path):
    """One command installs it; the shell then asks, and gets the commands that begin so."""
    environment = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "PATH": "/usr/bin:/bin"}
    words = {"COMP_WORDS": "bnexport tr", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "bnexport tr"}
    words |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_BNEXPORT_COMPLETE": f"complete_{shell}"}
    asked = warm.run("-m", "bnexport", env={**environment, **words})
    assert "train-export" in asked.stdout and "inspect" not in asked.stdout
    done = warm.run("-m", "bnexport", "--install-completion", shell, env=environment)
    assert done.returncode == 0, done.stderr
    installed = [path for path in Path(tmp_path).rglob("*") if path.is_file() and "bnexport" in path.read_text()]
    assert installed, done.stdout
