"""`lit-diffusion doctor`: what would go wrong with a run, before it is started."""

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path

from lit_diffusion.cli.doctor.checks import (
    CHECKS,
    Finding,
    Level,
    check_machine,
    check_ranks,
    problem,
)
from lit_diffusion.cli.doctor.run import ExaminedRun, FitOnOneProcess, describe_error
from lit_diffusion.cli.options import Parser
from lit_diffusion.cli.run_folder import read_command_line
from lit_diffusion.config.trust import allow_class_paths

_DESCRIPTION = """Report what would go wrong with a long run, before it is started.

    lit-diffusion doctor
    lit-diffusion doctor configs/digits.yaml --trainer.max_steps=1000

Without a config: this machine. With configs and options of fit: the run that fit would start, whose
first steps and samples are timed. Nothing is downloaded, nor written into the run folder.

Each line is a problem (exit code 2), a warning, a note, or OK."""


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: "doctor", then configs and options of fit.

    Raises:
        SystemExit: with 2 where there is a problem.
    """
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
        return  # one process of several reports
    logging.disable(logging.WARNING)  # fit shows these messages again
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            findings = list(examine(options))
    finally:
        logging.disable(logging.NOTSET)
    print(report(findings))
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise SystemExit(2)


def examine(options: Sequence[str], seconds: float = 5.0) -> Iterator[Finding]:
    """Findings on this machine, and on the run of `fit` with these options if there are any.

    Args:
        options: of `fit`.
        seconds: that each measurement of time may take.
    """
    least = Level.WARNING if options else Level.OK
    yield from (finding for finding in check_machine(Path.cwd()) if finding.level >= least)
    if not options:
        ranks = int(os.environ.get("SLURM_NTASKS", "1"))
        yield from check_ranks(ranks, 1, os.environ) if "SLURM_JOB_ID" in os.environ else ()
        return
    with ExitStack() as contexts:
        try:
            request = read_command_line(["fit", *options])
            contexts.enter_context(allow_class_paths(request.trust))
            folder = contexts.enter_context(tempfile.TemporaryDirectory())
            cli = FitOnOneProcess(request, contexts, folder)
        except Exception as error:  # constructors may raise anything
            yield problem("config", describe_error(error))
            return
        examined = ExaminedRun(cli, seconds)
        yield from check_ranks(cli.num_devices, cli.num_nodes, os.environ)
        for check in CHECKS:
            try:
                yield from check(examined)
            except (
                Exception
            ) as error:  # callbacks and modules of other packages have any attributes
                yield problem(check.__name__, describe_error(error))


def report(findings: Sequence[Finding]) -> str:
    """A line for each finding, the most serious first, and one on all of them.

    Example:
        >>> print(report([Finding(Level.OK, "data", "here"), problem("disk", "full.")]))
        problem  disk  full.
        OK       data  here
        <BLANKLINE>
        1 problem(s), 0 warning(s): the run would fail or be wasted.
    """
    ordered = sorted(findings, key=lambda finding: -finding.level)
    width = max((len(finding.topic) for finding in ordered), default=0)
    lines = []
    for finding in ordered:
        level = "OK" if finding.level is Level.OK else finding.level.name.lower()
        lines.append(f"{level:<7}  {finding.topic:<{width}}  {' '.join(finding.text.split())}")
    levels = [finding.level for finding in ordered]
    problems, num_warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    verdict = f"{problems} problem(s), {num_warnings} warning(s)"
    if problems:
        verdict += ": the run would fail or be wasted."
    return "\n".join([*lines, "", verdict])
