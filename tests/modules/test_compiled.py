import copy
import pickle

import pytest
import torch
from support.plain_module import make_trainer
from support.tiny_diffusion import images, tiny_diffusion
from torch._dynamo.utils import counters

from lit_diffusion.modules.compiled import check_accumulation


@pytest.fixture(autouse=True)
def _graphs_of_other_tests_are_forgotten():
    torch.compiler.reset()
    counters.clear()


def is_compiled(module):
    return module.network._compiled_call_impl is not None


@pytest.mark.parametrize("mode", ["fast", "", True, "max-autotune-no-cudagraphs"])
def test_other_modes_are_refused(mode):
    with pytest.raises(ValueError, match=r"compile must be 'default', .* or None, got"):
        tiny_diffusion(compile=mode)


def test_gradients_of_cuda_graphs_are_not_accumulated():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for mode, device, micro_batches in (("default", cuda, 4), ("max-autotune", cpu, 4)):
        check_accumulation(mode, device, micro_batches)
    check_accumulation("reduce-overhead", cuda, 1)
    with pytest.raises(ValueError, match="accumulate_grad_batches=4; use compile='default'"):
        check_accumulation("reduce-overhead", cuda, 4)


def test_only_a_fit_compiles(tmp_path):
    module, data = tiny_diffusion(compile="default"), images(4, 4)
    module.generate([0])
    make_trainer(tmp_path).validate(module, data, verbose=False)
    assert not is_compiled(module)
    make_trainer(tmp_path, max_steps=0).fit(module, data)
    assert is_compiled(module)
    assert list(module.state_dict()) == list(tiny_diffusion().state_dict())
    assert not is_compiled(copy.deepcopy(module))
    assert pickle.loads(pickle.dumps(module.network))._compiled_call_impl is None
