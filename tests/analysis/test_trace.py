import pytest

from perfsuite.analysis.trace import reduced
from perfsuite.errors import ReportError
from perfsuite.results.profile import Profile, StepSplit, Work
from tests.traces import GLOO, MAIN, annotation, cpu_step, cpu_trace, event, gpu_trace, steps


def work(profile: Profile, name: str) -> Work:
    (match,) = [entry for entry in (*profile.operators, *profile.kernels) if entry.name == name]
    return match


def test_parts_of_a_cpu_step_add_up_to_it() -> None:
    split = reduced(cpu_trace(), "cpu").split
    assert split == StepSplit(
        step_us=1000,
        data_wait_us=100,
        compute_us=300,  # only in the main thread: copies in gloo's thread are communication
        optimizer_us=100,
        exposed_us={"all_reduce": 300},
        hidden_us={"all_reduce": 100},
        other_us=200,
    )
    assert sum(split.parts().values()) == split.step_us


def test_operator_time_excludes_its_callees() -> None:
    profile = reduced(cpu_trace(), "cpu")
    assert (profile.steps, profile.kernels, profile.unsteady) == (3, (), ())
    assert work(profile, "aten::linear") == Work(name="aten::linear", calls=1, us=50)
    assert (work(profile, "aten::addmm").us, work(profile, "AddmmBackward0").us) == (150, 5)
    all_of_it = reduced([*cpu_trace(), event("aten::a", 950, 5), event("aten::b", 950, 5)], "cpu")
    assert work(all_of_it, "aten::a").us == 0
    assert not any(entry.name.startswith(("autograd::engine", "ProfilerStep")) for entry in profile.operators)
    unended = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1}
    assert reduced([*cpu_trace(), unended, {**unended, "ph": "b", "dur": 9}], "cpu") == profile


def test_operator_time_excludes_callees_one_after_another() -> None:
    calls = [event("aten::a", 500, 60), event("aten::b", 510, 15), event("aten::c", 530, 15)]
    profile = reduced([*cpu_trace(), *calls], "cpu")
    assert [work(profile, name).us for name in ("aten::a", "aten::b", "aten::c")] == [10, 5, 5]


def test_omits_layer_graph_and_number_from_names() -> None:
    for of_one, of_all in (
        ("FSDP::all_gather (layers.{})", "FSDP::all_gather"),
        ("FSDP::backward_prefetch for layers.{}", "FSDP::backward_prefetch"),
        ("## Call CompiledFxGraph f3a{} ##", "## Call CompiledFxGraph"),
        ("triton_poi_fused_add_{}", "triton_poi_fused_add"),
    ):
        layers = [event(of_one.format(layer), 20 + 10 * layer, 5) for layer in range(4)]
        profile = reduced([*cpu_trace(), *layers], "cpu")
        assert work(profile, of_all).calls == pytest.approx(4 / 3, abs=1e-3)


def test_waiting_is_not_computing() -> None:
    """With tensor parallelism, for example, the main thread waits while gloo's threads communicate."""
    waits = [event("_c10d_functional::wait_tensor", 1000 * number + 430, 250) for number in range(3)]
    split = reduced([*cpu_trace(), *waits], "cpu").split
    assert (split.compute_us, split.exposed_us) == (300, {"all_reduce": 300})
    other = event("gloo:broadcast", 400, 200, "user_annotation", GLOO + 1)
    split = reduced([*cpu_trace(), other], "cpu").split
    assert sum(split.parts().values()) == pytest.approx(split.step_us)


def test_omits_communication_that_takes_almost_no_time() -> None:
    short = annotation("gloo:broadcast", 150, 0.3, GLOO + 2)
    shorter = annotation("gloo:barrier", 155, 0.04, GLOO + 2)
    hidden = reduced([*cpu_trace(), short, shorter], "cpu").split.hidden_us
    assert hidden == {"all_reduce": 100, "broadcast": 0.1}


def test_inconstant_calls_are_unsteady() -> None:
    reads = [event("aten::_local_scalar_dense", 1000 * number + 950, 5) for number in range(3)]
    profile = reduced([*cpu_trace(), *reads, event("aten::once", 960, 5)], "cpu")
    assert profile.host_syncs == (Work(name="aten::_local_scalar_dense", calls=1, us=5),)
    assert profile.unsteady == ("aten::once",)
    assert "aten::once" not in profile.calls()


def test_last_step_without_a_next_ends_itself() -> None:
    events = [*steps(3), *(step_event for number in range(3) for step_event in cpu_step(1000 * number))]
    assert reduced(events, "cpu").split.step_us == pytest.approx(2990 / 3, abs=0.1)


def test_parts_of_a_gpu_step_are_its_own_time() -> None:
    split = reduced(gpu_trace(), "cuda").split
    assert split == StepSplit(
        step_us=1000,
        compute_us=400,
        optimizer_us=100,
        exposed_us={"all_gather": 200},
        hidden_us={"all_gather": 100},
        data_wait_us=50,
        idle_us=250,
    )
    assert sum(split.parts().values()) == split.step_us


def test_kernel_belongs_to_its_launching_step() -> None:
    """The last step's kernels begin after the host has left the step.

    Kernels of the next step do not count.
    """
    profile = reduced(gpu_trace(), "cuda")
    assert [(kernel.name, kernel.calls, kernel.us) for kernel in profile.kernels] == [
        ("cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", 1, 400),
        ("ncclDevKernel_AllGather_RING_LL", 1, 300),
        ("at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >", 1, 100),
    ]
    assert not profile.unsteady


