"""Help: examples that parse, commands in the order of the work, plain names, completion; nothing wider than the terminal."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from bnexport.cli.application import app
from bnexport.cli.common import EXAMPLES, PLACES
from tests.support import warm

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
    action = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    asked = warm.run(
        "-m", "bnexport", env={**environment, **words, **action, "_BNEXPORT_COMPLETE": f"complete_{shell}"}
    )
    assert "train-export" in asked.stdout and "inspect" not in asked.stdout
    done = warm.run("-m", "bnexport", "--install-completion", shell, env=environment)
    assert done.returncode == 0, done.stderr
    installed = [path for path in Path(tmp_path).rglob("*") if path.is_file() and "bnexport" in path.read_text()]
    assert installed, done.stdout
