"""What holds for every command: what goes where, JSON, -q, -v, NO_COLOR, exit codes."""

import json
import os
import re
import shlex
import subprocess
import sys

import onnx
import pytest
import torch

from bnexport.cli import main
from bnexport.cli.application import app
from models.resnet import ResNet
from tests.cli.conftest import smallest
from tests.support.terminal import on_terminal


def tiny():
    torch.manual_seed(0)
    print("a factory may print what it likes")
    return ResNet(in_channels=1, widths=(4,), blocks=1)


def chatty():
    print("a factory may print what it likes")
    return smallest()


# Arguments of a call that succeeds, its messages, and a key of its JSON.
CALLS = {
    "doctor": ([], [], "checks"),
    "inspect": (["{folder}/kept.onnx"], [], "batch_norms"),
    "fold": (["{folder}/kept.onnx", "{new}/f.onnx"], ["3 of 3 batch norms folded", "verification passed"], "sites"),
    "recalibrate": (["{folder}/kept.onnx", "{new}/r.onnx", "-i", "x:{folder}/x.npy"],
        ["3 batch norms re-estimated on 8 rows", "r.onnx written"], "layers"),
    "statistics": (["{folder}/kept.onnx", "-i", "x:{folder}/x.npy"], ["3 batch norms measured on 8 rows"], "layers"),
    "inline": (["{folder}/kept.onnx", "{new}/i.onnx"],
        ["3 sync batch norms in inference converted", "verification passed"], "calls"),
    "verify": (["{folder}/kept.onnx", "{folder}/kept.onnx"], ["verification passed"], "outputs"),
    "run": (["{folder}/kept.onnx", "-i", "x:1,1,8,8", "-o", "{new}/o.npz"], ["o.npz written"], "outputs"),
    "export": (["tests.cli.test_cli_contract:tiny", "{new}/e.onnx", "-i", "x:2,1,8,8"],
        ["e.onnx written", "verification passed"], "report"),
}  # fmt: skip
CALLS["train-export"] = (
    ["tests.cli.test_cli_contract:chatty", "{new}/s.onnx", "-i", "x:4,1,8,8"],
    ["s.onnx", "verification passed"],
    "inputs",
)
COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)


@pytest.fixture
def folder(small_files):
    return small_files


def arguments_of(command, folder, new):
    return [command, *(text.format(folder=folder, new=new) for text in CALLS[command][0])]


def call(arguments, capfd):
    capfd.readouterr()
    code = main([str(argument) for argument in arguments])
    return code, *capfd.readouterr()


def strict(text):
    """JSON as other languages read it."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_command_is_covered():
    assert set(COMMANDS) == set(CALLS)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_alone_is_on_stdout(command, folder, tmp_path, capfd):
    code, out, err = call([*arguments_of(command, folder, tmp_path), "--json", "-"], capfd)
    assert code == 0, err
    data = strict(out)
    assert data["schema_version"] == 1
    assert CALLS[command][2] in data
    for message in CALLS[command][1]:
        assert message in err


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_are_on_stdout_and_messages_on_stderr(command, folder, tmp_path, capfd):
    code, out, err = call(arguments_of(command, folder, tmp_path), capfd)
    assert code == 0, err
    assert out.count("\n") >= 3
    for message in CALLS[command][1]:
        assert message in err
        assert message not in out
    assert "\x1b" not in out + err


@pytest.mark.parametrize("command", COMMANDS)
def test_quiet_prints_nothing_but_the_json_asked_for(command, folder, tmp_path, capfd):
    target = tmp_path / "result.json"
    code, out, err = call([*arguments_of(command, folder, tmp_path), "-q", "--json", target], capfd)
    printed_by_the_factory = "a factory may print what it likes\n" if "export" in command else ""
    assert (code, out, err) == (0, "", printed_by_the_factory)
    assert strict(target.read_text())["schema_version"] == 1
    again = ["--overwrite"] if command in ("export", "fold", "inline", "recalibrate", "train-export") else []
    code, out, err = call([*arguments_of(command, folder, tmp_path), "--quiet", "--json", "-", *again], capfd)
    assert (code, err) == (0, printed_by_the_factory)
    assert strict(out).keys() == strict(target.read_text()).keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_are_one_line_even_when_quiet_and_verbose_says_where(command, capfd):
    code, out, err = call([command, "--json", "/nowhere/at/all.json", *FIRST[command], "-q"], capfd)
    assert (code, out) == (2, "")
    assert err.startswith("error: --json: ") and err.count("\n") == 1
    code, out, err = call([command, "--json", "/nowhere/at/all.json", *FIRST[command], "-v"], capfd)
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: --json: ")


# The arguments that a command cannot do without.
FIRST = {
    "doctor": [],
    "inspect": ["a.onnx"],
    "fold": ["a.onnx", "b.onnx"],
    "recalibrate": ["a.onnx", "b.onnx", "-i", "x:x.npy"],
    "statistics": ["a.onnx", "-i", "x:x.npy"],
    "inline": ["a.onnx", "b.onnx"],
    "verify": ["a.onnx", "b.onnx"],
    "run": ["a.onnx"],
    "export": ["a:b", "c.onnx", "--input", "x:1"],
    "train-export": ["a:b", "c.onnx", "--input", "x:1"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_have_one_name(command, capfd):
    code, out, err = call([command, "--help"], capfd)
    assert (code, err) == (0, "")
    for option in ("--json PATH|-", "-q, --quiet", "-v, --verbose", "-h, --help"):
        assert option in out
    if command not in ("doctor", "inspect", "recalibrate", "statistics"):
        assert "--seed INT" in out
    if command in ("recalibrate", "statistics"):
        assert "-i, --input NAME:FILE.npy|FOLDER" in out
    elif command not in ("doctor", "inspect"):
        assert re.search(r"-i, --input NAME:\d+,3,224,224\|NAME:FILE.npy", out)
    if command in ("fold", "verify"):
        assert "--atol FLOAT" in out and "--rtol FLOAT" in out
    assert max(map(len, out.splitlines())) <= 110


def test_quiet_and_verbose_exclude_each_other(capfd):
    code, out, err = call(["doctor", "-q", "-v"], capfd)
    assert (code, out) == (2, "")
    assert "expected one of them at most" in err


def test_verbose_says_more(folder, capfd):
    quiet, loud = (
        call(["verify", folder / "kept.onnx", folder / "kept.onnx", *more], capfd)[2] for more in ([], ["-v"])
    )
    assert loud.startswith(quiet) and "verified with 11 sets of inputs, seed 0" in loud


ON_A_TERMINAL = """
import sys
from bnexport.cli import main
for line in sys.stdin.read().splitlines():
    assert main(line.split("\\t")) == 0, line