@pytest.mark.parametrize(
    ("launch", "cat", "at", "thread"),
    [
        ("cudaGraphLaunch", "cuda_runtime", 60, MAIN),
        ("cudaGraphLaunch", "cuda_runtime", 10, MAIN),  # inductor does this within a node of autograd
        ("cuGraphLaunch", "cuda_driver", 10, MAIN),
        ("cudaLaunchKernel", "cuda_runtime", 60, MAIN),  # a package's code that does not use the dispatcher
        # This kernel is launched in another thread while an operator runs.
        ("cudaLaunchKernel", "cuda_runtime", 10, MAIN + 10),
    ],
)
def test_reports_kernels_without_an_operator(launch: str, cat: str, at: int, thread: int) -> None:
    """The time in which kernels overlap is counted only once."""
    hidden = []
    for number in range(4):
        begin = 1000 * number
        asked = 900 + number
        hidden += [
            event(launch, begin + at, 2, cat, thread, correlation=asked),
            event("void fused(int)", begin + 1210, 60, "kernel", 7, correlation=asked),
            event("void fused2(int)", begin + 1230, 90, "kernel", 9, correlation=asked),
            annotation("FSDP::root_pre_forward", begin + 55, 40),
        ]
    split = reduced([*gpu_trace(), *hidden], "cuda").split
    assert split.unseen_us == pytest.approx(110, abs=0.1)
    assert split.unseen == pytest.approx(split.unseen_us / split.busy_us)


def test_early_work_changes_no_step() -> None:
    """An example of early work is the copy of the next batch on a separate stream before a step has ended."""
    late = event("void k<int>(int)", 510, 200, "kernel", 7, correlation=4711)
    profile = reduced([*gpu_trace(), late], "cuda")
    assert "k<int>" not in profile.calls()
    assert profile.split == reduced(gpu_trace(), "cuda").split
    early = []
    for number, on_gpu in enumerate((550, 1550, 2550, 3012)):
        at = 1000 * number
        asked = 900 + 2 * number
        early += [
            event("cudaMemcpyAsync", at + 10, 5, "cuda_runtime", correlation=asked),
            event("Memcpy HtoD (Pinned -> Device)", on_gpu, 40, "gpu_memcpy", correlation=asked, stream=22),
            event("cudaLaunchKernel", at + 20, 5, "cuda_runtime", correlation=asked + 1),
            event("void normalise<float>(int)", on_gpu + 40, 20, "kernel", correlation=asked + 1, stream=22),
        ]
    assert reduced([*gpu_trace(), *early], "cuda").split.step_us == 1000


def test_gpu_syncs_are_reads_waits_and_copies() -> None:
    """Some events look like waits, but wait for nothing.

    Examples are a value that is on the host already (AdamW reads its `step`), and a copy of activations to
    pinned memory.
    """
    free = []
    for number in range(3):
        at = 1000 * number
        asked = 500 + number
        free += [
            event("aten::_local_scalar_dense", at + 120, 5),
            event("cudaMemcpyAsync", at + 140, 5, "cuda_runtime", correlation=asked),
            event("Memcpy DtoH (Device -> Pinned)", at + 1110, 2, "gpu_memcpy", 7, correlation=asked),
        ]
    waits = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "Memcpy DtoH (Device -> Pageable)")
    for sync in (False, True):
        alone = reduced(gpu_trace(sync=sync), "cuda")
        assert alone.split.unseen == 0, (
            "operators launched all kernels, and kernels of collectives are not checked"
        )
        both = reduced([*gpu_trace(sync=sync), *free], "cuda")
        for profile in (alone, both):
            calls = {call.name: call.calls for call in profile.host_syncs}
            assert calls == dict.fromkeys(waits if sync else (), 1)
        assert both.calls()["aten::_local_scalar_dense"] == 1 + sync, "one of these reads waits"


def test_a_kernel_of_nccl_is_communication() -> None:
    for kernel, kind in (
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(x)", "all_reduce"),
        ("ncclDevKernel_SendRecv(x)", "send_recv"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(x)", "broadcast"),
        ("ncclSymkDevKernel_AllGather_LL(x)", "all_gather"),
        ("ncclDevKernel_AllToAll(x)", "all_to_all"),
    ):
        alone = event(kernel, 1310, 40, "kernel", 20, correlation=2)
        assert kind in reduced([*gpu_trace(), alone], "cuda").split.exposed_us


def test_shortened_kernel_names_stay_distinct() -> None:
    expected = {
        "void k<float>(int)": "k<float>",
        "k(int)": "k",
        "void k<f(at::Iter&)::{lambda()#3}>(int, g(x))": "k<f(at::Iter&)::{lambda()#3}>",
        "void (anonymous namespace)::adam<4, (Mode)0>(Lists)": "anonymous::adam<4, (Mode)0>",
        **{name: name for name in ("nvjet_sm90_tst_256x128", "k)", "Memcpy DtoD (Device -> Device)")},
    }
    long = [f"void k<{'x' * 1000}{end}>(int)" for end in "ab"]
    kernels = [event(name, 600, 5, "kernel", 7, correlation=1) for name in (*expected, *long)]
    names = [kernel.name for kernel in reduced([*gpu_trace(), *kernels], "cuda").kernels]
    assert set(expected.values()) <= set(names)
    assert sorted(map(len, names))[-2:] == [160] * 2, (
        "another length would not match names in stored profiles"
    )


def test_refuses_traces_without_steps_or_kernels() -> None:
    with pytest.raises(ReportError, match="no step"):
        reduced(cpu_step(0), "cpu")
    with pytest.raises(ReportError, match="no GPU kernel"):
        reduced(cpu_trace(), "cuda")
