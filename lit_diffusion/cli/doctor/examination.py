"""All findings of the doctor, on this machine and on a run, and their report."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
from lit_diffusion.cli.run_folder import read_command_line
from lit_diffusion.config.trust import allow_class_paths


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
