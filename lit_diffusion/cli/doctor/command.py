"""`lit-diffusion doctor`: check a config for problems before a run."""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from itertools import takewhile

from lit_diffusion.cli.options import Parser, import_heavy
from lit_diffusion.cli.terminal import GREEN, RED, YELLOW, paint

_DESCRIPTION = """Check a config for problems before a long run.

    lit-diffusion doctor configs/digits.yaml --trainer.max_steps=1000

Pass the configs and options of fit. The command times a few training steps and samples.
It downloads nothing, and writes nothing into the run folder.

Each line of the report is a problem, a warning, a note, or OK. The exit code is 2 if there is a
problem."""


def run(argv: Sequence[str]) -> None:
    """Run the command: "doctor", then configs and options of fit."""
    configs = list(takewhile(lambda argument: not argument.startswith("-"), argv[1:]))
    options = [part for config in configs for part in ("--config", config)]
    options += argv[1 + len(configs) :]
    if {"-h", "--help"} & set(options):
        parser = Parser("doctor", _DESCRIPTION)
        parser.add_argument("config", nargs="*", metavar="CONFIG", help="same as --config CONFIG")
        parser.print_help()
        return
    ranks = [os.environ.get(name, "0") for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK")]
    if any(rank != "0" for rank in ranks):
        return  # only the first of several processes reports
    with import_heavy():
        from lit_diffusion.cli.doctor.checks import Level, examine, report

    logging.disable(logging.WARNING)  # fit shows these messages again
    try:
        with warnings.catch_warnings(action="ignore"):
            findings = list(examine(options))
    finally:
        logging.disable(logging.NOTSET)
    styles = {"problem": RED, "warning": YELLOW, "OK": GREEN}
    for line in report(findings).splitlines():
        level = line.partition(" ")[0]
        if level in styles:
            line = paint(level, styles[level], sys.stdout) + line[len(level) :]
        print(line)
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise SystemExit(2)
