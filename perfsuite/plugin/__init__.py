"""The pytest plugin: markers, the `bench` fixture, skips, statuses and reports. It holds the hooks."""

from perfsuite.plugin.benchmark import (
    pytest_benchmark_compare_machine_info as pytest_benchmark_compare_machine_info,
)
from perfsuite.plugin.benchmark import pytest_benchmark_group_stats as pytest_benchmark_group_stats
from perfsuite.plugin.benchmark import (
    pytest_benchmark_update_machine_info as pytest_benchmark_update_machine_info,
)
from perfsuite.plugin.collection import pytest_collection_finish as pytest_collection_finish
from perfsuite.plugin.collection import pytest_collection_modifyitems as pytest_collection_modifyitems
from perfsuite.plugin.collection import pytest_itemcollected as pytest_itemcollected
from perfsuite.plugin.collection import pytest_make_parametrize_id as pytest_make_parametrize_id
from perfsuite.plugin.collection import pytest_report_collectionfinish as pytest_report_collectionfinish
from perfsuite.plugin.ending import pytest_report_teststatus as pytest_report_teststatus
from perfsuite.plugin.ending import pytest_sessionfinish as pytest_sessionfinish
from perfsuite.plugin.ending import pytest_terminal_summary as pytest_terminal_summary
from perfsuite.plugin.options import pytest_addoption as pytest_addoption
from perfsuite.plugin.options import pytest_configure as pytest_configure
from perfsuite.plugin.options import pytest_unconfigure as pytest_unconfigure
from perfsuite.plugin.run import bench as bench
from perfsuite.plugin.run import pytest_runtest_makereport as pytest_runtest_makereport
from perfsuite.plugin.run import pytest_runtest_setup as pytest_runtest_setup
