"""The table of the compiled kernels names tests that exist."""


def test_every_kernel_and_architecture_has_a_test(request):
    suite = request.config.pluginmanager.get_plugin("nbflash-suite")
    assert suite.missing("compile") == []
