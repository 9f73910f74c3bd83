"""Helpers: small handmade traces of three steps in the format of torch's profiler, and profiles."""

from typing import Any

from perfsuite.results.profile import LaunchProfile, Profile, StepSplit, TakenProfile, Work, merged

Event = dict[str, Any]
STEP_US = 1000
"""The duration of each step on the host."""
MAIN = 1
GLOO = 2


def event(name: str, begin: float, length: float, cat: str = "cpu_op", tid: int = MAIN, **args: Any) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": length, "tid": tid, "args": args}


def annotation(name: str, begin: float, length: float, tid: int = MAIN) -> Event:
    return event(name, begin, length, "user_annotation", tid)


def steps(count: int = 4) -> list[Event]:
    """Return steps with a gap between them. The last step only marks the end of the previous one."""
    return [
        annotation(f"ProfilerStep#{number + 1}", number * STEP_US, STEP_US - 10) for number in range(count)
    ]


def cpu_step(at: float) -> list[Event]:
    """Return a step on a CPU.

    It has 100 us of data, 300 us of compute, a collective of 400 us, and 100 us of the optimizer. Compute
    hides 100 us of the collective.
    """
    return [
        annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 100),
        event("aten::stack", at + 10, 20),
        event("aten::linear", at + 100, 200),
        event("aten::addmm", at + 120, 150),
        event("autograd::engine::evaluate_function: AddmmBackward0", at + 300, 110),
        event("AddmmBackward0", at + 305, 105),
        event("aten::mm", at + 310, 100),
        annotation("gloo:all_reduce", at + 310, 400, GLOO),
        event("aten::copy_", at + 320, 50, tid=GLOO),
        event("c10d::allreduce_", at + 420, 5),
        annotation("Optimizer.step#AdamW.step", at + 800, 100),
        event("aten::add_", at + 810, 40),
    ]


def cpu_trace() -> list[Event]:
    """Return three steps on a CPU, and the beginning of a fourth."""
    made = [step_event for number in range(4) for step_event in cpu_step(number * STEP_US)]
    return [*steps(), *made, {"ph": "M", "name": "process_name"}, {"ph": "s", "cat": "fwdbwd", "ts": 1}]


GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(cutlass::Params)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int, float*)"


def gpu_step(number: int, *, sync: bool = False) -> list[Event]:
    """Return a step on a GPU that lags 500 us behind the host.

    It has kernels of 400 us, an all-gather of 300 us, and 100 us of the optimizer. Compute hides 100 us of
    the all-gather. The GPU is idle for 200 us. During 50 us of this idle time, the host waits for data.
    """
    at = number * STEP_US
    ids = number * 10
    on_gpu = at + 500
    made = [
        event("aten::mm", at + 5, 20),
        event("cudaLaunchKernel", at + 10, 5, "cuda_runtime", correlation=ids + 1),
        event("cudaLaunchKernelExC", at + 30, 5, "cuda_driver", correlation=ids + 2),
        annotation("Optimizer.step#AdamW.step", at + 200, 100),
        event("aten::add_", at + 205, 20),
        event("cudaLaunchKernel", at + 210, 5, "cuda_runtime", correlation=ids + 3),
        event(GEMM, on_gpu, 400, "kernel", 7, correlation=ids + 1, stream=7),
        event(GATHER, on_gpu + 300, 300, "kernel", 20, correlation=ids + 2, stream=20),
        event(ADD, on_gpu + 600, 100, "kernel", 7, correlation=ids + 3, stream=7),
        annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at + 250, 50),
    ]
    if sync:
        made += [
            event("aten::_local_scalar_dense", at + 100, 80),
            event("cudaMemcpyAsync", at + 105, 5, "cuda_runtime", correlation=ids + 4),
            event("Memcpy DtoH (Device -> Pageable)", on_gpu + 700, 2, "gpu_memcpy", 7, correlation=ids + 4),
            event("cudaStreamSynchronize", at + 115, 60, "cuda_runtime", correlation=ids + 5),
        ]
    return made


def gpu_trace(*, sync: bool = False) -> list[Event]:
    """Return three steps on a GPU, and the beginning of a fourth."""
    made = [step_event for number in range(4) for step_event in gpu_step(number, sync=sync)]
    return [*steps(), *made]


def make_profile(**changes: Any) -> Profile:
    """Return the profile of a step of 100 ms on a GPU."""
    split = StepSplit(
        step_us=100_000,
        compute_us=60_000,
        optimizer_us=10_000,
        exposed_us={"all_gather": 12_100},
        hidden_us={"all_gather": 20_000},
        idle_us=17_900,
    )
    return Profile(
        device="cuda",
        steps=3,
        split=split,
        operators=(
            Work(name="aten::mm", calls=24, us=9000),
            Work(name="aten::view", calls=90, us=500),
            Work(name="flash_attn::_flash_attention_forward", calls=4, us=800),
        ),
        kernels=(
            Work(name="nvjet_gemm", calls=24, us=40_000),
            Work(name="ncclDevKernel_AllGather_RING_LL", calls=8, us=32_100),
        ),
        host_syncs=(Work(name="cudaDeviceSynchronize", calls=1, us=50),),
    ).replace(**changes)


def unseen_profile(share: float) -> Profile:
    """Return the profile of a step.

    Of its busy time, `share` belongs to kernels that no operator launched.
    """
    split = make_profile().split
    return make_profile(split=split.replace(unseen_us=share * split.busy_us))


def launch_profile(*profiles: Profile) -> LaunchProfile:
    """Return the profile of a launch whose ranks have these profiles."""
    return merged(dict(enumerate(profiles or (make_profile(),))))


def taken(*profiles: Profile) -> TakenProfile:
    traces = tuple(f"/tmp/runs/x/profile/trace-{rank}.json.gz" for rank in range(len(profiles) or 1))
    return TakenProfile(profile=launch_profile(*profiles), traces=traces)


EAGER = make_profile(operators=(*make_profile().operators, Work(name="aten::bmm", calls=24, us=700)))
"""The profile of a step that computes attention in another way."""
