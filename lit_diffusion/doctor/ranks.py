"""Whether the processes that a launcher starts are those that the Trainer waits for."""

from collections.abc import Mapping
from dataclasses import dataclass

from lit_diffusion.doctor.report import Finding, count, note, ok, problem, warning

UNDETECTED = ("bash", "interactive")
"""Names of SLURM jobs in which Lightning looks for no other processes."""


@dataclass(frozen=True)
class Ranks:
    """Processes that a config asks for.

    Attributes:
        devices: on each node; None where the Trainer decides.
        num_nodes: of the run.
    """

    devices: int | None
    num_nodes: int


@dataclass(frozen=True)
class Slurm:
    """What SLURM says in its variables; None for each that is not set.

    Attributes:
        job_name: SLURM_JOB_NAME.
        ntasks: SLURM_NTASKS.
        per_node: SLURM_NTASKS_PER_NODE.
        nodes: SLURM_NNODES, of the step.
        job_nodes: SLURM_JOB_NUM_NODES, of the whole job.
        in_step: whether srun started this process.
    """

    job_name: str | None = None
    ntasks: int | None = None
    per_node: int | None = None
    nodes: int | None = None
    job_nodes: int | None = None
    in_step: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Slurm | None":
        """From the environment of a process; None outside of a job."""
        if not ({"SLURM_JOB_ID", "SLURM_NTASKS"} & environ.keys()):
            return None
        return cls(
            job_name=environ.get("SLURM_JOB_NAME"),
            ntasks=_number(environ, "SLURM_NTASKS"),
            per_node=_number(environ, "SLURM_NTASKS_PER_NODE"),
            nodes=_number(environ, "SLURM_NNODES"),
            job_nodes=_number(environ, "SLURM_JOB_NUM_NODES"),
            in_step="SLURM_STEP_ID" in environ,
        )


@dataclass(frozen=True)
class Torchrun:
    """What torchrun says in its variables.

    Attributes:
        world_size: WORLD_SIZE.
        per_node: LOCAL_WORLD_SIZE; None where not set.
    """

    world_size: int
    per_node: int | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Torchrun | None":
        """From the environment of a process; None where torchrun did not start it."""
        world_size = _number(environ, "WORLD_SIZE")
        if "TORCHELASTIC_RUN_ID" not in environ or world_size is None:
            return None
        return cls(world_size, _number(environ, "LOCAL_WORLD_SIZE"))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None


