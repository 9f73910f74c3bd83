import pytest

from perfsuite.results.device_log import DeviceLog


@pytest.fixture
def log() -> DeviceLog:
    return DeviceLog()
