"""`lit-diffusion doctor`: what would go wrong with a run, before it is started.

The examination is made in a process of its own. Whatever happens to that, an instruction that the
processor lacks, a driver that hangs, ends up as a finding.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from lit_diffusion.commands.options import Parser
from lit_diffusion.doctor.ranks import check_launch, is_first_process
from lit_diffusion.doctor.report import Finding, Level, has_problem, problem, report

PATIENCE = 300.0
"""Seconds without a finding after which the examination is given up."""

_DESCRIPTION = """Say what would go wrong with a long run, before it is started.

    lit-diffusion doctor
    lit-diffusion doctor configs/digits.yaml
    lit-diffusion doctor --config configs/digits.yaml --config configs/arms/NAME.yaml \\
        --trainer.max_steps=1000

Without a config, this machine: versions, devices, weights of FID, SLURM's variables, disk. With
one, and with all options that fit takes, also the run that fit would make: nothing is written and
nothing kept; a few samples and training steps are timed.

A line is a problem (exit code 2), a warning, a note, or OK."""


def parser() -> Parser:
    """What the help tells; the options themselves are those of fit."""
    made = Parser("doctor", _DESCRIPTION)
    made.add_argument("config", nargs="*", metavar="CONFIG", help="as --config CONFIG")
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: "doctor", then configs and options of fit.

    Raises:
        SystemExit: with 2 where there is a problem.
    """
    options = as_options_of_fit(argv[1:])
    if {"-h", "--help"} & set(options):
        parser().print_help()
        return
    if not is_first_process(os.environ):
        return
    findings = list(supervised(options, PATIENCE))
    print(report(findings))
    if has_problem(findings):
        raise SystemExit(2)


def as_options_of_fit(arguments: Sequence[str]) -> list[str]:
    """Bare names of files become --config FILE.

    Example:
        >>> as_options_of_fit(["a.yaml", "--trainer.max_steps", "3", "--trust=mine", "b.yaml"])
        ['--config', 'a.yaml', '--trainer.max_steps', '3', '--trust=mine', '--config', 'b.yaml']
    """
    options: list[str] = []
    wants_value = False
    for argument in arguments:
        if wants_value or argument.startswith("-"):
            options.append(argument)
            wants_value = not wants_value and "=" not in argument
        else:
            options += ["--config", argument]
    return options


def examine(options: Sequence[str]) -> Iterator[Finding]:
    """All findings.

    Args:
        options: of fit; none examines the machine alone.
    """
    from lit_diffusion.doctor.machine import check_machine, look

    found = check_machine(look(Path.cwd()))
    if not options:
        yield from found
        yield from check_launch(None, os.environ)
        return
    yield from (finding for finding in found if finding.level >= Level.WARNING)
    from lit_diffusion.doctor.run import examine_run

    yield from examine_run(options)


# The process that examines


def supervised(options: Sequence[str], patience: float) -> Iterator[Finding]:
    """The findings of `examine` in a process of its own, and what became of that.

    Args:
        options: of fit.
        patience: seconds without a finding after which it is given up.

    Raises:
        SystemExit: where the examination ends with one, as after --print_config.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        process = context.Process(target=_examine_there, args=(list(options), theirs, errors))
        process.start()
        theirs.close()
        try:
            yield from _received(ours, patience)
            process.join(patience)
            if process.exitcode != 0:
                yield problem("doctor", _death(process.exitcode, errors))
        except _GivenUp as error:
            yield problem("doctor", str(error))
        finally:
            process.kill()
            process.join()


class _GivenUp(Exception):
    """Raised where the examination has been silent for too long."""


def _received(connection: Connection, patience: float) -> Iterator[Finding]:
    last = "the start"
    while True:
        if not connection.poll(patience):
            raise _GivenUp(
                f"gave up: nothing came for {patience:.0f} s after {last}; a file system or driver "
                "may hang."
            )
        try:
            message = connection.recv()
        except EOFError:
            return
        if isinstance(message, int):
            raise SystemExit(message)
        last = f"'{message.topic}'"
        yield message


def _death(code: int | None, errors: Path) -> str:
    """Why the process that examines ended before it was done."""
    text = errors.read_text(errors="replace") if errors.exists() else ""
    said = [line for line in text.splitlines() if line.strip()]
    last = f" ({said[-1].strip()[:200]})" if said else ""
    if code is None:
        return "the examination does not end."
    if code == -signal.SIGILL:
        return (
            "a measurement died of an illegal instruction, as bf16 does on some virtual machines; "
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16."
        )
    if code < 0:
        return f"the examination died of {signal.Signals(-code).name}, as the run may{last}."
    return f"the examination failed{last}; please report it."


def _examine_there(options: list[str], connection: Connection, errors: Path) -> None:
    """In the other process: send findings as they are made."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that waits
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), sys.stderr.fileno())
    try:
        for finding in examine(options):
            connection.send(finding)
    except SystemExit as end:
        sys.stdout.flush()
        connection.send(end.code if isinstance(end.code, int) else int(end.code is not None))
    finally:
        connection.close()
