"""Before torch is imported, and for the processes that tests start."""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest

# Tests run in parallel, one process a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Some virtual machines advertise AMX without granting it; oneDNN's bf16 matrix product then dies of
# an illegal instruction. The limit is one step below.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def pytest_addoption(parser):
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in a random order")


def pytest_xdist_auto_num_workers(config):
    """Named files run in this process, which starts sooner than workers; None: one a core."""
    return 0 if all(".py" in argument for argument in config.args) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before -m asks for the marks
def pytest_collection_modifyitems(config, items):
    mark_slow_cases(items)
    yield
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)


def mark_slow_cases(items):
    """Mark as slow the cases of a test that its `pytest.mark.quick(id, ...)` does not list.

    Without ids, the first case is quick.
    """
    quick, unused = {}, {}
    for item in items:
        if marker := item.get_closest_marker("quick"):
            name = item.nodeid.split("[")[0]
            if name not in quick:
                quick[name] = marker.args or (item.callspec.id,)
                unused[name] = set(quick[name])
            unused[name].discard(item.callspec.id)
            if item.callspec.id not in quick[name]:
                item.add_marker("slow")
    stale = {name: ids for name, ids in unused.items() if ids}
    if stale and not any("::" in argument for argument in items[0].config.args):
        raise pytest.UsageError(f"pytest.mark.quick lists cases that do not exist: {stale}")


SIGNALS = {*signal.Signals} - {signal.SIGCHLD}  # which torch keeps, for good, for a DataLoader


@pytest.fixture(autouse=True)
def _nothing_is_left_that_handles_signals():
    """What one test leaves decides how a later one ends, and which that is depends on the order."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    left = [number for number in before if signal.getsignal(number) != before[number]]
    for number in left:  # so that this test fails alone
        signal.signal(number, before[number])
    module = sys.modules.get("lit_diffusion.signals")
    recorder = module and module._recorder
    if recorder:
        module._recorder = None
    assert (left, recorder) == ([], None)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def terminal_signals():
    """Ctrl-C and hang-ups arrive: shells start background jobs, and nohup all, without them."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def swept(tmp_path_factory) -> Path:
    """The arms baseline and slow of a sweep; not to be changed."""
    from support.sweeping import sweep_into  # which imports torch

    return sweep_into(tmp_path_factory.mktemp("swept"))


@pytest.fixture
def one_run(swept) -> None:
    """A copy of them, as out in the current folder."""
    shutil.copytree(swept, "out")
