"""The examination in a process of its own, so that whatever happens to it becomes a finding.

An instruction that the processor lacks, a driver that hangs: such end the other process, not this.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from lit_diffusion.cli.doctor.report import Finding, problem


def supervised(options: Sequence[str], patience: float = 300.0) -> Iterator[Finding]:
    """The findings of `examine` in a process of its own, and what became of that.

    It is given up after `patience` seconds without a finding.

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
            last = "the start"
            while ours.poll(patience):
                try:
                    message = ours.recv()
                except EOFError:
                    break
                if isinstance(message, int):
                    raise SystemExit(message)
                last = f"'{message.topic}'"
                yield message
            else:
                text = f"gave up: nothing came for {patience:.0f} s after {last}; a file system or "
                yield problem("doctor", f"{text}driver may hang.")
                return
            process.join(patience)
            if process.exitcode != 0:
                yield problem("doctor", _death(process.exitcode, errors))
        finally:
            process.kill()
            process.join()


def _death(code: int | None, errors: Path) -> str:
    text = errors.read_text(errors="replace") if errors.exists() else ""
    said = [line for line in text.splitlines() if line.strip()]
    last = f" ({said[-1].strip()[:200]})" if said else ""
    if code is None:
        return "the examination does not end."
    if code == -signal.SIGILL:
        text = "a measurement died of an illegal instruction, as bf16 does on some virtual "
        return f"{text}machines; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16."
    if code < 0:
        return f"the examination died of {signal.Signals(-code).name}, as the run may{last}."
    return f"the examination failed{last}; please report it."


def _examine_there(options: list[str], connection: Connection, errors: Path) -> None:
    """In the other process: send findings as they are made."""
    from lit_diffusion.cli.doctor.examination import examine

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that waits
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), sys.stderr.fileno())
    try:
        for finding in examine(options):
            connection.send(finding)
    except SystemExit as end:
        sys.stdout.flush()
        connection.send(end.code if isinstance(end.code, int) else int(end.code is not None))
