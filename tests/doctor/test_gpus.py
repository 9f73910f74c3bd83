import pytest

from perfsuite.doctor.gpus import device_rows, gpu_rows, gpu_rows_here
from perfsuite.doctor.rows import Row
from perfsuite.errors import MachineError
from tests.node.fake_nvml import Nvml, NVMLError
from tests.samples import make_gpu_machine, make_machine, make_report

H100 = make_gpu_machine()
LOST = "GPU 1 (00000000:1C:00.0): 2 memory errors that ECC could not correct"


@pytest.fixture(autouse=True)
def _all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def on_two_gpus(**changes: object) -> dict[str, Row]:
    """Return the rows of a machine with two GPUs. The second GPU gives the answers in `changes`."""
    return {row.check: row for row in gpu_rows_here(make_gpu_machine(count=2), Nvml({}, changes))}


def test_gpus_that_are_set_up_alike_pass() -> None:
    rows = on_two_gpus()
    assert {check: (row.status, row.found) for check, row in rows.items()} == {
        "GPU hardware": ("pass", "the GPU driver reports no fault"),
        "power limit": ("pass", "700 W"),
        "clocks": ("pass", "SM up to 1980 MHz, application clock 1980 MHz"),
        "ECC": ("pass", "on"),
        "persistence mode": ("pass", "on"),
        "NVLink": ("pass", "18 up"),
        "NVLink fabric": ("pass", "initialized"),
        "PCIe": ("pass", "16 lanes"),
    }
    assert gpu_rows(make_machine()) == []


LINKS = "GPU 0: 18 up, GPU 1: 17 up, 1 down"
NO_FABRIC = "not initialized: GPU 1 (00000000:1C:00.0)"
LIMITED = "limited to 500 W, but its default is 700 W"
NARROW = "GPU 1 (00000000:1C:00.0) uses 8 of 16 lanes"
OFF = "GPU 0: on, GPU 1: off"


@pytest.mark.parametrize(
    ("function", "answer", "check", "said"),
    [
        ("nvmlDeviceGetEnforcedPowerLimit", (500_000,), "power limit", LIMITED),
        ("nvmlDeviceGetTotalEccErrors", (2,), "GPU hardware", LOST),
        ("nvmlDeviceGetApplicationsClock", (1200,), "clocks", "SM up to 1980 MHz, application clock 1200"),
        ("nvmlDeviceGetEccMode", ([0, 0],), "ECC", OFF),
        ("nvmlDeviceGetPersistenceMode", (0,), "persistence mode", OFF),
        ("nvmlDeviceGetRemappedRows", ((0, 0, 0, 1),), "GPU hardware", "have the card replaced"),
        ("nvmlDeviceGetNvLinkState", (1,) * 17 + (0,), "NVLink", LINKS),
        ("fabric", (1, 0), "NVLink fabric", NO_FABRIC),
        ("nvmlDeviceGetCurrPcieLinkWidth", (8,), "PCIe", NARROW),
    ],
)
def test_a_gpu_unlike_the_others_is_named(function: str, answer: object, check: str, said: str) -> None:
    rows = on_two_gpus(**{function: answer})
    assert [name for name, row in rows.items() if row.status != "pass"] == [check]
    assert rows[check].status == ("unknown" if check in ("power limit", "PCIe") else "fail")
    assert said in rows[check].found
    assert ("nvidia-fabricmanager" in str(rows[check].advice)) == (function == "fabric")


def test_unreported_nvml_values_are_unknown() -> None:
    no = Nvml.NVMLError_NotSupported("Not Supported")
    silent = {
        **{f"nvmlDeviceGet{name}": no for name in ("EccMode", "EnforcedPowerLimit", "NvLinkState")},
        **{f"nvmlDeviceGet{name}": no for name in ("ApplicationsClock", "MaxClockInfo")},
        "fabric": (0, 0),
    }
    rows = gpu_rows_here(make_gpu_machine(count=2), Nvml(silent, silent))
    assert {row.check for row in rows if row.status == "unknown"} == {"ECC", "power limit", "clocks"}
    assert not [row.check for row in rows if "NVLink" in row.check]
    [row] = gpu_rows_here(make_gpu_machine(count=1), Nvml({}, init=Nvml.NVMLError("Driver Not Loaded")))
    assert (row.check, row.status) == ("NVML", "unknown")
    assert "Driver Not Loaded" in row.found


def test_unread_nvlink_errors_pass() -> None:
    rows = on_two_gpus(nvmlDeviceGetFieldValues=NVMLError("Unknown Error"))
    assert (rows["GPU hardware"].status, rows["NVLink"].status) == ("pass", "pass")


def test_persistence_mode_that_is_off_is_advised() -> None:
    off = {"nvmlDeviceGetPersistenceMode": (0,)}
    rows = {row.check: row for row in gpu_rows_here(make_gpu_machine(count=2), Nvml(off, off))}
    persistence = rows["persistence mode"]
    assert (persistence.status, persistence.found) == ("unknown", "off")
    assert "locked clocks are lost" in str(persistence.advice)


def test_one_gpu_may_lack_its_fabric() -> None:
    """A virtual machine without the NVSwitch reports forever that the fabric is in progress."""
    rows = {row.check: row for row in gpu_rows_here(make_gpu_machine(count=1), Nvml({"fabric": (2, 0)}))}
    assert rows["NVLink fabric"].status == "unknown"


def test_silent_nvml_fails_one_check() -> None:
    def ask(module: str, *words: str) -> None:
        raise MachineError("NVML did not answer within 30 s")

    [row] = gpu_rows(H100, ask=ask)
    assert (row.status, row.found) == ("fail", "NVML did not answer within 30 s")


@pytest.mark.launch
def test_nvml_is_called_in_another_process() -> None:
    """Here there is no driver, so the call fails, and the other process reports that."""
    [row] = gpu_rows(make_gpu_machine(count=1))
    assert (row.check, row.status) == ("NVML", "unknown")


@pytest.mark.parametrize(
    ("slowest", "status", "share"),
    [(2760.0, "pass", None), (2400.0, "unknown", "20%"), (2220.0, "fail", "26%")],
)
def test_compares_gpus_with_their_peers(slowest: float, status: str, share: str | None) -> None:
    reports = [
        make_report(
            rank, device_probe={"copy_gb_s": 3000.0 if rank != 3 else slowest, "matmul_tflops": 700.0}
        )
        for rank in range(8)
    ]
    copy, matmul = device_rows(reports, H100)
    assert (copy.status, copy.found) == (status, f"{slowest:.0f} to 3000 over 8 GPUs")
    assert share is None or f"GPU 3 is {share} slower than the fastest" in str(copy.advice)
    assert (matmul.status, matmul.found) == ("pass", "700 to 700 over 8 GPUs, 71% of the data sheet's peak")
    assert device_rows(reports, make_machine()) == []


def test_compares_a_single_gpu_with_its_data_sheet() -> None:
    report = make_report(device_probe={"copy_gb_s": 3000.0, "matmul_tflops": 300.0})
    copy, matmul = device_rows([report], make_gpu_machine(count=1))
    assert (copy.status, matmul.status) == ("unknown", "fail")
    assert "30% of the data sheet's peak" in matmul.found