main(["inspect", "missing.onnx"])
main(["--help"])
"""


def on_a_terminal(calls, **environment):
    """What a terminal receives on stdout and stderr."""
    lines = "\n".join("\t".join(map(str, call)) for call in calls)
    return on_terminal(
        ON_A_TERMINAL, lines, env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
    )


def test_no_color_means_no_escape_sequence(folder, tmp_path):
    text = on_a_terminal([arguments_of(command, folder, tmp_path) for command in COMMANDS], NO_COLOR="1")
    assert "verification passed" in text and "error: " in text
    assert "\x1b" not in text


def test_a_terminal_gets_colours_and_a_spinner(folder, tmp_path):
    text = on_a_terminal([arguments_of("verify", folder, tmp_path), ["doctor"]], NO_COLOR="")
    assert "\x1b[31merror:" in text
    assert "\x1b[?25l" in text, "the spinner hides the cursor"


def test_nothing_heavy_is_imported_for_help():
    script = "import sys; from bnexport.cli import main; main(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(eval(done.stderr))
    assert not loaded & {"torch", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "rich.markdown"}


def test_without_a_command_help_is_on_stderr(capfd):
    code, out, err = call([], capfd)
    assert (code, out) == (2, "")
    for command in COMMANDS:
        assert f"\n  {command} " in err
    assert "..." not in err.partition("Commands:")[2], "a description is too long for one line"
    assert "Exit codes" in err


def test_names_from_a_file_do_not_steer_the_terminal(tmp_path, capfd):
    helper = onnx.helper
    name = "[red]x[/red]\x1b]0;title\x07"
    value = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (2,))
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (2,))
    graph = helper.make_graph([helper.make_node("Relu", [name], ["y"])], "g", [value], [output])
    opset = helper.make_opsetid("", 18)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / "m.onnx")
    for arguments in (["inspect"], ["run"], ["run", "-i", "y:1"]):
        _, out, err = call([arguments[0], tmp_path / "m.onnx", *arguments[1:]], capfd)
        assert "\x1b" not in out + err and "\x07" not in out + err
        if arguments != ["run"]:
            assert "[red]x[/red]\ufffd]0;title\ufffd" in out + err


def test_numbers_that_json_has_not(folder, capfd):
    code, out, _ = call(["run", folder / "kept.onnx", "-i", "x:0,1,8,8", "--json", "-"], capfd)
    assert code == 0
    assert strict(out)["outputs"][0]["max"] is None


def test_a_reader_that_leaves_is_no_error(folder):
    command = f"{sys.executable} -m bnexport inspect {shlex.quote(str(folder / 'kept.onnx'))} --json - | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")
