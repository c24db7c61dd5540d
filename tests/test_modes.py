from support.plain_module import PlainModule

from lit_diffusion.modes import eval_mode


def test_each_part_has_its_own_mode_back_after_an_exception_too():
    module = PlainModule().train()
    module.inner[1].eval()
    modes = [part.training for part in module.modules()]
    try:
        with eval_mode(module):
            assert not any(part.training for part in module.modules())
            raise KeyError
    except KeyError:
        assert [part.training for part in module.modules()] == modes
