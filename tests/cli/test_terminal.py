"""Colors and a progress bar in a terminal, plain text elsewhere."""

import io
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support.commands import call
from support.tiny_run import tiny_config, write_config

from lit_diffusion.cli.terminal import RED, paint, paint_help

TESTS = str(Path(__file__).parents[1])
FIT = "fit --config tiny.yaml --trust support --trainer.max_steps=3"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_only_terminals_have_color(monkeypatch):
    assert paint("a", RED, Terminal()) == "\033[1;31ma\033[0m"
    assert paint("a", RED, io.StringIO()) == "a"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert paint("a", RED, Terminal()) == "a"


def test_headings_and_options_of_a_help_page_have_color():
    page = "usage: x [options]\n\nText: not a heading\n\noptions:\n  -n, --num N  number\n"
    bold, cyan, end = "\033[1m", "\033[36m", "\033[0m"
    assert paint_help(page, io.StringIO()) == page
    assert paint_help(page, Terminal()).splitlines() == [
        f"{bold}usage:{end} x [options]",
        "",
        "Text: not a heading",
        "",
        f"{bold}options:{end}",
        f"  {cyan}-n, --num{end} N  number",
    ]


def run_in_terminal(command: str, **environment: str) -> str:
    """Output of `lit-diffusion <command>`, whose stdout and stderr are a terminal."""
    code = f"import sys; from lit_diffusion.cli.main import main; sys.exit(main({command.split()}))"
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))
    settings = os.environ | {"PYTHONPATH": TESTS} | environment
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, env=settings
    )
    os.close(child)
    output = b""
    try:
        while part := os.read(parent, 65536):
            output += part
    except OSError:  # the terminal has closed
        pass
    os.close(parent)
    assert process.wait() == 0, output.decode()
    return output.decode()


@pytest.mark.slow
def test_a_fit_has_a_colored_bar_in_a_terminal_and_plain_lines_in_a_file(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config())
    bar = run_in_terminal(f"{FIT} --trainer.default_root_dir=bar")
    assert "3/3" in bar
    assert "\033[36m" in bar
    assert "\033[1mrun folder" in bar
    plain = run_in_terminal(f"{FIT} --trainer.default_root_dir=plain", NO_COLOR="1")
    assert "3/3" in plain
    assert "\033[36m" not in plain
    assert "\033[1m" not in plain
    assert call(f"{FIT} --trainer.default_root_dir=log") == 0
    log = "".join(capsys.readouterr())
    assert "step 3/3" in log
    assert "\033" not in log
    assert "\r" not in log
