from importlib import resources

import yaml

from perfsuite.case.case import Topology
from perfsuite.dry.cuda import ONE_KERNEL, _answers
from perfsuite.dry.machine import ANY_GPU, pretended_gpu

FUNCTIONS = resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"


def test_torch_answers_as_on_the_machine() -> None:
    answers = _answers(pretended_gpu(ANY_GPU, Topology(processes_per_node=8)))
    assert (answers["device_count"](), answers["get_device_name"](0)) == (8, "NVIDIA H100 80GB HBM3")


def test_knows_every_one_kernel_gpu_operator() -> None:
    """torch chooses by these words whether an operator is one kernel or a chain of others."""
    functions = {
        each["func"].partition("(")[0]: each for each in yaml.load(FUNCTIONS.read_text(), yaml.CSafeLoader)
    }

    def dispatch(name: str) -> set[str]:
        words = functions[name].get("dispatch", {})
        return {key.strip() for keys in words for key in keys.split(",")}

    split = {
        name
        for name, each in functions.items()
        if "CompositeImplicitAutograd" in dispatch(name)
        and "CUDA" in dispatch(name) | dispatch(each.get("structured_delegate", name))
    }
    assert split >= {"silu_backward"}
    assert split <= set(ONE_KERNEL)
    assert set(ONE_KERNEL) - split == {"_fused_rms_norm_backward"}, "it has a kernel for CUDA, and no other"
