"""Whether the processes that a launcher starts are those that the Trainer waits for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lit_diffusion.cli.doctor.report import Finding, count, note, ok, problem, warning

UNDETECTED = ("bash", "interactive")
"""Names of SLURM jobs in which Lightning looks for no other processes."""


@dataclass(frozen=True)
class Ranks:
    """Processes that a config asks for, of devices on each node; None is for the Trainer to say."""

    devices: int | None
    num_nodes: int


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None


def is_first_process(environ: Mapping[str, str]) -> bool:
    """Whether this is the only process, or the one of several that should speak."""
    ranks = [_number(environ, name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK")]
    return all(rank in (None, 0) for rank in ranks)


def check_launch(ranks: Ranks | None, environ: Mapping[str, str]) -> list[Finding]:
    """Compare the ranks of a config, None without one, with the launcher, if there is one."""
    # Lightning asks in this order too: torchrun may well run inside of a SLURM job.
    world_size, per_node = (_number(environ, n) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "TORCHELASTIC_RUN_ID" in environ and world_size and per_node:
        return [check_torchrun(ranks, world_size, per_node)]
    if {"SLURM_JOB_ID", "SLURM_NTASKS"} & environ.keys():
        return check_slurm(ranks, environ)
    if ranks is None or ranks.num_nodes < 2 or "MASTER_ADDR" in environ:
        return []
    text = f"num_nodes={ranks.num_nodes}, and nothing here starts processes on the others; start"
    return [warning("nodes", f"{text} fit with srun in a SLURM job, or with torchrun.")]


def check_torchrun(ranks: Ranks | None, world_size: int, per_node: int) -> Finding:
    """Compare with torchrun, whose variables say how many processes there are and on a node."""
    told = f"{count(world_size, 'process')}, {per_node} on a node"
    if ranks is None or ranks.devices is None:
        return ok("torchrun", told)
    if ranks.devices * ranks.num_nodes == world_size and per_node == ranks.devices:
        return ok("torchrun", f"{told}, as the config asks for")
    fix = f"set --trainer.devices={per_node} --trainer.num_nodes={world_size // per_node}"
    asked = f"{ranks.devices} x {count(ranks.num_nodes, 'node')}"
    return problem("torchrun", f"{told}, but the config asks for {asked}; {fix}.")


def check_slurm(ranks: Ranks | None, environ: Mapping[str, str]) -> list[Finding]:
    """Compare with SLURM's job, of which the variables of this process tell."""
    names = ("NTASKS", "NTASKS_PER_NODE", "NNODES", "JOB_NUM_NODES")
    tasks, per_node, step_nodes, job_nodes = (_number(environ, f"SLURM_{name}") for name in names)
    job_name, nodes = environ.get("SLURM_JOB_NAME"), step_nodes or job_nodes
    if job_name in UNDETECTED or tasks is None:
        return [_check_undetected(ranks, job_name, tasks)]
    found = [problem("SLURM", text) for text in _misfits(ranks, tasks, per_node, nodes)]
    if step_nodes and job_nodes and step_nodes < job_nodes:
        found.append(warning("SLURM", f"the step has {step_nodes} of the {job_nodes} nodes."))
    told = f"{count(tasks, 'task')} on {count(step_nodes or 1, 'node')}"
    if not found and tasks > 1 and "SLURM_STEP_ID" not in environ:
        text = f"{told}: start fit with srun, or it waits for {tasks - 1} others that never come."
        return [note("SLURM", text)]
    return found or [ok("SLURM", told)]


def _check_undetected(ranks: Ranks | None, job_name: str | None, tasks: int | None) -> Finding:
    why = f"the job is called {job_name}" if job_name in UNDETECTED else "SLURM_NTASKS is not set"
    told = f"{why}, so Lightning does not look at SLURM"
    if tasks and tasks > 1:
        text = f"{told}: each of the {tasks} tasks would train a run of its own into one folder"
        return problem("SLURM", f"{text}; give the job another name (--job-name).")
    if ranks is not None and ranks.num_nodes > 1:
        text = f"{told}, and num_nodes={ranks.num_nodes} would wait for the others for ever; submit"
        return problem("SLURM", f"{text} with --ntasks-per-node and another name, and use srun.")
    return note("SLURM", f"{told}, and starts the processes of this node itself.")


def _misfits(
    ranks: Ranks | None, tasks: int, per_node: int | None, nodes: int | None
) -> Iterator[str]:
    """Where tasks and ranks are not as many; most of it Lightning refuses too."""
    if tasks > 1 and per_node is None:
        text = f"--ntasks={tasks} without --ntasks-per-node, which Lightning refuses; submit with "
        yield f"{text}--ntasks-per-node={max(tasks // (nodes or 1), 1)}."
    if ranks is None or ranks.devices is None:
        return
    fits = True
    wanted = {"devices": (ranks.devices, per_node), "num_nodes": (ranks.num_nodes, nodes)}
    for name, (ours, theirs) in wanted.items():
        if theirs not in (None, ours):
            fits = False
            yield f"the job has {theirs}, trainer.{name}={ours}; set --trainer.{name}={theirs}."
    if fits and tasks != (world := ranks.devices * ranks.num_nodes):
        text = f"{count(tasks, 'task')}, but the run has {world} ranks: it would wait for the rest"
        yield f"{text}; submit with --ntasks-per-node={ranks.devices}."
