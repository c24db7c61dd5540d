"""`lit-diffusion doctor`: what would go wrong with a run, before it is started."""

import os
from collections.abc import Sequence

from lit_diffusion.cli.doctor.ranks import is_first_process
from lit_diffusion.cli.doctor.report import has_problem, report
from lit_diffusion.cli.doctor.supervised import supervised
from lit_diffusion.cli.options import Parser

_DESCRIPTION = """Say what would go wrong with a long run, before it is started.

    lit-diffusion doctor
    lit-diffusion doctor configs/digits.yaml
    lit-diffusion doctor --config configs/digits.yaml --config configs/arms/NAME.yaml \\
        --trainer.max_steps=1000

Without a config, this machine: versions, devices, weights of FID, SLURM's variables, disk. With
one, and with all options that fit takes, also the run that fit would make: nothing is written and
nothing kept; a few samples and training steps are timed.

A line is a problem (exit code 2), a warning, a note, or OK."""


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: "doctor", then configs and options of fit.

    Raises:
        SystemExit: with 2 where there is a problem.
    """
    options = as_options_of_fit(argv[1:])
    if {"-h", "--help"} & set(options):
        parser = Parser("doctor", _DESCRIPTION)
        parser.add_argument("config", nargs="*", metavar="CONFIG", help="as --config CONFIG")
        parser.print_help()
    elif is_first_process(os.environ):
        findings = list(supervised(options))
        print(report(findings))
        if has_problem(findings):
            raise SystemExit(2)


def as_options_of_fit(arguments: Sequence[str]) -> list[str]:
    """Bare names of files become --config FILE: `a.yaml --trainer.max_steps 3` has one."""
    options: list[str] = []
    wants_value = False
    for argument in arguments:
        if wants_value or argument.startswith("-"):
            options.append(argument)
            wants_value = not wants_value and "=" not in argument
        else:
            options += ["--config", argument]
    return options