def is_first_process(environ: Mapping[str, str]) -> bool:
    """Whether this is the only process, or the one of several that should speak.

    Example:
        >>> is_first_process({}), is_first_process({"SLURM_PROCID": "3"})
        (True, False)
    """
    ranks = [_number(environ, name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK")]
    return all(rank in (None, 0) for rank in ranks)


def check_launch(ranks: Ranks | None, environ: Mapping[str, str]) -> list[Finding]:
    """Compare with the launcher, if there is one.

    Args:
        ranks: of a config; None without one.
        environ: variables of this process.
    """
    # Lightning asks in this order too: torchrun may well run inside of a SLURM job.
    if torchrun := Torchrun.of(environ):
        return check_torchrun(ranks, torchrun)
    slurm = Slurm.of(environ)
    return _check_alone(ranks, environ) if slurm is None else check_slurm(ranks, slurm)


def _check_alone(ranks: Ranks | None, environ: Mapping[str, str]) -> list[Finding]:
    """Without a launcher."""
    if ranks is None or ranks.num_nodes < 2 or "MASTER_ADDR" in environ:
        return []
    text = f"num_nodes={ranks.num_nodes}, and nothing here starts processes on the others: fit "
    text += "would wait for them; start it with srun in a SLURM job, or with torchrun."
    return [warning("nodes", text)]


def check_torchrun(ranks: Ranks | None, torchrun: Torchrun) -> list[Finding]:
    """Compare with torchrun."""
    world, per_node = torchrun.world_size, torchrun.per_node
    told = count(world, "process")
    if per_node:
        told += f", {per_node} on a node"
    if ranks is None or ranks.devices is None:
        return [ok("torchrun", told)]
    wanted = ranks.devices * ranks.num_nodes
    if wanted != world or (per_node and per_node != ranks.devices):
        nodes = world // per_node if per_node else ranks.num_nodes
        fix = f"set --trainer.devices={per_node or world // nodes} --trainer.num_nodes={nodes}"
        return [problem("torchrun", f"{told}, but the config asks for {_told(ranks)}; {fix}.")]
    return [ok("torchrun", f"{told}, as the config asks for")]


def check_slurm(ranks: Ranks | None, slurm: Slurm) -> list[Finding]:
    """Compare with SLURM's job."""
    if slurm.job_name in UNDETECTED or slurm.ntasks is None:
        return [_check_undetected(ranks, slurm)]
    found = _refused_by_lightning(slurm)
    if ranks is not None and ranks.devices is not None:
        found += _check_counts(ranks.devices, ranks.num_nodes, slurm)
    if slurm.nodes and slurm.job_nodes and slurm.nodes < slurm.job_nodes:
        text = f"the step has {slurm.nodes} of the {slurm.job_nodes} nodes of the job"
        found.append(warning("SLURM", f"{text}; the others idle."))
    if found:
        return found
    told = f"{count(slurm.ntasks, 'task')} on {count(slurm.nodes or 1, 'node')}"
    if slurm.ntasks > 1 and not slurm.in_step:
        text = f"{told}: start fit with srun, or it waits for {slurm.ntasks - 1} others that "
        return [note("SLURM", f"{text}never come.")]
    return [ok("SLURM", told)]


def _check_undetected(ranks: Ranks | None, slurm: Slurm) -> Finding:
    """Where Lightning starts processes itself, on this node alone."""
    is_named = slurm.job_name in UNDETECTED
    why = f"the job is called {slurm.job_name}" if is_named else "SLURM_NTASKS is not set"
    told = f"{why}, so Lightning does not look at SLURM"
    if slurm.ntasks and slurm.ntasks > 1:
        return problem(
            "SLURM",
            f"{told}: each of the {slurm.ntasks} tasks that srun starts would train a run of its "
            "own into the same folder; give the job another name (--job-name).",
        )
    if ranks is not None and ranks.num_nodes > 1:
        return problem(
            "SLURM",
            f"{told}, and num_nodes={ranks.num_nodes} would wait for the others for ever; submit "
            "it with --nodes and --ntasks-per-node under another name, and start it with srun.",
        )
    return note("SLURM", f"{told}, and starts the processes of this node itself.")


def _refused_by_lightning(slurm: Slurm) -> list[Finding]:
    assert slurm.ntasks is not None
    if slurm.ntasks == 1 or slurm.per_node is not None:
        return []
    each = max(slurm.ntasks // (slurm.nodes or slurm.job_nodes or 1), 1)
    text = f"--ntasks={slurm.ntasks} without --ntasks-per-node, which Lightning refuses"
    return [problem("SLURM", f"{text}; submit with --ntasks-per-node={each}.")]


def _check_counts(devices: int, num_nodes: int, slurm: Slurm) -> list[Finding]:
    found = []
    nodes = slurm.nodes or slurm.job_nodes
    if slurm.per_node is not None and slurm.per_node != devices:
        text = f"--ntasks-per-node={slurm.per_node}, but trainer.devices={devices}"
        found.append(f"{text}; set --trainer.devices={slurm.per_node}.")
    if nodes is not None and nodes != num_nodes:
        text = f"the job has {count(nodes, 'node')}, but trainer.num_nodes={num_nodes}"
        found.append(f"{text}; set --trainer.num_nodes={nodes}.")
    if not found and slurm.ntasks != devices * num_nodes:
        text = f"{count(slurm.ntasks or 0, 'task')}, but the run has {devices * num_nodes} ranks: "
        found.append(f"{text}it would wait for the rest; submit with --ntasks-per-node={devices}.")
    return [problem("SLURM", text) for text in found]


def _told(ranks: Ranks) -> str:
    return f"{ranks.devices} x {count(ranks.num_nodes, 'node')}"
