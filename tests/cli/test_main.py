import linecache
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.commands import call

from lit_diffusion.cli import main as cli
from lit_diffusion.signals import InterruptedBySignal

LIGHT_MISTAKES = {
    "fit": "needs --config FILE",
    "fit --config nowhere.yaml": "no file nowhere.yaml",
    "fit --config part.yaml": "part.yaml names no model",
    "fit --config whole.yaml": "runs/whole already holds a run",
    "fit --config whole.yaml --ckpt_path=last": "no file runs/whole/checkpoints/last.ckpt",
    "fit --config whole.yaml --max_steps=1": "Did you mean 'trainer.max_steps'",
    "test --config whole.yaml": "needs --ckpt_path FILE",
}
"""Command lines that are judged at once -> part of the message."""


@pytest.fixture
def stub(monkeypatch):
    """A command `stub` whose function the test gives."""

    def register(function):
        monkeypatch.setitem(cli.COMMANDS, "stub", ("stub_command", "for this test"))
        monkeypatch.setitem(
            sys.modules, "lit_diffusion.stub_command", SimpleNamespace(run=function)
        )

    return register


def raising(error: Exception, module: str = "lit_diffusion.somewhere"):
    """A function, as of some module, that raises on purpose."""
    source = "def function(argv):\n    raise error\n"
    scope = {"error": error, "__name__": module}
    linecache.cache["<raising>"] = (len(source), None, source.splitlines(True), "<raising>")
    exec(compile(source, "<raising>", "exec"), scope)
    return scope["function"]


def test_no_command_or_an_unknown_one_is_a_mistake_that_names_them(capsys):
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)
    for wrong, command in (("smaple", "sample"), ("ft", "fit"), ("train", "fit")):
        assert call(wrong) == 2
        error = capsys.readouterr().err
        assert f"there is no command '{wrong}'. Did you mean '{command}'?" in error


def test_the_help_of_fit_fits_one_screen_and_says_where_the_rest_is(capsys):
    assert call("fit --help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("  --help all ")


def test_help_and_mistakes_of_the_command_line_import_neither_torch_nor_lightning(tmp_path):
    (tmp_path / "whole.yaml").write_text("model: Nothing")
    (tmp_path / "part.yaml").write_text("data: Digits")
    (tmp_path / "runs/whole").mkdir(parents=True)
    (tmp_path / "runs/whole/metrics.csv").write_text("step\n0\n")
    script = f"""if True:
        import sys
        from lit_diffusion.cli.main import COMMANDS, main
        mistakes = {[command.split() for command in LIGHT_MISTAKES]}
        for code, command in [*((0, [n, "--help"]) for n in COMMANDS), *((2, m) for m in mistakes)]:
            assert main(command) == code, command
            heavy = {{"torch", "lightning", "numpy"}} & set(sys.modules)
            assert not heavy, (command, heavy)
        """
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all(f"lit-diffusion {name}" in done.stdout for name in cli.COMMANDS)
    for line, message in zip(done.stderr.splitlines(), LIGHT_MISTAKES.values(), strict=True):
        assert message in line


@pytest.mark.slow
def test_sample_imports_what_it_needs_and_no_garbage_is_collected_meanwhile(tmp_path):
    (tmp_path / "damaged.ckpt").touch()
    script = """if True:
        import gc, sys
        from lit_diffusion.cli.main import main
        collections = []
        gc.callbacks.append(lambda phase, info: collections.append(phase))
        assert main(["sample", "--checkpoint", "damaged.ckpt", "--out", "out"]) == 2
        assert "lightning" in sys.modules
        unneeded = {"diffusers", "sklearn", "tensorboard", "lit_diffusion.cli.fitting"}
        unneeded |= {"lit_diffusion.cli.solver_comparison", "lit_diffusion.cli.evaluating"}
        assert not unneeded & set(sys.modules), unneeded & set(sys.modules)
        assert len(collections) < 100, len(collections)  # 2,000 if they are not put off
        assert gc.isenabled()
        assert gc.get_freeze_count() > 100_000
        """
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("steps must be > 0, got 0."), 2),
        (FileNotFoundError("There is no checkpoint at x."), 2),
        (ArithmeticError("sample 3 is not finite."), 1),
    ],
)
def test_an_error_raised_on_purpose_is_printed_without_a_traceback(stub, capsys, error, code):
    stub(raising(error))
    assert cli.main(["stub"]) == code
    assert capsys.readouterr().err == f"lit-diffusion stub: {error}\n"


def test_debugging_shows_the_traceback_too(stub, capsys):
    stub(raising(ValueError("no.")))
    assert cli.main(["stub", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "function",
    [lambda argv: {}["key"], raising(ValueError("in a library"), module="numpy.somewhere")],
)
def test_what_nobody_raised_on_purpose_keeps_its_traceback(stub, capsys, function):
    stub(function)
    assert cli.main(["stub"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (InterruptedBySignal(signal.SIGTERM), 143)]
)
def test_a_command_that_a_signal_ends_has_the_code_of_the_signal(stub, error, code):
    stub(raising(error))
    assert cli.main(["stub"]) == code
